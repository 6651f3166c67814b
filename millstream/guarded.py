"""The subjects of guarded topics and of the entrances that lead to them. Pure.

What is published to a guarded topic is checked by a guard, a client of the broker, which alone may
write to the topic's own subjects. Those start with a token of their own, so that a broker's
permissions can close them for everybody else:

    _guarded.orders.3.ada              the subject that is stored
    ingress.orders._as.3.ada           where Millstream's clients publish it: the same, checked
    ingress.orders.ada                 where other clients publish it: the guard adds the rest
    _ingress.4KXW.orders.3.ada         the same guard for every message of an atomic batch
"""

from __future__ import annotations

from typing import Final

__all__ = [
    "BATCH_TOKEN",
    "ENTRANCE",
    "GUARDED_TOKEN",
    "GUARD_SECONDS",
    "INSTANCE",
    "OWN_TOKEN",
    "entrance_of",
    "entrance_topic",
    "guard_of_batch",
    "guarded_prefix",
    "guarded_topic",
    "through",
]

GUARDED_TOKEN: Final = "_guarded"
ENTRANCE: Final = "ingress"
INSTANCE: Final = "_ingress"
OWN_TOKEN: Final = "_as"  # what follows is the subject after the prefix, as it is stored
BATCH_TOKEN: Final = "_batch"  # asks which guard takes a batch
# A guard that crashed is started again and one of a new topic is started within this time.
GUARD_SECONDS: Final = 10.0

_START: Final = f"{GUARDED_TOKEN}.".encode()


def guarded_prefix(topic: str) -> str:
    """What the subjects of a guarded topic start with."""
    return f"{GUARDED_TOKEN}.{topic}"


def guarded_topic(subject: bytes) -> str | None:
    """The name in a subject of a guarded topic; None: it is another subject.

    >>> guarded_topic(b"_guarded.orders.ada"), guarded_topic(b"orders.ada")
    ('orders', None)
    """
    if not subject.startswith(_START):
        return None
    return subject.split(b".", 2)[1].decode("utf-8", "replace")


def entrance_of(subject: bytes) -> bytes:
    """Where a message for a subject is published: there, or at the guard's entrance.

    >>> entrance_of(b"_guarded.orders.3.ada"), entrance_of(b"orders.ada")
    (b'ingress.orders._as.3.ada', b'orders.ada')
    """
    if not subject.startswith(_START):
        return subject
    _, topic, rest = subject.split(b".", 2)
    return b"%b.%b.%b.%b" % (ENTRANCE.encode(), topic, OWN_TOKEN.encode(), rest)


def entrance_topic(subject: str) -> str | None:
    """The topic of an entrance that Millstream's clients publish to; None: it is none.

    >>> entrance_topic("ingress.orders._as.3.ada"), entrance_topic("orders.ada")
    ('orders', None)
    """
    tokens = subject.split(".", 3)
    named = len(tokens) > 2 and tokens[0] == ENTRANCE and tokens[2] in (OWN_TOKEN, BATCH_TOKEN)
    return tokens[1] if named else None


def guard_of_batch(topic: str) -> str:
    """Where to ask which guard takes a batch: all its messages must go to the same one."""
    return f"{ENTRANCE}.{topic}.{BATCH_TOKEN}"


def through(instance: str, subject: bytes) -> bytes:
    """Where a message for a subject of a guarded topic is published to reach one guard.

    >>> through("4KXW", b"_guarded.orders.3.ada")
    b'_ingress.4KXW.orders.3.ada'
    """
    return b"%b.%b.%b" % (INSTANCE.encode(), instance.encode(), subject[len(_START) :])
