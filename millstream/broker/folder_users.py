"""Users of a data folder, besides those of the settings: `millstream user`.

They are kept in users.json, and what a running broker has in accounts.json; only the owner of the
folder can read them.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from millstream.broker.config import BrokerSettings, Permissions, User
from millstream.broker.credentials import CREDENTIALS_FILE, GeneratedUsers
from millstream.broker.folder import read_json
from millstream.broker.private_files import write_private
from millstream.errors import ConfigError
from millstream.settings import Secret

__all__ = [
    "ACCOUNTS_FILE",
    "USERS_FILE",
    "UserInfo",
    "account_names",
    "added_users",
    "list_users",
    "read_user",
    "save_accounts",
    "user_entry",
    "user_files",
    "user_secret",
    "with_folder_users",
]

USERS_FILE: Final = "users.json"
ACCOUNTS_FILE: Final = "accounts.json"


@dataclass(frozen=True, slots=True)
class UserInfo:
    """A user as `millstream user ls` shows it; no secrets."""

    name: str
    role: str
    account: str
    login: str  # "nkey" or "password"
    topics: tuple[str, ...]
    subscriptions: tuple[str, ...]  # topic/name
    added: bool  # with `millstream user`, which can remove it


def list_users(data: Path) -> tuple[UserInfo, ...]:
    """The users of the broker on this folder; those that were added come last."""
    added = [read_user(entry) for entry in added_users(data)]
    names = {user.name for user in added}
    others = [read_user(entry) for entry in read_json(data / ACCOUNTS_FILE).get("users", [])]
    shown = [user for user in others if user.name not in names]
    return tuple(
        UserInfo(
            name=user.name,
            role=str(user.role),
            account=user.account,
            login="password" if user.nkey is None else "nkey",
            topics=user.topics,
            subscriptions=tuple("/".join(pair) for pair in user.subscriptions),
            added=user.name in names,
        )
        for user in (*shown, *added)
    )


def account_names(data: Path) -> tuple[str, ...]:
    """The accounts of the broker on this folder, the default one first."""
    facts = read_json(data / ACCOUNTS_FILE)
    if facts.get("operator"):
        raise ConfigError(
            "the accounts of this broker are defined by its operator's JWTs: connect as a user of "
            "each account, with NATS_CREDS"
        )
    return tuple(str(account["name"]) for account in facts.get("accounts", []))


def user_files(data: Path) -> tuple[Path, ...]:
    """The files that users and accounts of a folder are in; some may not exist."""
    return tuple(data / name for name in (USERS_FILE, CREDENTIALS_FILE, ACCOUNTS_FILE))


def user_secret(data: Path, name: str) -> Secret:
    """The seed or the password of a user that was added."""
    for entry in added_users(data):
        if entry["name"] == name and entry["secret"]:
            return Secret(entry["secret"])
    raise ConfigError(
        f"no secret of '{name}' is stored here: 'millstream user' keeps those that it generated, "
        f"and 'millstream env' prints those of the generated users"
    )


def with_folder_users(settings: BrokerSettings) -> BrokerSettings:
    """The settings with the users that were added to their folder."""
    added = [read_user(entry) for entry in added_users(settings.data)]
    names = {user.name for user in settings.users}
    if twice := sorted(names & {user.name for user in added}):
        raise ConfigError(
            f"the user '{twice[0]}' is in the settings and was added by 'millstream user'; "
            f"remove one of them (millstream user rm {twice[0]})"
        )
    return replace(settings, users=(*settings.users, *added)) if added else settings


def save_accounts(settings: BrokerSettings, users: GeneratedUsers) -> None:
    """Keep what is needed to render the accounts again when a user is added."""
    facts = {
        "operator": settings.operator is not None,  # then its JWTs define accounts and users
        "accounts": [asdict(account) for account in settings.all_accounts],
        "users": [user_entry(user) for user in users.users],
        "system": user_entry(users.system),
        "callout": settings.callout is not None,
    }
    write_private(str(settings.data / ACCOUNTS_FILE), json.dumps(facts))


def added_users(data: Path) -> list[dict[str, Any]]:
    """The users that were added, as the file holds them."""
    try:
        content = json.loads((data / USERS_FILE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read the users in {data / USERS_FILE}: {error}") from error
    return list(content)


def user_entry(user: User) -> dict[str, Any]:
    """A user as our files hold it."""
    entry = {field: getattr(user, field) for field in ("name", "account", "nkey", "topics")}
    return {
        **entry,
        "role": str(user.role),
        "password": None if user.password is None else user.password.reveal(),
        "subscriptions": [list(pair) for pair in user.subscriptions],
        "permissions": None if user.permissions is None else asdict(user.permissions),
    }


def read_user(entry: dict[str, Any]) -> User:
    """A user from our files."""
    rules, password = entry["permissions"], entry["password"]
    permissions: Any = None
    if rules is not None:
        lists = {key: None if rule is None else tuple(rule) for key, rule in rules.items()}
        permissions = Permissions(**lists)  # type: ignore[arg-type]
    return User(
        name=entry["name"],
        password=None if password is None else Secret(password),
        role=entry["role"],
        account=entry["account"],
        nkey=entry["nkey"],
        topics=tuple(entry["topics"]),
        subscriptions=tuple((pair[0], pair[1]) for pair in entry["subscriptions"]),
        permissions=permissions,
    )
