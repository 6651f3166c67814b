"""From options, environment and the [broker] table of millstream.toml to broker settings."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from millstream.errors import ConfigError
from millstream.settings import (
    Secret,
    environment,
    find_project_file,
    parse_size,
    project_table,
)

if TYPE_CHECKING:
    from millstream.broker import (
        Account,
        ClusterSettings,
        Encryption,
        LeafSettings,
        Limits,
        ServerTls,
        User,
    )

__all__ = [
    "TABLES",
    "accounts_of",
    "broker_defaults",
    "cluster_of",
    "encryption_of",
    "leaf_of",
    "limits_of",
    "secret_of",
    "tls_of",
    "users_of",
]

# Parts of [broker] that are lists of tables and have no option of their own.
TABLES = ("accounts", "users", "leaf_remotes")


def broker_defaults(options: Mapping[str, bool]) -> dict[str, Any]:
    """What [broker] says for options that were not given; the mapping tells which are paths.

    Paths in the file are relative to the file. An unknown key is refused: a misspelt setting that
    silently does nothing is how a broker ends up without its password.
    """
    project = find_project_file()
    if project is None:
        return {}
    table = project_table("broker", project)
    unknown = sorted(set(table) - set(options) - set(TABLES))
    if unknown:
        known = ", ".join(sorted([*options, *TABLES]))
        raise ConfigError(f"{project}: [broker] has no setting '{unknown[0]}'. There are: {known}")
    return {
        name: str(project.parent / str(value)) if options[name] else value
        for name, value in table.items()
        if name in options
    }


def secret_of(file: Path | None, variable: str | None = None) -> Secret | None:
    """A secret from a file, else from an environment variable, else None."""
    if file is None:
        text = environment(variable) if variable else None
        return None if text is None else Secret(text)
    try:
        text = file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the secret in {file}: {error}") from error
    if not text:
        raise ConfigError(f"the file {file} is empty; a secret was expected in it")
    return Secret(text)


def limits_of(
    max_payload: str | None,
    max_file_store: str | None,
    max_memory_store: str | None,
    max_connections: int | None,
) -> Limits:
    """Limits with what was given changed."""
    from millstream.broker import Limits

    given: dict[str, int] = {
        name: parse_size(text)
        for name, text in (
            ("max_payload", max_payload),
            ("max_file_store", max_file_store),
            ("max_memory_store", max_memory_store),
        )
        if text is not None
    }
    if max_connections is not None:
        given["max_connections"] = max_connections
    return Limits(**given)


def encryption_of(
    encrypt: bool, key_file: Path | None, previous_key_file: Path | None
) -> Encryption | None:
    """Encryption at rest when it was asked for in any way, None otherwise."""
    from millstream.broker import Encryption

    key = None if key_file is not None else secret_of(None, "MILLSTREAM_ENCRYPTION_KEY")
    if not encrypt and key_file is None and key is None:
        if previous_key_file is not None:
            raise ConfigError("--previous-key-file needs the new key: --encrypt or --key-file FILE")
        return None
    return Encryption(key=key, key_file=key_file, previous=secret_of(previous_key_file))


def tls_of(
    cert: Path | None, key: Path | None, ca: Path | None, verify: bool, first: bool
) -> ServerTls | None:
    """TLS of the client listener, or None when no certificate was given."""
    from millstream.broker import ServerTls

    if cert is None and key is None:
        if ca is not None or verify or first:
            raise ConfigError("TLS needs --tls-cert FILE and --tls-key FILE")
        return None
    if cert is None or key is None:
        raise ConfigError("TLS needs both --tls-cert FILE and --tls-key FILE")
    return ServerTls(cert=cert, key=key, ca=ca, verify=verify, handshake_first=first)


def cluster_of(
    node_name: str | None,
    join: list[str],
    secret_file: Path | None,
    host: str,
    port: int,
    tls: ServerTls | None,
) -> ClusterSettings | None:
    """This node's place in a cluster over several machines, or None without --join."""
    from millstream.broker import ClusterSettings

    if not join:
        if node_name is not None or secret_file is not None:
            raise ConfigError("--node-name and --cluster-secret-file need --join HOST:PORT")
        return None
    if node_name is None:
        raise ConfigError(
            "--join needs --node-name NAME: unique in the cluster and the same at every start"
        )
    secret = secret_of(secret_file, "MILLSTREAM_CLUSTER_SECRET")
    if secret is None:
        raise ConfigError(
            "--join needs a secret that all nodes share: write 16 or more random characters into "
            "a file, copy it to every machine and give --cluster-secret-file FILE, "
            "or set MILLSTREAM_CLUSTER_SECRET"
        )
    return ClusterSettings(
        node=node_name, routes=tuple(join), secret=secret, host=host, port=port, tls=tls
    )


def leaf_of(port: int | None, host: str) -> LeafSettings | None:
    """Leaf nodes: the listener of the options and the hubs of [[broker.leaf_remotes]]."""
    from millstream.broker import LeafRemote, LeafSettings

    remotes = []
    for entry in _tables("leaf_remotes", {"url", "user", "password_file", "account"}):
        password = entry.pop("password_file", None)
        secret = secret_of(_beside_project(password)) if password is not None else None
        remotes.append(LeafRemote(**{**entry, "password": secret}))
    if port is None and not remotes:
        return None
    return LeafSettings(port=port, host=host, remotes=tuple(remotes))


def accounts_of(names: list[str]) -> tuple[Account, ...]:
    """Tenants: those of the options and those of [[broker.accounts]]."""
    from millstream.broker import Account

    allowed = {"name", "max_file", "max_memory", "max_streams", "max_consumers"}
    listed = []
    for entry in _tables("accounts", allowed):
        for key in ("max_file", "max_memory"):
            if key in entry:
                entry[key] = parse_size(entry[key])
        listed.append(Account(**entry))
    known = {account.name for account in listed}
    return (*listed, *(Account(name) for name in names if name not in known))


def users_of() -> tuple[User, ...]:
    """The users of [[broker.users]]; their passwords are in files, never in millstream.toml."""
    from millstream.broker import User

    users = []
    for entry in _tables("users", {"name", "role", "account", "password_file"}):
        file = entry.pop("password_file", None)
        if file is None:
            raise ConfigError(f"[[broker.users]] '{entry.get('name')}' needs a password_file")
        password = secret_of(_beside_project(file))
        users.append(User(**{**entry, "password": password}))
    return tuple(users)


def _beside_project(file: str) -> Path:
    project = find_project_file()
    return (project.parent if project else Path()) / file


def _tables(name: str, allowed: set[str]) -> list[dict[str, Any]]:
    """The entries of [[broker.<name>]], each with a known set of keys."""
    entries = project_table("broker").get(name, [])
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise ConfigError(f"millstream.toml: write each entry of {name} as [[broker.{name}]]")
    first = "url" if name == "leaf_remotes" else "name"
    for entry in entries:
        unknown = sorted(set(entry) - allowed)
        if unknown:
            raise ConfigError(
                f"millstream.toml: [[broker.{name}]] has no setting '{unknown[0]}'. "
                f"There are: {', '.join(sorted(allowed))}"
            )
        if not isinstance(entry.get(first), str):
            raise ConfigError(f"millstream.toml: every [[broker.{name}]] needs a {first}")
    return [dict(entry) for entry in entries]
