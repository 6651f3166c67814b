"""From settings to the server's configuration text (pure)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote as url_quote

from millstream.broker.config import (
    Account,
    BrokerSettings,
    Durability,
    LeafRemote,
    OperatorSettings,
    Permissions,
    ServerTls,
    User,
)
from millstream.broker.jwt import read_claims
from millstream.broker.roles import Boundary, boundary_of, permissions_of
from millstream.errors import ConfigError
from millstream.settings import DURABILITY_METADATA, Secret, node_tag

__all__ = [
    "KEY_VARIABLE",
    "PREVIOUS_KEY_VARIABLE",
    "ClusterPlan",
    "NodePlan",
    "Ports",
    "accounts_text",
    "closed_text",
    "config_text",
    "quoted",
]

# The encryption key is passed in the server's environment: in the configuration file it would be
# stored next to the data that it protects.
KEY_VARIABLE: Final = "MILLSTREAM_STORE_KEY"
PREVIOUS_KEY_VARIABLE: Final = "MILLSTREAM_STORE_PREVIOUS_KEY"

_PLAIN_KEY: Final = re.compile(r"\$?[A-Za-z_][A-Za-z0-9_]*")
_ESCAPES: Final = {"\\": r"\\", '"': r"\"", "\n": r"\n", "\r": r"\r", "\t": r"\t"}
_ROUTE_USER: Final = "route"
# For a client to log in; the server's default of 2 s is too short on a busy machine.
_LOGIN_SECONDS: Final = 10
# How long a bounded user may wait for the next message of a streamed answer.
_STREAMED_ANSWERS: Final = "5m"


@dataclass(frozen=True, slots=True)
class Ports:
    """The ports of one node; 0: not used."""

    client: int
    monitor: int
    cluster: int = 0
    leaf: int = 0
    kafka: int = 0  # of the gateway


@dataclass(frozen=True, slots=True)
class ClusterPlan:
    """What a node must know about its cluster."""

    host: str
    routes: tuple[str, ...]  # host:port
    secret: Secret
    tls: ServerTls | None = None


@dataclass(frozen=True, slots=True)
class NodePlan:
    """One server, with everything decided that the settings left open."""

    settings: BrokerSettings
    name: str  # of the server, unique in its cluster
    store: Path
    run: Path  # folder where the server writes its ports
    ports: Ports
    users: tuple[User, ...]  # from the settings and generated
    system: User  # of the $SYS account
    anonymous: str | None  # user for clients without credentials
    leaf_users: tuple[User, ...]
    max_file_store: int
    max_memory_store: int
    cluster: ClusterPlan | None = None


class _Verbatim(str):
    """Text that is written into the configuration as it is."""


def config_text(plan: NodePlan) -> str:
    """The server's configuration file."""
    settings = plan.settings
    top: dict[str, Any] = {
        "server_name": plan.name,
        # Clients cannot query the sync setting, so the broker publishes it where they can read it.
        "server_metadata": {DURABILITY_METADATA: settings.durability.value},
        "server_tags": [node_tag(plan.name)],
        "listen": _address(settings.host, plan.ports.client),
        "ports_file_dir": str(plan.run),
        "max_payload": settings.limits.max_payload,
        "max_connections": settings.limits.max_connections,
        "authorization": {"timeout": _LOGIN_SECONDS},
        "jetstream": _jetstream(plan),
    }
    if settings.operator is not None:
        top |= operator_config(settings.operator)
    else:
        top["accounts"] = _accounts(plan.system, settings.all_accounts, plan.users)
    if settings.callout is not None:
        # The users of the configuration log in as before; only the others are asked about.
        own = [user.nkey or user.name for user in (plan.system, *plan.users)]
        callout = {"issuer": settings.callout.issuer, "account": settings.callout.account}
        top["authorization"]["auth_callout"] = {**callout, "auth_users": own}
    if plan.ports.monitor:
        top["http"] = _address("127.0.0.1", plan.ports.monitor)
    if plan.anonymous is not None:
        top["no_auth_user"] = plan.anonymous
    if settings.tls is not None:
        top["tls"] = _tls(settings.tls)
    if plan.cluster is not None:
        top["cluster"] = _cluster(plan, plan.cluster)
    if settings.leaf is not None:
        top["leafnodes"] = _leafnodes(plan)
    text = "".join(_line(name, value) for name, value in top.items())
    return text + (settings.raw.rstrip("\n") + "\n" if settings.raw else "")


def _line(name: str, value: Any) -> str:
    return f"{_key(name)}: {_value(value, 0)}\n"


