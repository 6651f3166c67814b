"""What a user of the broker may do with a topic, decided from the subjects it may publish to. Pure.

The subjects are the server's own answer about a user, or those that its role gives it
(`broker/roles.py`): a user may do through a gateway what it may do with a client of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from millstream.guarded import ENTRANCE, GUARDED_TOKEN

__all__ = ["Rights", "TopicSubjects", "base_account", "rights_from_answer"]

_API: Final = "$JS.API"
_READ: Final = ("STREAM.INFO.{}", "DIRECT.GET.{}")
_MANAGE: Final = ("STREAM.UPDATE.{}", "STREAM.DELETE.{}", "STREAM.PURGE.{}")
_CREATE: Final = ("STREAM.CREATE.{}",)


class TopicSubjects(NamedTuple):
    """The streams of a topic, and what the subjects of its events start with."""

    streams: tuple[str, ...]
    prefixes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Rights:
    """The subjects that a user may publish to, in an account."""

    user: str
    account: str
    publish: tuple[str, ...] | None = None  # None: all
    publish_deny: tuple[str, ...] = ()
    # A user of a topic with 1,000 partitions has 30,000 rules, most of them without wildcards.
    _rules: frozenset[str] = field(init=False, repr=False, compare=False)
    _patterns: tuple[list[str], ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        rules = self.publish or ()
        patterns = tuple(rule.split(".") for rule in rules if "*" in rule or ">" in rule)
        object.__setattr__(self, "_rules", frozenset(rules))
        object.__setattr__(self, "_patterns", patterns)

    @property
    def unlimited(self) -> bool:
        """Whether it may do everything in its account."""
        return self.publish is None and not self.publish_deny

    def belongs_to(self, account: str) -> bool:
        """Whether the topics of this user are those of an account.

        A bounded user has an account of its own, which imports calls of the other one.
        """
        return self.account in (account, f"{account}:{self.user}")

    def may_publish(self, subject: str) -> bool:
        """Whether it may publish to all subjects that a pattern stands for."""
        allowed = self.publish is None or subject in self._rules
        if not allowed:
            wanted = subject.split(".")
            allowed = any(_covers(pattern, wanted) for pattern in self._patterns)
        return allowed and not any(_overlaps(rule, subject) for rule in self.publish_deny)

    def may_read(self, topic: TopicSubjects) -> bool:
        """Whether it may read every partition of a topic."""
        return self._may_call(_READ, topic.streams)

    def may_write(self, topic: TopicSubjects) -> bool:
        """Whether it may publish any event to a topic, or to the guard of a guarded one."""
        return all(self.may_publish(f"{_entrance(prefix)}.>") for prefix in topic.prefixes)

    def may_create(self, topic: str) -> bool:
        """Whether it may create a topic of this name, with any number of partitions."""
        return self._may_call(_CREATE, (topic, f"{topic}-0"))

    def may_manage(self, topic: TopicSubjects) -> bool:
        """Whether it may delete a topic, its events, or change its settings."""
        return self._may_call(_MANAGE, topic.streams)

    def may_join(self, group: str) -> bool:
        """Whether it may be a member of a group, which takes events from the other members.

        Users that may create consumers may join any. The others have the groups that start with
        their name and a dot, which no other user's name can, and the subscriptions they were given.
        """
        if self._may_call(("CONSUMER.CREATE.{}.>", "CONSUMER.DELETE.{}.*"), ("*",)):
            return True
        if group == self.user or group.startswith(f"{self.user}."):
            return True
        given = f"{_API}.CONSUMER.MSG.NEXT."
        names = (rule.removeprefix(given) for rule in self.publish or () if rule.startswith(given))
        return any(name.partition(".")[2] == group for name in names)

    def _may_call(self, calls: Iterable[str], streams: Sequence[str]) -> bool:
        return all(
            self.may_publish(f"{_API}.{call.format(stream)}")
            for call in calls
            for stream in streams
        )


def rights_from_answer(data: Mapping[str, Any]) -> Rights:
    """The rights in the server's answer to the user that asked who it is."""
    rules = (data.get("permissions") or {}).get("publish") or {}
    allow = rules.get("allow")
    return Rights(
        user=str(data.get("user", "")),
        account=str(data.get("account", "")),
        publish=None if not allow else tuple(map(str, allow)),
        publish_deny=tuple(map(str, rules.get("deny") or ())),
    )


def base_account(account: str, user: str) -> str:
    """The account of a user's topics: its own, or that whose calls its own account imports.

    >>> base_account("main", "app"), base_account("main:ann", "ann")
    ('main', 'main')
    """
    return account.removesuffix(f":{user}")


def _entrance(prefix: str) -> str:
    """Where events of a topic are published: a guarded one has an entrance of its own."""
    first, _, topic = prefix.partition(".")
    return f"{ENTRANCE}.{topic.partition('.')[0]}" if first == GUARDED_TOKEN else prefix


def _covers(allowed: list[str], asked: list[str]) -> bool:
    """Whether a rule allows every subject that the wanted pattern stands for, both as tokens."""
    for index, token in enumerate(allowed):
        if index >= len(asked):
            return False
        if token == ">":
            return True
        if asked[index] == ">" or token not in ("*", asked[index]):
            return False
    return len(allowed) == len(asked)


def _overlaps(rule: str, wanted: str) -> bool:
    """Whether there is a subject that both patterns stand for."""
    left, right = rule.split("."), wanted.split(".")
    for one, other in zip(left, right, strict=False):
        if ">" in (one, other):
            return True
        if one != other and "*" not in (one, other):
            return False
    return len(left) == len(right)
