"""Keys of users (nkeys): a public key for the broker, and a secret seed for the user. Pure."""

from __future__ import annotations

import os
from dataclasses import dataclass

from millstream.settings import Secret

__all__ = ["SigningKey", "new_key"]


@dataclass(frozen=True, slots=True)
class SigningKey:
    """A key pair of an operator, account or user."""

    public: str
    seed: Secret


def new_key(kind: str) -> SigningKey:
    """A new key pair of an "operator", "account" or "user"."""
    import nkeys  # loaded only where a key is used: it brings a cryptography library

    prefix = getattr(nkeys, f"PREFIX_BYTE_{kind.upper()}")
    seed: bytes = nkeys.encode_seed(os.urandom(32), prefix)
    return SigningKey(nkeys.from_seed(seed).public_key.decode(), Secret(seed.decode()))