def closed_text(plan: NodePlan) -> str:
    """The configuration, without accounts, of a server that clients cannot use.

    The keeper adds the accounts, and repairs with it what a crash has damaged. Nothing is synced
    message by message; the server syncs all when it stops.
    """
    top: dict[str, Any] = {
        "server_name": plan.name,
        "listen": "127.0.0.1:-1",
        "ports_file_dir": str(plan.run),
        "jetstream": {
            name: value for name, value in _jetstream(plan).items() if name != "sync_interval"
        },
    }
    return "".join(_line(name, value) for name, value in top.items())


def quoted(text: str) -> str:
    """A string literal of the configuration language, for any text.

    >>> quoted('say "hi"')
    '"say \\\\"hi\\\\""'
    """
    if "\0" in text:
        raise ConfigError("the server's configuration cannot contain a NUL character")
    return '"' + "".join(_escape(character) for character in text) + '"'


def _escape(character: str) -> str:
    if character in _ESCAPES:
        return _ESCAPES[character]
    return f"\\x{ord(character):02x}" if ord(character) < 32 else character


def _key(name: str) -> str:
    # Keys have no escapes, so a name that needs one cannot be a key.
    if '"' in name or "\n" in name or "\\" in name:
        raise ConfigError(f"{name!r} cannot be a name in the server's configuration")
    return name if _PLAIN_KEY.fullmatch(name) else f'"{name}"'


def _value(value: Any, depth: int) -> str:
    if isinstance(value, _Verbatim):
        return str(value)
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, str):
        return quoted(value)
    inner, outer = "  " * (depth + 1), "  " * depth
    if isinstance(value, Mapping):
        lines = [f"{inner}{_key(k)}: {_value(v, depth + 1)}\n" for k, v in value.items()]
        return "{\n" + "".join(lines) + outer + "}"
    if isinstance(value, Sequence):
        return "[\n" + "".join(f"{inner}{_value(v, depth + 1)}\n" for v in value) + outer + "]"
    raise TypeError(f"{type(value).__name__} cannot be written to the server's configuration")


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _jetstream(plan: NodePlan) -> dict[str, Any]:
    settings = plan.settings
    block: dict[str, Any] = {
        "store_dir": str(plan.store),
        "max_file_store": plan.max_file_store,
        "max_memory_store": plan.max_memory_store,
        "limits": {"default_max_consumers": settings.limits.default_max_consumers},
    }
    if settings.durability is Durability.FSYNC:
        block["sync_interval"] = "always"
    elif settings.durability is Durability.PERIODIC:
        block["sync_interval"] = f"{max(1, round(settings.sync_interval * 1000))}ms"
    if settings.domain is not None:
        block["domain"] = settings.domain
    if settings.encryption is not None:
        block["cipher"] = "aes"
        block["key"] = _Verbatim(f"${KEY_VARIABLE}")
        if settings.encryption.previous is not None:
            block["prev_key"] = _Verbatim(f"${PREVIOUS_KEY_VARIABLE}")
    return block


def accounts_text(system: User, given: Sequence[Account], users: Sequence[User]) -> str:
    """The accounts in the server's configuration, as `config_text` writes them."""
    return _line("accounts", _accounts(system, given, users))


def _accounts(system: User, given: Sequence[Account], users: Sequence[User]) -> dict[str, Any]:
    accounts: dict[str, Any] = {"$SYS": {"users": [_user(system, Permissions())]}}
    for account in given:
        members = [user for user in users if user.account == account.name]
        bounded = [(user, bounds) for user in members if (bounds := boundary_of(user)) is not None]
        entry = accounts[account.name] = {
            "jetstream": _account_limits(account),
            "users": [
                _user(user, permissions_of(user)) for user in members if boundary_of(user) is None
            ],
        }
        if bounded:
            entry["exports"] = _exports([bounds for _, bounds in bounded])
        for user, bounds in bounded:
            accounts[bounds.account] = _bounded_account(user, bounds)
    return accounts


def _exports(boundaries: Sequence[Boundary]) -> list[dict[str, Any]]:
    """What an account offers to the accounts of its bounded users."""
    services = dict.fromkeys(service for bounds in boundaries for service in bounds.services)
    heard = dict.fromkeys(subject for bounds in boundaries for subject in bounds.hears)
    exports: list[dict[str, Any]] = [{"stream": subject} for subject in heard]
    for service in services:
        answers: dict[str, str] = {}
        if service.streamed:
            answers = {"response": "stream", "response_threshold": _STREAMED_ANSWERS}
        exports.append({"service": service.subject, **answers})
    return exports


