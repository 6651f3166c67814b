"""Adds and removes users of a data folder: `millstream user`.

A running broker takes a change at once, and drops nobody but the clients of a removed user.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from millstream.broker.config import Account, User
from millstream.broker.credentials import ANONYMOUS
from millstream.broker.folder import node_folders, read_json
from millstream.broker.folder_users import (
    ACCOUNTS_FILE,
    USERS_FILE,
    added_users,
    list_users,
    read_user,
    user_entry,
)
from millstream.broker.private_files import write_private
from millstream.broker.reload import apply_config
from millstream.broker.render import accounts_text
from millstream.broker.users import RESERVED_USERS
from millstream.errors import ConfigError
from millstream.settings import Secret

__all__ = ["add_user", "remove_user"]

_BLOCK: Final = re.compile(r"^accounts: \{\n.*?^\}\n", re.M | re.S)
_RELOAD_SECONDS: Final = 10.0


def add_user(data: Path, user: User, secret: Secret | None = None) -> None:
    """Add a user to the folder; a running broker accepts it when the call returns.

    `secret` is what the user logs in with, to be handed out by `user_secret`.
    """
    known = read_json(data / ACCOUNTS_FILE)
    if known.get("operator"):
        raise ConfigError(
            "in operator mode a user is a JWT that its account has signed, and the broker keeps no "
            "list: millstream user creds NAME --signing-key FILE"
        )
    if known and user.account not in (account["name"] for account in known["accounts"]):
        names = ", ".join(account["name"] for account in known["accounts"])
        raise ConfigError(f"there is no account '{user.account}'; the accounts are {names}")
    with _changing(data) as entries:
        if user.name in {one.name for one in list_users(data)} | RESERVED_USERS:
            raise ConfigError(f"the user '{user.name}' exists already")
        entries.append({**user_entry(user), "secret": None if secret is None else secret.reveal()})


def remove_user(data: Path, name: str) -> None:
    """Remove a user that was added; its clients are disconnected."""
    with _changing(data) as entries:
        kept = [entry for entry in entries if entry["name"] != name]
        if len(kept) == len(entries):
            added = ", ".join(str(entry["name"]) for entry in entries) or "none"
            raise ConfigError(f"'{name}' was not added by 'millstream user'; these were: {added}")
        entries[:] = kept


@contextlib.contextmanager
def _changing(data: Path) -> Iterator[list[dict[str, Any]]]:
    """The added users, to be changed; the change is applied, or nothing is changed."""
    if not data.is_dir():
        raise ConfigError(f"there is no data folder {data}; start a broker there first")
    lock = os.open(data / "users.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        entries = added_users(data)
        before = json.dumps(entries)
        yield entries
        path = str(data / USERS_FILE)
        write_private(path, json.dumps(entries), durable=True)
        try:
            _apply(data, {entry["name"] for entry in json.loads(before)})
        except BaseException:
            write_private(path, before, durable=True)
            raise
    finally:
        os.close(lock)


def _apply(data: Path, before: set[str]) -> None:
    """Give the nodes of the folder the accounts with their new users."""
    facts = read_json(data / ACCOUNTS_FILE)
    folders = [folder for folder in node_folders(data) if folder.conf.exists()]
    if not facts or not folders:
        return  # the next start reads the users
    base = [read_user(entry) for entry in facts["users"] if entry["name"] not in before]
    added = [read_user(entry) for entry in added_users(data)]
    running = any(folder.locked() for folder in folders)
    if running and facts.get("callout") and not {user.name for user in added} <= before:
        raise ConfigError(
            "with auth callout the server takes no new users while it runs. "
            "Stop it (millstream down), add the users, and start it again"
        )
    if any(user.name == ANONYMOUS for user in base):
        if running:
            raise ConfigError(
                "this broker is open to everybody on this machine; with users it would not be. "
                "Stop it (millstream down), add the users, and start it again"
            )
        return
    accounts = [Account(**entry) for entry in facts["accounts"]]
    users = (*base, *added)
    block = accounts_text(read_user(facts["system"]), accounts, users)
    texts = {}
    for folder in folders:
        text = folder.conf.read_text(encoding="utf-8")
        if _BLOCK.search(text) is None:
            raise ConfigError(f"{folder.conf} has no accounts; start the broker again")
        texts[folder] = _BLOCK.sub(lambda _: block, text, count=1)
    apply_config(texts, _RELOAD_SECONDS)
    facts["users"] = [user_entry(user) for user in users]
    write_private(str(data / ACCOUNTS_FILE), json.dumps(facts))
