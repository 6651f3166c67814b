"""What a server keeps of a password for SCRAM (RFC 5802, RFC 7677). Pure.

A verifier proves that a client knows the password, and cannot be used to log in as that client.
"""

from __future__ import annotations

import hashlib
import hmac
import stringprep
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from millstream.settings import Secret

__all__ = [
    "ITERATIONS",
    "PLAIN",
    "SCRAM_HASHES",
    "WRONG_LOGIN",
    "Verifier",
    "fake_verifier",
    "make_verifier",
    "prepared",
    "salt_of",
]

PLAIN: Final = "PLAIN"  # the other mechanism, which sends the password itself

# One text for a wrong password and for a user that does not exist: which it was is not said.
WRONG_LOGIN: Final = "wrong user or password"

SCRAM_HASHES: Final[Mapping[str, str]] = {
    "SCRAM-SHA-256": "sha256",
    "SCRAM-SHA-512": "sha512",
}
ITERATIONS: Final = 4096  # the least that clients accept; each login costs a client as much
SALT_BYTES: Final = 16

_PROHIBITED: Final = (
    stringprep.in_table_c12,
    stringprep.in_table_c21_c22,
    stringprep.in_table_c3,
    stringprep.in_table_c4,
    stringprep.in_table_c5,
    stringprep.in_table_c6,
    stringprep.in_table_c7,
    stringprep.in_table_c8,
    stringprep.in_table_c9,
    stringprep.in_table_a1,
)


@dataclass(frozen=True, slots=True)
class Verifier:
    """Salted keys of one password for one mechanism.

    There are two pairs if the password is another text after SASLprep: some clients prepare it,
    as the RFC says, and some do not.
    """

    mechanism: str
    salt: bytes = field(repr=False)
    iterations: int
    keys: tuple[tuple[bytes, bytes], ...] = field(repr=False)  # StoredKey, ServerKey
    known: bool = True  # False: there is no such user, and no proof is right

    @property
    def hash(self) -> str:
        """The name of its hash, as hashlib has it."""
        return SCRAM_HASHES[self.mechanism]


def make_verifier(
    mechanism: str, password: Secret, salt: bytes, iterations: int = ITERATIONS
) -> Verifier:
    """The verifier of a password; it takes milliseconds, by design."""
    name = SCRAM_HASHES[mechanism]
    plain = password.reveal()
    forms = dict.fromkeys((plain, prepared(plain) or plain))
    keys = tuple(_keys(name, form.encode(), salt, iterations) for form in forms)
    return Verifier(mechanism, salt, iterations, keys)


def _keys(name: str, password: bytes, salt: bytes, iterations: int) -> tuple[bytes, bytes]:
    salted = hashlib.pbkdf2_hmac(name, password, salt, iterations)
    client = hmac.digest(salted, b"Client Key", name)
    return hashlib.new(name, client).digest(), hmac.digest(salted, b"Server Key", name)


def salt_of(mechanism: str, user: str, key: bytes) -> bytes:
    """The salt of a user: the same each time, and no different for users that do not exist."""
    return hmac.digest(key, f"salt {mechanism} {user}".encode(), "sha256")[:SALT_BYTES]


def fake_verifier(mechanism: str, user: str, key: bytes) -> Verifier:
    """What a user that does not exist is asked, so that nobody can tell it does not."""
    name = SCRAM_HASHES[mechanism]
    stored = hmac.digest(key, f"no user {user}".encode(), name)
    salt = salt_of(mechanism, user, key)
    return Verifier(mechanism, salt, ITERATIONS, ((stored, stored),), known=False)


def prepared(text: str) -> str | None:
    """The text after SASLprep (RFC 4013); None if it may not be used.

    >>> prepared("I\\u00adX"), prepared("\\u2168"), prepared("\\u0007")
    ('IX', 'IX', None)
    """
    if text.isascii() and text.isprintable():
        return text
    kept = (
        " " if stringprep.in_table_c12(letter) else letter
        for letter in text
        if not stringprep.in_table_b1(letter)
    )
    result = unicodedata.normalize("NFKC", "".join(kept))
    if any(prohibited(letter) for letter in result for prohibited in _PROHIBITED):
        return None
    right_to_left = [stringprep.in_table_d1(letter) for letter in result]
    if any(right_to_left):
        mixed = any(stringprep.in_table_d2(letter) for letter in result)
        if mixed or not (right_to_left[0] and right_to_left[-1]):
            return None
    return result
