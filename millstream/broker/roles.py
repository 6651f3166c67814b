"""What each role may do, as subjects the server checks (pure).

The JetStream API is a set of subjects, so a permission is a list of them. Each rule is listed
twice: as it is, and with the domain prefix that a client across a leaf node uses.

A list of subjects alone bounds nobody: the server sends its answer to whatever reply subject a
request names, without checking the asker's permissions there, and an empty answer is a valid
delete. So a bounded user has an account of its own, which imports the calls it may make. The
server replaces the reply of an imported call, and answers in the user's own account, where
nothing else is imported.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from millstream.broker.config import Permissions, Role, User
from millstream.guarded import ENTRANCE, GUARDED_TOKEN, INSTANCE
from millstream.settings import SCHEMAS_TOPIC

__all__ = ["Boundary", "ImportedCall", "boundary_of", "permissions_of"]

# Anything that destroys or changes stored events, or moves leaders: admins only.
_ADMIN_ONLY: Final = (
    "STREAM.DELETE.>",
    "STREAM.PURGE.>",
    "STREAM.UPDATE.>",
    "STREAM.MSG.DELETE.>",
    "STREAM.RESTORE.>",
    "STREAM.SNAPSHOT.>",
    "STREAM.PEER.>",
    "STREAM.LEADER.>",
    "CONSUMER.LEADER.>",
    "ACCOUNT.>",
    "META.>",
    "SERVER.>",
)

# Read-only calls. Not CONSUMER.CREATE: a consumer can deliver to any subject, which is a way to
# publish, and the same call changes other users' consumers.
_READ_ONLY: Final = (
    "INFO",
    "STREAM.NAMES",
    "STREAM.LIST",
    "STREAM.INFO.*",
    "STREAM.MSG.GET.*",
    "DIRECT.GET.>",
    "CONSUMER.NAMES.*",
    "CONSUMER.LIST.*",
    "CONSUMER.INFO.*.*",
)

# The own subjects of guarded topics: only their guard writes there.
_GUARDED: Final = f"{GUARDED_TOKEN}.>"

# The read-only calls of one stream.
_READ_STREAM: Final = (
    "STREAM.INFO.{}",
    "STREAM.MSG.GET.{}",
    "DIRECT.GET.{}",
    "DIRECT.GET.{}.>",
    "CONSUMER.NAMES.{}",
    "CONSUMER.LIST.{}",
    "CONSUMER.INFO.{}.*",
)
# How clients read the schemas of typed topics.
_SCHEMAS: Final = (f"STREAM.MSG.GET.{SCHEMAS_TOPIC}", f"DIRECT.GET.{SCHEMAS_TOPIC}")
# Acks of a subscription. With a domain configured, the domain and a hash of the account come first.
# Each form has its own number of tokens: one that ends in `>` takes in the acks of others, such as
# $JS.ACK.money.payer.orders.audit.1.1.1, and a body of +NXT then pulls from their consumers.
_ACKS: Final = ("$JS.ACK.{}.{}.*.*.*.*.*", "$JS.ACK.*.*.{}.{}.*.*.*.*.>")
# Calls that answer with many messages.
_STREAMED: Final = ("DIRECT.GET.", "CONSUMER.MSG.NEXT.")

# What the server tells every user about itself; it is answered in the user's own account.
_ABOUT_ITSELF: Final = ("$SYS.REQ.USER.INFO",)

# A queue group gives each message to one member: joining one takes messages from the others.
_ANY_QUEUE_GROUP: Final = "> >"


@dataclass(frozen=True, slots=True)
class ImportedCall:
    """A call that a bounded user may make in the account of its topics."""

    subject: str
    streamed: bool = False  # it may be answered by more than one message


@dataclass(frozen=True, slots=True)
class Boundary:
    """The account of a bounded user."""

    account: str
    services: tuple[ImportedCall, ...]  # imported from the account of its topics
    hears: tuple[str, ...]  # subjects whose messages it receives from there


def permissions_of(user: User) -> Permissions:
    """The subjects this user may publish to and subscribe to."""
    if user.permissions is not None:
        return user.permissions
    boundary = boundary_of(user)
    if boundary is not None:
        return Permissions(
            publish=(*(service.subject for service in boundary.services), *_ABOUT_ITSELF),
            subscribe_deny=(_ANY_QUEUE_GROUP,),
        )
    if user.role is Role.ADMIN:
        return Permissions()
    guarded = (_GUARDED,) if user.role is Role.APP else ()
    return Permissions(publish_deny=(*_api(_ADMIN_ONLY), *guarded))


def boundary_of(user: User) -> Boundary | None:
    """The account of this user's own; None if it belongs directly to the account of its topics."""
    if user.permissions is not None or not (user.role is Role.READER or user.topics):
        return None
    own = [f"CONSUMER.MSG.NEXT.{stream}.{name}" for stream, name in user.subscriptions]
    acks = [form.format(*pair) for form in _ACKS for pair in user.subscriptions]
    topics = [_subjects_and_streams(topic) for topic in user.topics]
    reading = tuple(
        call.format(stream) for _, streams in topics for stream in streams for call in _READ_STREAM
    )
    subjects = tuple(subject for names, _ in topics for subject in names)
    # Not the guard's entrances: listening there would look like a guard to who publishes.
    heard = tuple(names[0] for names, _ in topics)
    # A client looks for both forms of a topic's first stream. The other may be another topic's.
    looks = tuple(
        f"STREAM.INFO.{name}{end}"
        for name in (topic.partition(":")[0] for topic in user.topics)
        for end in ("", "-0")
    )
    # An account that does not import INFO answers every call itself: it has no streams.
    bounded = ("INFO", *dict.fromkeys((*looks, *reading)), *_SCHEMAS)
    calls = [*_api((*(bounded if topics else _READ_ONLY), *own)), *acks, *subjects]
    return Boundary(
        # No account has such a name: it cannot have a colon.
        account=f"{user.account}:{user.name}",
        services=tuple(
            ImportedCall(call, any(word in call for word in _STREAMED)) for call in calls
        ),
        hears=heard or (">",),
    )


def _subjects_and_streams(topic: str) -> tuple[list[str], list[str]]:
    """Where a topic or its guard takes events, and its streams; `name:partitions` has many."""
    name, _, partitions = topic.partition(":")
    count = int(partitions or 1)
    entrances = (f"{ENTRANCE}.{name}", f"{ENTRANCE}.{name}.>", f"{INSTANCE}.*.{name}.>")
    subjects = [f"{name}.>", *entrances]
    streams = [name] if count == 1 else [f"{name}-{number}" for number in range(count)]
    return subjects, streams


def _api(calls: Iterable[str]) -> tuple[str, ...]:
    calls = tuple(calls)
    return tuple(f"{root}.{call}" for root in ("$JS.API", "$JS.*.API") for call in calls)
