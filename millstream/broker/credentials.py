"""Generated users and passwords, kept in a file that only the owner can read."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from millstream.broker.config import DEFAULT_ACCOUNT, BrokerSettings, Role, User
from millstream.broker.private_files import write_private
from millstream.errors import ConfigError
from millstream.settings import Secret

__all__ = [
    "ANONYMOUS",
    "CREDENTIALS_FILE",
    "GATEWAY",
    "GUARD",
    "Credentials",
    "GeneratedUsers",
    "generate_users",
    "read_credentials",
    "read_or_create_secret",
]

CREDENTIALS_FILE: Final = "credentials.json"
ANONYMOUS: Final = "anonymous"  # the user for clients without credentials, on loopback
_SYSTEM: Final = "system"
_LEAF: Final = "leaf"
GUARD: Final = "guard"
GATEWAY: Final = "gateway"
_CLUSTER: Final = "cluster"
_PASSWORD_BYTES: Final = 24  # 192 bits


@dataclass(frozen=True, slots=True)
class Credentials:
    """A user to connect as."""

    user: str
    password: Secret
    role: str  # of Role, or "system", "leaf", "guard", "gateway"
    account: str


@dataclass(frozen=True, slots=True)
class GeneratedUsers:
    """All users that the broker generates."""

    users: tuple[User, ...]  # of the accounts
    system: User
    leaf: tuple[User, ...]
    cluster_secret: Secret


def generate_users(settings: BrokerSettings) -> GeneratedUsers:
    """The generated users of this data folder; missing ones are created and saved.

    The nodes of a cluster that spans machines derive passwords from the shared secret instead, so
    that every node has the same users. The caller must hold the folder's lock.
    """
    path = settings.data / CREDENTIALS_FILE
    known = _read(path)
    passwords = dict(known)
    shared = None if settings.cluster is None else settings.cluster.secret

    def password(name: str) -> Secret:
        if shared is not None:
            passwords[name] = _derived(shared, name)
        return Secret(passwords.setdefault(name, secrets.token_urlsafe(_PASSWORD_BYTES)))

    result = GeneratedUsers(
        users=_account_users(settings, password),
        system=User(_SYSTEM, password(_SYSTEM), Role.ADMIN),
        leaf=tuple(
            User(_name(_LEAF, account), password(_name(_LEAF, account)), Role.APP, account)
            for account in _accounts(settings)
        ),
        cluster_secret=password(_CLUSTER),
    )
    if passwords != known:
        write_private(str(path), json.dumps(passwords, indent=1), durable=True)
    return result


def read_credentials(
    data: Path, role: Role | str = Role.APP, account: str = DEFAULT_ACCOUNT
) -> Credentials:
    """The generated user of that role and account.

    Besides the roles, "system" is the user of the $SYS account, "leaf" the user for leaf nodes of
    the account, "guard" the user of its guard, and "gateway" that of the gateways.
    """
    name = _SYSTEM if role == _SYSTEM else _name(role, account)
    password = _read(data / CREDENTIALS_FILE).get(name)
    if password is None:
        raise ConfigError(
            f"{data} has no generated user '{name}'. Users are generated with auth "
            f"(millstream up --auth); users from the settings are not stored there"
        )
    account = "$SYS" if role == _SYSTEM else account
    return Credentials(name, Secret(password), str(role), account)


def read_or_create_secret(path: Path) -> Secret:
    """The secret in a file, which is created (0600) if missing."""
    try:
        text = path.read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        text = secrets.token_hex(32)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_private(str(path), text + "\n", durable=True)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the secret in {path}: {error}") from error
    if not text:
        raise ConfigError(f"the secret file {path} is empty")
    return Secret(text)


def _accounts(settings: BrokerSettings) -> tuple[str, ...]:
    return (DEFAULT_ACCOUNT, *(account.name for account in settings.accounts))


def _name(role: str, account: str) -> str:
    """User names are unique across accounts: a tenant's users have its name in front."""
    return str(role) if account == DEFAULT_ACCOUNT else f"{account}-{role}"


def _account_users(settings: BrokerSettings, password: Callable[[str], Secret]) -> tuple[User, ...]:
    guards = [*_guards(settings, password), *_gateways(settings, password)]
    if not settings.secured:
        anonymous = User(ANONYMOUS, password(ANONYMOUS), Role.ADMIN)
        return (anonymous, *_tenants(settings, password), *guards)
    if not settings.auth:
        return (*settings.users, *guards)
    taken = {user.name for user in settings.users}
    made = [
        User(_name(role, account), password(_name(role, account)), role, account)
        for account in _accounts(settings)
        for role in Role
        if _name(role, account) not in taken
    ]
    return (*settings.users, *made, *guards)


def _guards(settings: BrokerSettings, password: Callable[[str], Secret]) -> list[User]:
    """The user of each account's guard, which writes to guarded topics."""
    names = {_name(GUARD, account): account for account in _accounts(settings)}
    for user in settings.users:
        if user.name in names:
            raise ConfigError(f"the user name '{user.name}' is taken by the guard of topics")
    return [User(name, password(name), Role.TRUSTED, account) for name, account in names.items()]


def _gateways(settings: BrokerSettings, password: Callable[[str], Secret]) -> list[User]:
    """The user of gateways, which does for clients whatever these may do: also delete topics."""
    if settings.kafka is None:
        return []
    if any(user.name == GATEWAY for user in settings.users):
        raise ConfigError(f"the user name '{GATEWAY}' is taken by the Kafka gateway")
    return [User(GATEWAY, password(GATEWAY), Role.ADMIN)]


def _tenants(settings: BrokerSettings, password: Callable[[str], Secret]) -> tuple[User, ...]:
    """On an open broker only the default account is open; tenants still need credentials."""
    return tuple(
        User(_name(role, account.name), password(_name(role, account.name)), role, account.name)
        for account in settings.accounts
        for role in Role
    )


def _read(path: Path) -> dict[str, str]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read the generated users in {path}: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(
            f"{path} is not a file of generated users; move it away to create new ones"
        )
    return {str(name): str(password) for name, password in content.items()}


def _derived(secret: Secret, name: str) -> str:
    mac = hmac.digest(secret.reveal().encode(), f"millstream user {name}".encode(), hashlib.sha256)
    return base64.urlsafe_b64encode(mac).decode().rstrip("=")
