"""The passwords in the data folder of a broker, for logins by SCRAM.

A gateway beside the broker reads them where the broker keeps them, and keeps no list of its own.
Every call reads files or computes for milliseconds: call it in a thread.
"""

from __future__ import annotations

import re
import secrets
import threading
from collections import OrderedDict
from pathlib import Path
from typing import Any, Final

from millstream.broker.folder import read_json
from millstream.broker.folder_users import ACCOUNTS_FILE
from millstream.gateways.scram import Verifier, fake_verifier, make_verifier, salt_of
from millstream.settings import Secret

__all__ = ["FolderPasswords"]

_Entry = tuple[Verifier, Secret | None]
VERIFIERS_MAX: Final = 4096  # that are kept; each took some milliseconds
# The server takes such a password for a hash, and nobody knows what it is the hash of.
_HASH: Final = re.compile(r"\$2[abxy]\$\d{2}\$.*", re.DOTALL)


class FolderPasswords:
    """The users of a broker that log in with a password, as its data folder has them now."""

    def __init__(self, data: Path) -> None:
        self._file = data / ACCOUNTS_FILE
        self._lock = threading.Lock()
        self._version: tuple[int, ...] = ()  # of the file, as it was read
        self._passwords: dict[str, Secret] = {}
        self._salts = secrets.token_bytes(32)
        self._verifiers: OrderedDict[tuple[str, str], _Entry] = OrderedDict()

    def usable(self) -> bool:
        """Whether the folder has users with passwords; not so in operator mode."""
        with self._lock:
            self._refresh()
            return bool(self._passwords)

    def verifier(self, user: str, mechanism: str) -> Verifier:
        """What checks the proof of this user; one for an unknown user takes as long to get."""
        return self._entry(user, mechanism)[0]

    def password(self, user: str, verifier: Verifier) -> Secret | None:
        """The password behind a verifier; None if there is none, or another one by now."""
        current, password = self._entry(user, verifier.mechanism)
        return password if current == verifier else None

    def _entry(self, user: str, mechanism: str) -> _Entry:
        name = user, mechanism
        with self._lock:
            self._refresh()
            known = self._verifiers.get(name)
            if known is not None:
                self._verifiers.move_to_end(name)
                return known
            version, password = self._version, self._passwords.get(user)
        salt = salt_of(mechanism, user, self._salts)
        verifier = make_verifier(mechanism, password or Secret("unknown"), salt)
        if password is None:
            verifier = fake_verifier(mechanism, user, self._salts)
        with self._lock:
            if self._version == version:
                self._verifiers[name] = verifier, password
                if len(self._verifiers) > VERIFIERS_MAX:
                    self._verifiers.popitem(last=False)
        return verifier, password

    def _refresh(self) -> None:
        """Read the file if it was changed."""
        try:
            found = self._file.stat()
        except OSError:
            version: tuple[int, ...] = (0,)
        else:
            version = (found.st_mtime_ns, found.st_size, found.st_ino)
        if version != self._version:
            self._passwords = _passwords(read_json(self._file))
            self._verifiers.clear()
            self._version = version


def _passwords(facts: dict[str, Any]) -> dict[str, Secret]:
    """The passwords in the broker's file of accounts, by user."""
    if facts.get("operator"):
        return {}
    entries = facts.get("users", [])
    found = {str(entry["name"]): entry["password"] for entry in entries}
    return {
        name: Secret(password)
        for name, password in found.items()
        if password and _HASH.fullmatch(password) is None
    }
