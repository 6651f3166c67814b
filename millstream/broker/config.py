"""Broker settings: frozen values, checked when they are created.

    BrokerSettings(data=Path("/var/lib/mill"), host="0.0.0.0", port=4222, auth=True)

Each setting is declared once, as a field. The options of `millstream up`, the keys of
millstream.toml, the environment variables and the table in docs/OPERATIONS.md come from the
declarations. `render.py` turns the settings into the server's configuration text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

from millstream.broker.checks import check_host, check_name, check_port, is_loopback, read_choice
from millstream.broker.limits import LIMITS, Limits
from millstream.broker.logins import SECURITY, AuthCallout, OperatorSettings
from millstream.broker.users import (
    DEFAULT_ACCOUNT,
    RESERVED_USERS,
    Account,
    Permissions,
    Role,
    User,
)
from millstream.declared import Declaration, Form, declared, declares
from millstream.errors import ConfigError
from millstream.settings import Secret, data_folder, hide_password

__all__ = [
    "CLUSTER",
    "DEFAULT_ACCOUNT",
    "Account",
    "AuthCallout",
    "BrokerSettings",
    "ClusterSettings",
    "Durability",
    "Encryption",
    "LeafRemote",
    "LeafSettings",
    "Limits",
    "OperatorSettings",
    "Permissions",
    "Role",
    "ServerTls",
    "User",
    "is_loopback",
]

_ROUTE: Final = re.compile(r"[A-Za-z0-9.:\[\]_-]+:\d{1,5}")

CLUSTER: Final = "Cluster"  # heading of the options


class Durability(StrEnum):
    """When the broker calls an event stored.

    `fsync`: on disk before the ack. `periodic`: in the system's cache at the ack, on disk within
    `sync_interval`; survives a crash of the broker, not of the machine. `memory`: gone when the
    broker stops.
    """

    FSYNC = "fsync"
    PERIODIC = "periodic"
    MEMORY = "memory"


@dataclass(frozen=True, slots=True)
class Encryption:
    """Encryption at rest (AES). Give the key as text, or a file that holds it.

    With neither, `encryption.key` in the data folder is used, and created (0600) if the folder is
    new. Keep the key away from the data to protect against a stolen disk.
    """

    key: Secret | None = None
    key_file: Path | None = declared(
        None,
        Declaration(
            "File with the encryption key.", Form.FILE, SECURITY, env="MILLSTREAM_ENCRYPTION_KEY"
        ),
    )
    previous: Secret | None = declared(
        None,
        Declaration(
            "File with the key to rotate away from, once.",
            Form.SECRET,
            SECURITY,
            name="previous_key_file",
        ),
    )

    def __post_init__(self) -> None:
        if self.key is not None and self.key_file is not None:
            raise ConfigError("encryption: give key or key_file, not both")
        for secret in (self.key, self.previous):
            if secret is not None and len(secret.reveal()) < 16:
                raise ConfigError("encryption: a key needs at least 16 characters")


@dataclass(frozen=True, slots=True)
class ServerTls:
    """Certificate files of the server; `ca` and `verify` ask clients for theirs."""

    cert: Path = field(
        metadata=declares(Declaration("Certificate file.", Form.FILE, SECURITY, name="tls_cert"))
    )
    key: Path = field(
        metadata=declares(Declaration("Private key file.", Form.FILE, SECURITY, name="tls_key"))
    )
    ca: Path | None = declared(
        None,
        Declaration(
            "File with the authorities that sign the certificates of clients.",
            Form.FILE,
            SECURITY,
            name="tls_ca",
        ),
    )
    verify: bool = declared(
        False,
        Declaration(
            "Require a certificate of every client, signed by --tls-ca.",
            Form.SWITCH,
            SECURITY,
            name="tls_verify",
        ),
    )
    handshake_first: bool = declared(
        False,
        Declaration(
            "Start TLS before the server's greeting.", Form.SWITCH, SECURITY, name="tls_first"
        ),
    )

    def __post_init__(self) -> None:
        for file in (self.cert, self.key, self.ca):
            if file is not None and not Path(file).is_file():
                raise ConfigError(f"TLS: there is no file {file}")
        if self.verify and self.ca is None:
            raise ConfigError("TLS: verify needs ca, the file of authorities that sign clients")


@dataclass(frozen=True, slots=True)
class ClusterSettings:
    """This node in a cluster that spans machines (`up --join`)."""

    node: str = field(
        metadata=declares(
            Declaration(
                "Name of this node: unique in the cluster and the same at every start.",
                group=CLUSTER,
                name="node_name",
                env="MILLSTREAM_NODE_NAME",
            )
        )
    )
    routes: tuple[str, ...] = field(
        metadata=declares(
            Declaration(
                "Cluster address of a node on another machine; repeat it for each.",
                Form.TEXTS,
                CLUSTER,
                metavar="HOST:PORT",
                name="join",
            )
        )
    )
    secret: Secret = field(
        metadata=declares(
            Declaration(
                "File with the secret that all nodes share.",
                Form.SECRET,
                CLUSTER,
                name="cluster_secret_file",
                env="MILLSTREAM_CLUSTER_SECRET",
            )
        )
    )
    host: str = declared(
        "127.0.0.1",
        Declaration(
            "Address for the other nodes.",
            group=CLUSTER,
            name="cluster_host",
            default_text="that of --host",
        ),
    )
    port: int = declared(
        6222, Declaration("Port for the other nodes.", Form.NUMBER, CLUSTER, name="cluster_port")
    )
    tls: ServerTls | None = declared(
        None,
        Declaration(
            "Use TLS between the nodes, with the same files.",
            Form.SWITCH,
            CLUSTER,
            name="cluster_tls",
        ),
    )

    def __post_init__(self) -> None:
        check_name("node", self.node)
        check_port("cluster port", self.port)
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
                f"not {hide_password(self.url)!r}"
            )
        if (self.user is None) != (self.password is None):
            raise ConfigError("leaf node: give user and password, or neither")


@dataclass(frozen=True, slots=True)
class LeafSettings:
    """Leaf nodes: others that connect in (`port`), hubs that this one connects to (`remotes`)."""

    port: int | None = declared(
        None,
        Declaration(
            "Port to listen on for leaf nodes; 0 for any free port.",
            Form.NUMBER,
            LIMITS,
            name="leaf_port",
            default_text="do not listen",
        ),
    )
    host: str = declared(
        "127.0.0.1", Declaration("Address for leaf nodes.", group=LIMITS, name="leaf_host")
    )
    remotes: tuple[LeafRemote, ...] = declared(
        (), Declaration("Hubs to connect to as a leaf node.", Form.TABLES, name="leaf_remotes")
    )

    def __post_init__(self) -> None:
        if self.port is not None:
            check_port("leaf node port", self.port)
        if self.port is None and not self.remotes:
            raise ConfigError("leaf nodes: give a port to listen on, or remotes to connect to")


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerSettings:
    """Everything about one broker; all defaults are safe."""

    data: Path = field(default_factory=data_folder)  # default: MILLSTREAM_DATA or ./.millstream
    host: str = declared(
        "127.0.0.1",
        Declaration(
            "Address to listen on; any other than loopback needs users.", env="MILLSTREAM_HOST"
        ),
    )
    port: int = declared(
        0,  # any free port, kept for the life of the data folder
        Declaration(
            "Port for clients; 0 for any free port, which stays the same for this data folder.",
            Form.NUMBER,
            env="MILLSTREAM_PORT",
            default=4222,
        ),
    )
    monitor_port: int | None = declared(
        None,
        Declaration(
            "Port of the monitoring page, on loopback; 0 for any free port. It asks for no "
            "password and shows the topics and users of all accounts.",
            Form.NUMBER,
            env="MILLSTREAM_MONITOR_PORT",
            default_text="any free port; none when there are users",
        ),
    )
    name: str = declared("millstream", Declaration("Name of the server or cluster."))
    durability: Durability = declared(
        Durability.FSYNC,
        Declaration(
            "When an event counts as stored: fsync (on disk before the ack), periodic (on disk "
            "within --sync-interval) or memory (lost when the broker stops).",
            Form.CHOICE,
            metavar="|".join(Durability),
            env="MILLSTREAM_DURABILITY",
        ),
    )
    sync_interval: float = declared(
        5.0, Declaration("How often 'periodic' writes to disk.", Form.DURATION)
    )
    limits: Limits = field(default_factory=Limits)  # sizes and numbers of connections
    encryption: Encryption | None = declared(
        None,  # the key that encrypts the stored data; None: not encrypted
        Declaration(
            "Encrypt the stored data. Without --key-file a key is created in the data folder.",
            Form.SWITCH,
            SECURITY,
            name="encrypt",
            env="MILLSTREAM_ENCRYPT",
        ),
    )
    auth: bool = declared(
        False,
        Declaration(
            "Create the users admin, app, reader and trusted for every account.",
            Form.SWITCH,
            SECURITY,
            env="MILLSTREAM_AUTH",
        ),
    )
    users: tuple[User, ...] = declared(
        (), Declaration("Users with passwords of your own.", Form.TABLES)
    )
    accounts: tuple[Account, ...] = declared(
        (),  # tenants besides the default account, invisible to each other
        Declaration(
            "A tenant besides the default account, invisible to the others; repeat it for more.",
            Form.TEXTS,
            SECURITY,
            name="account",
        ),
    )
    tls: ServerTls | None = None  # None: clients connect without TLS
    operator: OperatorSettings | None = None  # accounts and users as signed JWTs
    callout: AuthCallout | None = None  # a service that decides about logins
    cluster: ClusterSettings | None = None  # None: a single node
    leaf: LeafSettings | None = None  # leaf nodes to accept or to connect to
    guards: bool = declared(
        True,
        Declaration(
            "Run a guard for accounts that have guarded topics.",
            Form.SWITCH,
            SECURITY,
            flags=("--guards/--no-guards",),
        ),
    )
    cdc: tuple[Path, ...] = declared(
        (),
        Declaration(
            "Settings file of a capture of a database that runs with the broker; repeat it for "
            "more.",
            Form.FILES,
        ),
    )
    kafka: int | None = declared(
        None,
        Declaration(
            "Port of a Kafka gateway that runs with the broker; 0 for any free port, which stays "
            "the same for this data folder.",
            Form.NUMBER,
            env="MILLSTREAM_KAFKA",
            default_text="no gateway",
        ),
    )
    # Other settings of that gateway, by their names in the table [gateway.kafka].
    kafka_settings: Mapping[str, Any] = field(default_factory=dict)
    domain: str | None = declared(
        None, Declaration("JetStream domain, needed with leaf nodes.", group=LIMITS)
    )
    raw: str = declared(
        "",  # server configuration, appended as it is
        Declaration(
            "Server configuration that is appended as it is; the option names a file.",
            Form.FILE,
            LIMITS,
            name="config",
        ),
        repr=False,  # it may hold passwords
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "data", Path(self.data).absolute())
        object.__setattr__(self, "cdc", tuple(Path(file).absolute() for file in self.cdc))
        object.__setattr__(
            self, "durability", read_choice(Durability, self.durability, "durability")
        )
        check_host(self.host)
        check_port("port", self.port)
        check_port("monitor_port", self.monitor_port or 0)
        check_port("kafka", self.kafka or 0)
        check_name("broker", self.name)
        if self.domain is not None:
            check_name("domain", self.domain)
        if self.sync_interval <= 0:
            raise ConfigError(f"sync_interval must be above 0 seconds, not {self.sync_interval}")
        self._check_users()
        self._check_modes()
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
                    f"user '{user.name}' belongs to the account '{user.account}', "
                    f"which is not one of {', '.join(sorted(known))}"
                )
            if user.name in RESERVED_USERS:
                raise ConfigError(f"the user name '{user.name}' is taken by the broker itself")
            if user.name in seen:
                raise ConfigError(f"the user '{user.name}' is given twice")
            seen.add(user.name)

    def _check_modes(self) -> None:
        if self.operator is not None:
            if self.auth or self.users or self.accounts or self.callout:
                raise ConfigError(
                    "operator mode has no users, accounts or callout of the broker: the operator's "
                    "JWTs define them"
                )
            if self.leaf is not None:
                raise ConfigError("operator mode does not go with leaf nodes of the settings")
        if self.callout is not None:
            if not self.secured:
                raise ConfigError("auth callout needs a user that answers it: --auth or users")
            if self.callout.account not in {account.name for account in self.all_accounts}:
                raise ConfigError(f"auth callout: there is no account '{self.callout.account}'")

    @property
    def all_accounts(self) -> tuple[Account, ...]:
        """The default account and the tenants."""
        return (Account(DEFAULT_ACCOUNT), *self.accounts)

    @property
    def secured(self) -> bool:
        """Whether clients must log in as a user."""
        return self.auth or bool(self.users) or self.operator is not None
