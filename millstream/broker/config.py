"""What a broker is told to be: frozen values, checked when they are made.

    BrokerSettings(data=Path("/var/lib/mill"), host="0.0.0.0", port=4222, auth=True)

`render.py` turns them into the server's configuration text.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Final

from millstream.errors import ConfigError
from millstream.settings import Secret, data_folder

__all__ = [
    "DEFAULT_ACCOUNT",
    "Account",
    "BrokerSettings",
    "ClusterSettings",
    "Durability",
    "Encryption",
    "LeafRemote",
    "LeafSettings",
    "Limits",
    "Permissions",
    "Role",
    "ServerTls",
    "User",
    "is_loopback",
]

# Not the server's own `$G`: that one loses JetStream as soon as a second account exists, so data
# written before the first tenant was added would vanish from sight.
DEFAULT_ACCOUNT: Final = "main"
_RESERVED_ACCOUNTS: Final = frozenset({"$SYS", "$G", "system"})
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,62}")
_ROUTE: Final = re.compile(r"[A-Za-z0-9.:\[\]_-]+:\d{1,5}")
_MEBIBYTE: Final = 1024 * 1024


class Durability(StrEnum):
    """When the broker calls an event stored.

    `fsync`: on disk before the ack. `periodic`: in the system's cache at the ack, on disk within
    `sync_interval`; survives a crash of the broker, not of the machine. `memory`: gone when the
    broker stops.
    """

    FSYNC = "fsync"
    PERIODIC = "periodic"
    MEMORY = "memory"


class Role(StrEnum):
    """What a user may do in its account.

    `admin`: everything. `app`: publish, read, declare topics and subscriptions, but not delete,
    empty or reconfigure a topic. `reader`: look at everything, change nothing.

    `reader` is a wall. `app` is a railing: who may create streams can make one that forwards
    messages to any subject of the account, the broker's own commands among them. Applications
    that must not trust each other belong in accounts of their own.
    """

    ADMIN = "admin"
    APP = "app"
    READER = "reader"


@dataclass(frozen=True, slots=True)
class Permissions:
    """Subjects a user may use, instead of what its role says; None means no limit."""

    publish: tuple[str, ...] | None = None
    publish_deny: tuple[str, ...] = ()
    subscribe: tuple[str, ...] | None = None
    subscribe_deny: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class User:
    """Somebody who may connect; a name is unique over all accounts."""

    name: str
    password: Secret
    role: Role = Role.APP
    account: str = DEFAULT_ACCOUNT
    # A reader cannot make subscriptions (it could make one that writes elsewhere), but it can be
    # given existing ones to pull from and acknowledge, as (topic stream, subscription) pairs.
    subscriptions: tuple[tuple[str, str], ...] = ()
    permissions: Permissions | None = None  # replaces the role's

    def __post_init__(self) -> None:
        object.__setattr__(self, "role", _choice(Role, self.role, "role"))
        _check_name("user", self.name)
        if not self.password.reveal() or "\0" in self.password.reveal():
            raise ConfigError(f"user '{self.name}' needs a password that is not empty")
        for pair in self.subscriptions:
            for part in pair:
                _check_name("stream or subscription", part)


@dataclass(frozen=True, slots=True)
class Account:
    """A tenant: its subjects, streams and users are invisible to every other account."""

    name: str
    max_file: int | None = None  # bytes on disk; None: no limit of its own
    max_memory: int | None = None  # bytes in memory
    max_streams: int | None = None
    max_consumers: int | None = None

    def __post_init__(self) -> None:
        _check_name("account", self.name)
        if self.name in _RESERVED_ACCOUNTS:
            raise ConfigError(f"the account name '{self.name}' is taken by the server itself")
        for limit in ("max_file", "max_memory", "max_streams", "max_consumers"):
            value = getattr(self, limit)
            if value is not None and value <= 0:
                raise ConfigError(f"account '{self.name}': {limit} must be above 0, not {value}")


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one server; None means chosen from this machine when it starts."""

    max_payload: int = 8 * _MEBIBYTE  # bytes; a pack of several thousand events fits
    max_file_store: int | None = None  # bytes of all streams on disk; None: below the free disk
    max_memory_store: int | None = None  # bytes of all streams in memory; None: a quarter of RAM
    max_connections: int = 65_536
    default_max_consumers: int = 100_000  # a stream; the server's 1,000 is soon used up by readers

    def __post_init__(self) -> None:
        for name in ("max_payload", "max_file_store", "max_memory_store", "max_connections"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ConfigError(f"{name} must be above 0, not {value}")
        if self.max_payload > 64 * _MEBIBYTE:
            raise ConfigError(
                f"max_payload is {self.max_payload:,} bytes; the server takes 64 MiB at most"
            )


@dataclass(frozen=True, slots=True)
class Encryption:
    """Encryption at rest (AES). The key is a text; give it, or a file that holds it.

    With neither, `encryption.key` in the data folder is used, and made (0600) when the folder is
    new. Keep the key away from the data if stolen disks are what you fear.
    """

    key: Secret | None = None
    key_file: Path | None = None
    previous: Secret | None = None  # the key to rotate away from, once

    def __post_init__(self) -> None:
        if self.key is not None and self.key_file is not None:
            raise ConfigError("encryption: give key or key_file, not both")
        for secret in (self.key, self.previous):
            if secret is not None and len(secret.reveal()) < 16:
                raise ConfigError("encryption: a key needs at least 16 characters")


@dataclass(frozen=True, slots=True)
class ServerTls:
    """Certificate files of the server; `ca` and `verify` ask clients for theirs."""

    cert: Path
    key: Path
    ca: Path | None = None
    verify: bool = False  # clients must show a certificate signed by `ca`
    handshake_first: bool = False  # TLS before the server's greeting

    def __post_init__(self) -> None:
        for file in (self.cert, self.key, self.ca):
            if file is not None and not Path(file).is_file():
                raise ConfigError(f"TLS: there is no file {file}")
        if self.verify and self.ca is None:
            raise ConfigError("TLS: verify needs ca, the file of authorities that sign clients")


@dataclass(frozen=True, slots=True)
class ClusterSettings:
    """This node's place in a cluster that spans machines (`up --join`)."""

    node: str  # unique in the cluster, and the same at every start
    routes: tuple[str, ...]  # host:port of the nodes of the cluster, this one may be among them
    secret: Secret  # the same on every node; without it nobody joins
    host: str = "127.0.0.1"
    port: int = 6222
    tls: ServerTls | None = None

    def __post_init__(self) -> None:
        _check_name("node", self.node)
        _check_port("cluster port", self.port)
        if len(self.secret.reveal()) < 16:
            raise ConfigError("cluster: the shared secret needs at least 16 characters")
        if not self.routes:
            raise ConfigError("cluster: name at least one other node as host:port")
        for route in self.routes:
            if _ROUTE.fullmatch(route) is None:
                raise ConfigError(f"cluster: a route is host:port, not {route!r}")


@dataclass(frozen=True, slots=True)
class LeafRemote:
    """A hub that this broker connects out to as a leaf node."""

    url: str  # nats-leaf://host:port
    user: str | None = None
    password: Secret | None = None
    account: str = DEFAULT_ACCOUNT  # the account here that is joined to the hub's

    def __post_init__(self) -> None:
        if not re.fullmatch(r"(nats-leaf|tls|nats|ws|wss)://[A-Za-z0-9.:\[\]_-]+", self.url):
            raise ConfigError(
                f"leaf node: write the hub as nats-leaf://host:port, user and password apart, "
                f"not {self.url!r}"
            )
        if (self.user is None) != (self.password is None):
            raise ConfigError("leaf node: give user and password, or neither")


@dataclass(frozen=True, slots=True)
class LeafSettings:
    """Leaf nodes: others that connect in (`port`), hubs that this one connects to (`remotes`)."""

    port: int | None = None  # listen for leaf nodes; 0: any free; None: do not listen
    host: str = "127.0.0.1"
    remotes: tuple[LeafRemote, ...] = ()

    def __post_init__(self) -> None:
        if self.port is not None:
            _check_port("leaf node port", self.port)
        if self.port is None and not self.remotes:
            raise ConfigError("leaf nodes: give a port to listen on, or remotes to connect to")


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerSettings:
    """Everything about one broker; what is not given has a safe default."""

    data: Path = field(default_factory=data_folder)
    host: str = "127.0.0.1"  # any other address needs auth or users
    port: int = 0  # 0: any free one, kept for the life of the data folder
    monitor_port: int = 0  # always on loopback; the same rule
    name: str = "millstream"  # of the server or cluster, as shown to clients
    durability: Durability = Durability.FSYNC
    sync_interval: float = 5.0  # seconds; for `periodic` only
    limits: Limits = field(default_factory=Limits)
    encryption: Encryption | None = None
    auth: bool = False  # make users admin, app and reader for every account
    users: tuple[User, ...] = ()
    accounts: tuple[Account, ...] = ()  # tenants, beside the default account
    tls: ServerTls | None = None
    cluster: ClusterSettings | None = None
    leaf: LeafSettings | None = None
    domain: str | None = None  # JetStream domain, needed with leaf nodes
    raw: str = ""  # server configuration text appended as it is

    def __post_init__(self) -> None:
        object.__setattr__(self, "data", Path(self.data).absolute())
        object.__setattr__(self, "durability", _choice(Durability, self.durability, "durability"))
        _check_host(self.host)
        _check_port("port", self.port)
        _check_port("monitor_port", self.monitor_port)
        _check_name("broker", self.name)
        if self.domain is not None:
            _check_name("domain", self.domain)
        if self.sync_interval <= 0:
            raise ConfigError(f"sync_interval must be above 0 seconds, not {self.sync_interval}")
        self._check_users()
        if not is_loopback(self.host) and not self.secured:
            raise ConfigError(
                f"listening on {self.host} opens the broker to the network without a password. "
                f"Add users (--auth), or listen on 127.0.0.1"
            )
        if self.durability is Durability.MEMORY and self.encryption is not None:
            raise ConfigError("encryption at rest and durability 'memory' exclude each other")

    def _check_users(self) -> None:
        known = {DEFAULT_ACCOUNT}
        for account in self.accounts:
            if account.name in known:
                raise ConfigError(f"the account '{account.name}' is given twice")
            known.add(account.name)
        seen: set[str] = set()
        for user in self.users:
            if user.account not in known:
                raise ConfigError(
                    f"user '{user.name}' is of the account '{user.account}', "
                    f"which is not one of {', '.join(sorted(known))}"
                )
            if user.name in seen:
                raise ConfigError(f"the user '{user.name}' is given twice")
            seen.add(user.name)

    @property
    def secured(self) -> bool:
        """Whether clients must name a user."""
        return self.auth or bool(self.users)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _choice(kind: type[Role] | type[Durability], value: str, what: str) -> Role | Durability:
    try:
        return kind(value)
    except ValueError:
        raise ConfigError(f"{what}: {value!r} is not one of {', '.join(kind)}") from None


def _check_name(what: str, name: str) -> None:
    if _NAME.fullmatch(name) is None:
        raise ConfigError(
            f"{name!r} cannot be the name of a {what}: use up to 63 letters, digits, '-' and '_', "
            f"beginning with a letter or digit"
        )


def _check_port(what: str, port: int) -> None:
    if not 0 <= port <= 65_535:
        raise ConfigError(f"{what}: {port} is not a port; use 1 to 65535, or 0 for any free one")


def _check_host(host: str) -> None:
    if not re.fullmatch(r"[A-Za-z0-9._:-]{1,253}", host):
        raise ConfigError(f"{host!r} is not a host name or address")
