"""Accounts and users of a broker: frozen values, checked when they are created. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from millstream.broker.checks import check_name, is_public_key, read_choice
from millstream.errors import ConfigError
from millstream.settings import Secret

__all__ = ["DEFAULT_ACCOUNT", "RESERVED_USERS", "Account", "Permissions", "Role", "User"]

# Not the server's own `$G`: that one loses JetStream as soon as a second account exists, so data
# written before the first tenant was added would vanish from sight.
DEFAULT_ACCOUNT: Final = "main"
_PARTITIONS_MAX: Final = 1024  # of a topic that a user is bounded to
RESERVED_USERS: Final = frozenset({"system", "anonymous"})  # of the broker itself
_RESERVED_ACCOUNTS: Final = frozenset({"$SYS", "$G", "system"})


class Role(StrEnum):
    """What a user may do in its account.

    `admin`: everything. `app`: publish, read, declare topics and subscriptions, but not delete,
    purge or reconfigure a topic. `reader`: read everything, change nothing. `trusted`: as
    `app`, and it may write to guarded topics past their guard, as the guard itself does.

    `reader` is a hard boundary, and so is an `app` with `topics` (see `User`). A plain `app` only
    guards against accidents: the server sends the answer to a request to any reply subject that
    the request names, a new stream can forward messages to any subject, and so can a push
    consumer; the broker's own commands are such subjects. Applications that must not trust each
    other belong in separate accounts, or are bounded to their topics.
    """

    ADMIN = "admin"
    APP = "app"
    READER = "reader"
    TRUSTED = "trusted"


@dataclass(frozen=True, slots=True)
class Permissions:
    """Subjects a user may use, instead of what its role says; None means no limit."""

    publish: tuple[str, ...] | None = None
    publish_deny: tuple[str, ...] = ()
    subscribe: tuple[str, ...] | None = None
    subscribe_deny: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class User:
    """A user that may connect; a name is unique over all accounts."""

    name: str
    password: Secret | None = None  # or a key, see `nkey`
    role: Role = Role.APP
    account: str = DEFAULT_ACCOUNT
    # A reader cannot create subscriptions (it could create one that writes elsewhere), but it can
    # be given existing ones to pull from and ack, as (topic stream, subscription) pairs. A message
    # without body and headers ends a pull of several: the rest comes again after its lease.
    subscriptions: tuple[tuple[str, str], ...] = ()
    # An app with topics is bounded: it publishes to these and reads these, and nothing else.
    # "orders", or "orders:8" for a topic with 8 partitions.
    topics: tuple[str, ...] = ()
    permissions: Permissions | None = None  # replaces the role's
    # Public key (U...) to log in with instead of a password; the broker then holds no secret of it.
    nkey: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "role", read_choice(Role, self.role, "role"))
        check_name("user", self.name)
        self._check_login()
        for pair in self.subscriptions:
            for part in pair:
                check_name("stream or subscription", part)
        if self.topics and self.role is not Role.APP:
            raise ConfigError(f"user '{self.name}': topics are for the role app, not {self.role}")
        for topic in self.topics:
            self._check_topic(topic)

    def _check_login(self) -> None:
        if (self.password is None) == (self.nkey is None):
            raise ConfigError(f"user '{self.name}' needs a password or an nkey, and not both")
        if self.nkey is not None:
            if not is_public_key("U", self.nkey):
                raise ConfigError(
                    f"user '{self.name}': {self.nkey[:4]!r}... is not the public key of a user, "
                    f"which has 56 letters and digits and starts with U; copy it as a whole"
                )
        elif not self.secret or "\0" in self.secret:
            raise ConfigError(f"user '{self.name}' needs a password that is not empty")

    @property
    def secret(self) -> str:
        """The password, in clear; empty for a user with a key."""
        return "" if self.password is None else self.password.reveal()

    def _check_topic(self, topic: str) -> None:
        name, colon, partitions = topic.partition(":")
        check_name("topic", name)
        if colon and not (partitions.isdecimal() and 1 <= int(partitions) <= _PARTITIONS_MAX):
            raise ConfigError(
                f"user '{self.name}': write a topic as name or name:partitions (1 to "
                f"{_PARTITIONS_MAX}), not {topic!r}"
            )


@dataclass(frozen=True, slots=True)
class Account:
    """A tenant: its subjects, streams and users are invisible to every other account."""

    name: str
    max_file: int | None = None  # bytes on disk; None: no limit of its own
    max_memory: int | None = None  # bytes in memory
    max_streams: int | None = None
    max_consumers: int | None = None

    def __post_init__(self) -> None:
        check_name("account", self.name)
        if self.name in _RESERVED_ACCOUNTS:
            raise ConfigError(f"the account name '{self.name}' is taken by the server itself")
        for limit in ("max_file", "max_memory", "max_streams", "max_consumers"):
            value = getattr(self, limit)
            if value is not None and value <= 0:
                raise ConfigError(f"account '{self.name}': {limit} must be above 0, not {value}")
