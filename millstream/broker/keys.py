"""The key of encryption at rest, and the check that it is the right one before anything starts.

A server that is given a wrong key starts, finds no streams, and deletes what is on disk when a
client creates one of the same name. So the folder keeps a fingerprint of its key, and a start
with another key ends before there is a server.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
from dataclasses import dataclass
from typing import Final

from millstream.broker.config import BrokerSettings
from millstream.broker.credentials import read_or_make_secret
from millstream.broker.folder import NodeFolder, read_json
from millstream.broker.render import KEY_VARIABLE, PREVIOUS_KEY_VARIABLE, quoted
from millstream.errors import ConfigError, WrongKey
from millstream.settings import Secret

__all__ = ["KEY_FILE", "StoreKey", "check_key", "new_record", "resolve_key"]

KEY_FILE: Final = "encryption.key"
_SCRYPT: Final = {"n": 2**13, "r": 8, "p": 1}  # 20 ms, so that a weak key is slow to guess


@dataclass(frozen=True, slots=True)
class StoreKey:
    """The key a node opens its store with, None for a store in plain text."""

    key: Secret | None
    previous: Secret | None = None

    def environment(self) -> dict[str, str]:
        """The variables the server's configuration refers to."""
        named = {KEY_VARIABLE: self.key, PREVIOUS_KEY_VARIABLE: self.previous}
        return {name: quoted(key.reveal()) for name, key in named.items() if key is not None}


def resolve_key(settings: BrokerSettings, folders: tuple[NodeFolder, ...]) -> StoreKey:
    """The key that the settings mean; a new one is made only for data that needs none yet."""
    encryption = settings.encryption
    if encryption is None:
        return StoreKey(None)
    if encryption.key is not None:
        return StoreKey(encryption.key, encryption.previous)
    path = encryption.key_file or settings.data / KEY_FILE
    for folder in folders:
        if not path.exists() and read_json(folder.key).get("encrypted"):
            raise WrongKey(
                f"{settings.data} is encrypted and its key file {path} is missing. "
                f"Put the key back there, or name the right file; nothing was changed"
            )
    key = read_or_make_secret(path)
    if len(key.reveal()) < 16:
        raise ConfigError(f"the encryption key in {path} needs at least 16 characters")
    return StoreKey(key, encryption.previous)


def check_key(folder: NodeFolder, key: StoreKey) -> bool:
    """Raise WrongKey when the folder's fingerprint says so; False when it has none to compare."""
    record = read_json(folder.key)
    if not record:
        return False
    if not record.get("encrypted"):
        return True  # plain data is encrypted by the server when it is opened with a key
    if key.key is None:
        raise WrongKey(
            f"{folder.data} is encrypted: start it with its key (--encrypt); nothing was changed"
        )
    if not any(_fits(record, one) for one in (key.key, key.previous) if one is not None):
        raise WrongKey(
            f"{folder.data} is encrypted with another key than the one given; nothing was "
            f"changed. Give the right key, or the old one as the previous key to rotate"
        )
    return True


def new_record(folder: NodeFolder, key: StoreKey) -> str | None:
    """What the folder shall keep about its key once a server has opened it; None: as it is."""
    record = read_json(folder.key)
    if key.key is None:
        if record.get("encrypted") is False:
            return None
        return json.dumps({"encrypted": False})
    if record.get("encrypted") and _fits(record, key.key):
        return None
    salt = secrets.token_hex(16)
    return json.dumps({"encrypted": True, "salt": salt, "scrypt": _print_of(key.key, salt)})


def _fits(record: dict[str, object], key: Secret) -> bool:
    expected = str(record.get("scrypt", ""))
    return hmac.compare_digest(expected, _print_of(key, str(record.get("salt", ""))))


def _print_of(key: Secret, salt: str) -> str:
    return hashlib.scrypt(key.reveal().encode(), salt=salt.encode(), dklen=32, **_SCRYPT).hex()
