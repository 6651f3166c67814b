"""The key for encryption at rest, and the check that it is the right one before anything starts.

A server that is given a wrong key starts, finds no streams, and deletes the stored data when a
client creates a stream of the same name. So the folder keeps a fingerprint of its key, and a
start with another key fails before a server runs.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
from dataclasses import dataclass
from typing import Final

from millstream.broker.config import BrokerSettings
from millstream.broker.credentials import read_or_create_secret
from millstream.broker.folder import NodeFolder, read_json
from millstream.broker.render import KEY_VARIABLE, PREVIOUS_KEY_VARIABLE, quoted
from millstream.errors import ConfigError, WrongKey
from millstream.settings import Secret

__all__ = ["KEY_FILE", "StoreKey", "check_key", "new_record", "resolve_key"]

KEY_FILE: Final = "encryption.key"
_SCRYPT: Final = {"n": 2**13, "r": 8, "p": 1}  # 20 ms: guessing a weak key takes long


@dataclass(frozen=True, slots=True)
class StoreKey:
    """The key that a node opens its store with; None for an unencrypted store."""

    key: Secret | None
    previous: Secret | None = None

    def environment(self) -> dict[str, str]:
        """The environment variables that the server's configuration refers to."""
        named = {KEY_VARIABLE: self.key, PREVIOUS_KEY_VARIABLE: self.previous}
        return {name: quoted(key.reveal()) for name, key in named.items() if key is not None}


def resolve_key(settings: BrokerSettings, folders: tuple[NodeFolder, ...]) -> StoreKey:
    """The key for these settings; a new one is created only for data that is not encrypted yet."""
    encryption = settings.encryption
    if encryption is None:
        return StoreKey(None)
    if encryption.key is not None:
        return StoreKey(encryption.key, encryption.previous)
    path = encryption.key_file or settings.data / KEY_FILE
    for folder in folders:
        if not path.exists() and read_json(folder.key).get("encrypted"):
            raise WrongKey(
                f"{settings.data} is encrypted, but its key file {path} is missing. "
                f"Restore the key file, or give the right path; nothing was changed"
            )
    key = read_or_create_secret(path)
    if len(key.reveal()) < 16:
        raise ConfigError(f"the encryption key in {path} needs at least 16 characters")
    return StoreKey(key, encryption.previous)


def check_key(folder: NodeFolder, key: StoreKey) -> bool:
    """Raise WrongKey if the key does not match the fingerprint; False if there is none."""
    record = read_json(folder.key)
    if not record:
        return False
    if not record.get("encrypted"):
        return True  # the server encrypts plain data when it is opened with a key
    if key.key is None:
        raise WrongKey(
            f"{folder.data} is encrypted: start it with its key (--encrypt); nothing was changed"
        )
    if not any(_fits(record, one) for one in (key.key, key.previous) if one is not None):
        raise WrongKey(
            f"{folder.data} is encrypted with another key than the one given; nothing was "
            f"changed. Give the right key, or, to rotate keys, the old one as the previous key"
        )
    return True


def new_record(folder: NodeFolder, key: StoreKey) -> str | None:
    """The key record to write once a server has opened the folder; None: keep the present one."""
    record = read_json(folder.key)
    if key.key is None:
        if record.get("encrypted") is False:
            return None
        return json.dumps({"encrypted": False})
    if record.get("encrypted") and _fits(record, key.key):
        return None
    salt = secrets.token_hex(16)
    return json.dumps({"encrypted": True, "salt": salt, "scrypt": _fingerprint(key.key, salt)})


def _fits(record: dict[str, object], key: Secret) -> bool:
    expected = str(record.get("scrypt", ""))
    return hmac.compare_digest(expected, _fingerprint(key, str(record.get("salt", ""))))


def _fingerprint(key: Secret, salt: str) -> str:
    return hashlib.scrypt(key.reveal().encode(), salt=salt.encode(), dklen=32, **_SCRYPT).hex()
