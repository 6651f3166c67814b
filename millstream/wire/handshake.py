"""How a client introduces itself to a server: addresses, CONNECT, signatures. Pure."""

from __future__ import annotations

import base64
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote, urlsplit

import msgspec

from millstream.errors import AuthenticationFailed, ConfigError, PermissionDenied
from millstream.settings import ConnectionSettings, hide_password
from millstream.wire.protocol import ProtocolError
from millstream.wire.words import asked_on

__all__ = [
    "ServerAddress",
    "ServerInfo",
    "connect_line",
    "denied_subject",
    "is_authentication_error",
    "parse_address",
    "parse_info",
]

CLIENT_VERSION: Final = "0.1.0"
_DENIED = re.compile(
    r"Permissions Violation for (Publish|Subscription) to \"([^\"]*)\""
    r"(?: using queue \"([^\"]*)\")?",
    re.I,
)
_AUTHENTICATION_ERRORS: Final = (
    "authorization violation",
    "authentication expired",
    "account authentication expired",
    "authentication revoked",
)


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """One server of the list to try, with credentials that its URL carried."""

    host: str
    port: int
    tls: bool = False
    user: str | None = None
    password: str | None = None

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'tls' if self.tls else 'nats'}://{host}:{self.port}"

    def __repr__(self) -> str:  # never the password
        return f"ServerAddress({self})"


class ServerInfo(msgspec.Struct, frozen=True):
    """What the server reports about itself when a connection opens."""

    server_id: str = ""
    server_name: str = ""
    version: str = ""
    max_payload: int = 1024 * 1024
    headers: bool = False
    jetstream: bool = False
    auth_required: bool = False
    tls_required: bool = False
    tls_available: bool = False
    tls_verify: bool = False  # it wants a certificate of every client
    nonce: str | None = None
    client_id: int = 0
    cluster: str | None = None
    connect_urls: list[str] = []
    ldm: bool = False  # lame duck: the server is about to leave
    api_lvl: int = 0


_INFO_DECODER: Final = msgspec.json.Decoder(ServerInfo)


def parse_info(text: bytes) -> ServerInfo:
    """The content of an INFO line; unknown fields are left out."""
    try:
        return _INFO_DECODER.decode(text)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"the server's INFO is not readable: {error}") from error


def parse_address(url: str) -> ServerAddress:
    """An address from `nats://user:password@host:port`, `tls://host` or `host:port`."""
    shown = hide_password(url)
    try:
        parts = urlsplit(url if "://" in url else f"nats://{url}")
        port = parts.port or 4222
    except ValueError as error:
        raise ConfigError(f"not a server address: {shown!r} ({error})") from error
    if parts.scheme not in ("nats", "tls"):
        raise ConfigError(f"server address {shown!r}: scheme must be nats:// or tls://")
    if not parts.hostname:
        raise ConfigError(f"server address {shown!r} has no host. Write nats://host:port")
    return ServerAddress(
        parts.hostname,
        port,
        parts.scheme == "tls",
        unquote(parts.username) if parts.username else None,
        unquote(parts.password) if parts.password else None,
    )


def connect_line(info: ServerInfo, settings: ConnectionSettings, address: ServerAddress) -> bytes:
    """The CONNECT line that answers this server's INFO."""
    options: dict[str, Any] = {
        "verbose": False,
        "pedantic": False,
        "tls_required": False,
        "name": settings.name,
        "lang": "python-millstream",
        "version": CLIENT_VERSION,
        "protocol": 1,
        "headers": True,
        "no_responders": True,
        "echo": True,
    }
    user = address.user or settings.user
    if settings.creds:
        jwt, seed = read_creds(settings.creds)
        options["jwt"] = jwt
        options["sig"] = _sign(seed, info.nonce)
    elif settings.nkey_seed:
        seed = settings.nkey_seed.reveal()
        options["nkey"] = _public_key(seed)
        options["sig"] = _sign(seed, info.nonce)
    elif settings.token:
        options["auth_token"] = settings.token.reveal()
    elif user is not None and address.password is None and settings.password is None:
        options["auth_token"] = user  # nats://token@host
    elif user is not None:
        options["user"] = user
        options["pass"] = address.password or (
            settings.password.reveal() if settings.password else ""
        )
    return b"CONNECT " + msgspec.json.encode(options) + b"\r\n"


def read_creds(path: str) -> tuple[str, str]:
    """User JWT and seed from a credentials file as written by `nsc`."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read the credentials file {path}: {error}") from error
    blocks = re.findall(r"-----BEGIN ([A-Z ]+)-----\s*([^\s-][^\s]*)\s*-+END", text)
    found = {name.strip(): body for name, body in blocks}
    jwt = found.get("NATS USER JWT")
    seed = found.get("USER NKEY SEED")
    if jwt is None or seed is None:
        raise ConfigError(f"{path} holds no NATS user JWT and seed")
    return jwt, seed


def _key_pair(seed: str) -> Any:
    import nkeys  # loaded only where a key is used: it brings a cryptography library

    try:
        return nkeys.from_seed(seed.encode())
    except Exception as error:  # nkeys raises its own and binascii's errors
        raise ConfigError("the nkey seed is not valid (it starts with SU)") from error


def _public_key(seed: str) -> str:
    return str(_key_pair(seed).public_key.decode())


def _sign(seed: str, nonce: str | None) -> str:
    if nonce is None:
        raise AuthenticationFailed(
            "the server does not use keys: it sent nothing to sign. Use a user and password"
        )
    signature = _key_pair(seed).sign(nonce.encode())
    return base64.urlsafe_b64encode(signature).rstrip(b"=").decode()


def is_authentication_error(text: str) -> bool:
    """Whether the server's error text means that it does not accept the credentials."""
    return text.strip().strip("'").lower() in _AUTHENTICATION_ERRORS


def _user_name(settings: ConnectionSettings, address: ServerAddress) -> str:
    """The name of the user, for errors; "" when it has none or it is a secret."""
    if settings.creds or settings.nkey_seed or settings.token:
        return ""
    if address.password is None and settings.password is None:
        return ""  # nats://token@host
    return address.user or settings.user or ""


def denied_subject(
    text: str, settings: ConnectionSettings | None = None, address: ServerAddress | None = None
) -> PermissionDenied | None:
    """The error for a permissions violation, or None when the text is about something else."""
    match = _DENIED.search(text)
    if match is None:
        return None
    operation = "publish to" if match[1].lower() == "publish" else "subscribe to"
    asked = asked_on(match[2]) if operation == "publish to" else None
    user = _user_name(settings, address) if settings and address else ""
    return PermissionDenied(operation, match[2], match[3] or "", user, asked)
