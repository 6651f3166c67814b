"""The exchanges by which a client proves who it is: PLAIN (RFC 4616) and SCRAM (RFC 5802). Pure.

No error text has anything of a password, a proof or a nonce.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import re
from dataclasses import dataclass, field
from typing import Final

from millstream.gateways.scram import WRONG_LOGIN, Verifier
from millstream.settings import Secret

__all__ = [
    "TOKEN_BYTES_MAX",
    "ClientFirst",
    "PlainLogin",
    "SaslError",
    "ScramExchange",
    "read_client_first",
    "read_plain",
]

TOKEN_BYTES_MAX: Final = 8192
_NAME_BYTES_MAX: Final = 255
_PASSWORD_BYTES_MAX: Final = 4096
_NONCE: Final = re.compile(r"[\x21-\x2b\x2d-\x7e]{8,512}")
_GS2: Final = re.compile(r"(n|y|p=[A-Za-z0-9.-]+),(?:a=([^,]*))?,")
_ESCAPED: Final = re.compile(r"=2C|=3D")
_ATTRIBUTE: Final = re.compile(r"[A-Za-z]=[^,]+|tokenauth=[^,]*")


class SaslError(Exception):
    """A login that is refused; the text is for the client."""


@dataclass(frozen=True, slots=True)
class PlainLogin:
    """What a client of PLAIN says."""

    user: str
    password: Secret


def read_plain(token: bytes) -> PlainLogin:
    """User and password in the only token of PLAIN: `authzid NUL user NUL password`."""
    parts = _text(token).split("\0")
    if len(parts) != 3:
        raise SaslError("PLAIN needs an authorization id, a user and a password between two NULs")
    authorization, user, password = parts
    _check_authorization(authorization, user)
    if not user or not password:
        raise SaslError("PLAIN needs a user and a password that are not empty")
    if max(len(user.encode()), len(authorization.encode())) > _NAME_BYTES_MAX:
        raise SaslError(f"the name of a user has at most {_NAME_BYTES_MAX} bytes")
    if len(password.encode()) > _PASSWORD_BYTES_MAX:
        raise SaslError(f"a password has at most {_PASSWORD_BYTES_MAX:,} bytes")
    return PlainLogin(user, Secret(password))


@dataclass(frozen=True, slots=True)
class ClientFirst:
    """The first message of a client of SCRAM."""

    user: str
    header: str  # about channel binding, comes again in its last message
    bare: str = field(repr=False)
    nonce: str = field(repr=False)


def read_client_first(token: bytes) -> ClientFirst:
    """The first message: `n,,n=user,r=nonce`."""
    text = _text(token)
    header = _GS2.match(text)
    if header is None:
        raise SaslError("this is not the first message of SCRAM")
    if header[1].startswith("p"):
        raise SaslError("SCRAM with channel binding (-PLUS) is not offered")
    bare = text[header.end() :]
    parts = bare.split(",")
    if parts[0].startswith("m="):
        raise SaslError("SCRAM: an extension that this client demands is not known")
    named = len(parts) >= 2 and parts[0].startswith("n=") and parts[1].startswith("r=")
    if not named or not all(_ATTRIBUTE.fullmatch(part) for part in parts[2:]):
        raise SaslError("SCRAM: the first message needs a user and a nonce")
    user, nonce = _unescaped(parts[0][2:]), parts[1][2:]
    if not user or len(user.encode()) > _NAME_BYTES_MAX:
        raise SaslError(f"the name of a user has 1 to {_NAME_BYTES_MAX} bytes")
    if _NONCE.fullmatch(nonce) is None:
        raise SaslError("SCRAM: a nonce has 8 to 512 printable characters, and no comma")
    _check_authorization(_unescaped(header[2] or ""), user)
    return ClientFirst(user, header[0], bare, nonce)


class ScramExchange:
    """One login with SCRAM: what the client is asked, and whether its proof is right."""

    def __init__(self, first: ClientFirst, verifier: Verifier, nonce: str) -> None:
        """`nonce` is the server's, a new one for each exchange."""
        self.user = first.user
        self._first = first
        self._verifier = verifier
        self._nonce = first.nonce + nonce
        salt = base64.b64encode(verifier.salt).decode()
        self._challenge = f"r={self._nonce},s={salt},i={verifier.iterations}"

    @property
    def mechanism(self) -> str:
        return self._verifier.mechanism

    @property
    def challenge(self) -> bytes:
        """What the server sends first."""
        return self._challenge.encode()

    def finish(self, token: bytes) -> bytes:
        """The server's last message; SaslError if the proof in the client's is wrong."""
        text = _text(token)
        unproven, comma, proof = text.rpartition(",p=")
        parts = unproven.split(",")
        if not comma or len(parts) < 2 or not all(map(_ATTRIBUTE.fullmatch, parts)):
            raise SaslError("this is not the last message of SCRAM")
        binding = "c=" + base64.b64encode(self._first.header.encode()).decode()
        if not _same(parts[0], binding):
            raise SaslError("SCRAM: the channel binding is another one than in the first message")
        if not _same(parts[1], f"r={self._nonce}"):
            raise SaslError("SCRAM: the nonce is not that of this exchange")
        signed = f"{self._first.bare},{self._challenge},{unproven}".encode()
        return b"v=" + base64.b64encode(self._server_signature(_decoded(proof), signed))

    def _server_signature(self, proof: bytes, signed: bytes) -> bytes:
        name, found = self._verifier.hash, None
        for stored, server in self._verifier.keys:
            signature = hmac.digest(stored, signed, name)
            if len(proof) != len(signature):
                raise SaslError("SCRAM: the proof has another length than the hash")
            client = bytes(a ^ b for a, b in zip(proof, signature, strict=True))
            if hmac.compare_digest(hashlib.new(name, client).digest(), stored):
                found = hmac.digest(server, signed, name)
        if found is None or not self._verifier.known:
            raise SaslError(WRONG_LOGIN)
        return found


def _text(token: bytes) -> str:
    if len(token) > TOKEN_BYTES_MAX:
        raise SaslError(f"a token has at most {TOKEN_BYTES_MAX:,} bytes, not {len(token):,}")
    try:
        return token.decode()
    except UnicodeDecodeError:
        raise SaslError("a token is not UTF-8") from None


def _check_authorization(authorization: str, user: str) -> None:
    if authorization not in ("", user):
        raise SaslError("a user cannot log in as another one: leave the authorization id empty")


def _unescaped(name: str) -> str:
    """A name without the escapes of SCRAM: =2C for a comma, =3D for an equals sign."""
    if "=" in _ESCAPED.sub("", name):
        raise SaslError("SCRAM: write a comma in a name as =2C, and an equals sign as =3D")
    return _ESCAPED.sub(lambda match: "," if match[0] == "=2C" else "=", name)


def _decoded(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise SaslError("SCRAM: the proof is not base64") from None


def _same(found: str, wanted: str) -> bool:
    return hmac.compare_digest(found.encode(), wanted.encode())