def _bounded_account(user: User, bounds: Boundary) -> dict[str, Any]:
    """The account of a bounded user: no streams of its own, and only what it may call."""

    def theirs(subject: str) -> dict[str, str]:
        return {"account": user.account, "subject": subject}

    return {
        "users": [_user(user, permissions_of(user))],
        "imports": [
            *({"stream": theirs(subject)} for subject in bounds.hears),
            *({"service": theirs(service.subject)} for service in bounds.services),
        ],
    }


def _account_limits(account: Account) -> dict[str, int] | str:
    limits = {
        "max_file": account.max_file,
        "max_mem": account.max_memory,
        "max_streams": account.max_streams,
        "max_consumers": account.max_consumers,
    }
    given = {name: value for name, value in limits.items() if value is not None}
    return given or "enabled"


def _user(user: User, permissions: Permissions) -> dict[str, Any]:
    entry: dict[str, Any] = {"user": user.name, "password": user.secret}
    if user.nkey is not None:
        entry = {"nkey": user.nkey}
    rules = {
        "publish": _rule(permissions.publish, permissions.publish_deny),
        "subscribe": _rule(permissions.subscribe, permissions.subscribe_deny),
    }
    if any(rules.values()):
        entry["permissions"] = {name: rule for name, rule in rules.items() if rule}
    return entry


def _rule(allow: tuple[str, ...] | None, deny: tuple[str, ...]) -> dict[str, list[str]]:
    rule: dict[str, list[str]] = {}
    if allow is not None:
        # To the server an empty list means everything; here it means nothing.
        rule["allow"] = list(allow)
        deny = (*deny, ">") if not allow else deny
    if deny:
        rule["deny"] = list(deny)
    return rule


def _tls(tls: ServerTls) -> dict[str, Any]:
    block: dict[str, Any] = {
        "cert_file": str(tls.cert),
        "key_file": str(tls.key),
        "timeout": _LOGIN_SECONDS,
    }
    if tls.ca is not None:
        block["ca_file"] = str(tls.ca)
    if tls.verify:
        block["verify"] = True
    if tls.handshake_first:
        block["handshake_first"] = True
    return block


def operator_config(operator: OperatorSettings) -> dict[str, Any]:
    """Operator mode: the operator's JWT, and its accounts for the server's resolver."""
    try:
        token = operator.jwt.read_text(encoding="ascii").strip()
        lines = operator.accounts.read_text(encoding="ascii").split()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"operator mode: cannot read a JWT: {error}") from error
    system = read_claims(token)["nats"].get("system_account")
    accounts = {str(read_claims(line)["sub"]): line for line in lines}
    if system not in accounts:
        raise ConfigError(
            f"operator mode: the JWT in {operator.jwt} names the system account {system}, which is "
            f"not in {operator.accounts}"
        )
    return {
        "operator": token,
        "system_account": system,
        "resolver": _Verbatim("MEMORY"),
        "resolver_preload": accounts,
    }


def _cluster(plan: NodePlan, cluster: ClusterPlan) -> dict[str, Any]:
    password = url_quote(cluster.secret.reveal(), safe="")
    block: dict[str, Any] = {
        "name": plan.settings.name,
        "listen": _address(cluster.host, plan.ports.cluster),
        "authorization": {"user": _ROUTE_USER, "password": cluster.secret.reveal()},
        "routes": [f"nats://{_ROUTE_USER}:{password}@{route}" for route in cluster.routes],
    }
    if cluster.tls is not None:
        block["tls"] = _tls(cluster.tls)
    return block


def _leafnodes(plan: NodePlan) -> dict[str, Any]:
    leaf = plan.settings.leaf
    if leaf is None:
        return {}
    block: dict[str, Any] = {}
    if leaf.port is not None:
        block["listen"] = _address(leaf.host, plan.ports.leaf)
        users = [
            {"user": user.name, "password": user.secret, "account": user.account}
            for user in plan.leaf_users
        ]
        block["authorization"] = {"users": users}
        if plan.settings.tls is not None:
            block["tls"] = _tls(plan.settings.tls)
    if leaf.remotes:
        block["remotes"] = [_remote(remote) for remote in leaf.remotes]
    return block


def _remote(remote: LeafRemote) -> dict[str, Any]:
    scheme, _, address = remote.url.partition("://")
    if remote.user is not None and remote.password is not None:
        name = url_quote(remote.user, safe="")
        address = f"{name}:{url_quote(remote.password.reveal(), safe='')}@{address}"
    return {"urls": [f"{scheme}://{address}"], "account": remote.account}
