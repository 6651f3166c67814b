"""Checks of single values that broker settings share. Pure."""

from __future__ import annotations

import base64
import binascii
import ipaddress
import re
from enum import StrEnum
from typing import Final, TypeVar

from millstream.errors import ConfigError

__all__ = [
    "check_host",
    "check_name",
    "check_port",
    "is_loopback",
    "is_public_key",
    "read_choice",
]

Choice = TypeVar("Choice", bound=StrEnum)

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,62}")


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def read_choice(kind: type[Choice], value: str, what: str) -> Choice:
    """A member of an enumeration, from its text."""
    try:
        return kind(value)
    except ValueError:
        raise ConfigError(f"{what}: {value!r} is not one of {', '.join(kind)}") from None


def check_name(what: str, name: str) -> None:
    """Refuse what cannot be a name of a user, account, node, ..."""
    if _NAME.fullmatch(name) is None:
        raise ConfigError(
            f"{name!r} cannot be the name of a {what}: use up to 63 letters, digits, '-' and '_', "
            f"starting with a letter or digit"
        )


def is_public_key(kind: str, text: str) -> bool:
    """Whether this is the public key of a user ("U"), an account ("A") or another kind.

    The last two of its 35 bytes are the checksum of the others.
    """
    if re.fullmatch(f"{kind}[A-Z2-7]{{55}}", text) is None:
        return False
    key = base64.b32decode(text)
    return binascii.crc_hqx(key[:-2], 0) == int.from_bytes(key[-2:], "little")


def check_port(what: str, port: int) -> None:
    """Refuse what is not a port."""
    if not 0 <= port <= 65_535:
        raise ConfigError(f"{what}: {port} is not a port; use 1 to 65535, or 0 for any free one")


def check_host(host: str) -> None:
    """Refuse what is neither a host name nor an address."""
    if not re.fullmatch(r"[A-Za-z0-9._:-]{1,253}", host):
        raise ConfigError(f"{host!r} is not a host name or address")
