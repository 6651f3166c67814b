"""Subjects, keys and partitions: names on the wire and back. Pure."""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable
from numbers import Number
from typing import Final

from millstream.errors import ConfigError
from millstream.nearest import proposed_name

__all__ = [
    "COPIES_TOKEN",
    "KEYLESS_TOKEN",
    "KEY_BYTES_MAX",
    "NAME_CHARS_MAX",
    "PACK_TOKEN",
    "Key",
    "check_name",
    "check_subject",
    "checked_key",
    "copies_prefix",
    "is_name",
    "key_bytes",
    "key_of_token",
    "key_token",
    "name_advice",
    "not_a_key",
    "overlap",
    "partition_of",
    "partition_prefix",
    "stored_key_token",
    "stream_name",
    "stream_subjects",
    "text_keys",
]

KEYLESS_TOKEN: Final = "_"  # an event without a key
PACK_TOKEN: Final = "_pack"  # many events in one message
COPIES_TOKEN: Final = "_for"  # events redriven for one subscription, whose name follows
# Three characters a byte in the worst case; the server's control line has 4,096.
KEY_BYTES_MAX: Final = 1024
NAME_CHARS_MAX: Final = 200

Key = str | bytes | None  # of an event

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
_UNSAFE = re.compile(rb"[^A-Za-z0-9_\-/:@+,~]")
_ESCAPED = re.compile(rb"=([0-9A-F]{2})")
_TOKEN_ESCAPES: Final = {bytes([n]): b"=%02X" % n for n in range(256)}


def is_name(name: str) -> bool:
    """Whether it can be the name of a topic, subscription or writer."""
    return _NAME.fullmatch(name) is not None and len(name) <= NAME_CHARS_MAX


def check_name(kind: str, name: str) -> str:
    """The name if it is valid for a topic, subscription or writer; else a ConfigError."""
    if not isinstance(name, str) or not is_name(name):
        raise ConfigError(f"{kind} name {name!r:.210}: {name_advice(name)}")
    return name


def name_advice(name: object) -> str:
    """Why something cannot be a name, and one that can be, if there is one like it.

    >>> name_advice("orders.eu")
    "a dot separates the tokens of a subject. Use 'orders-eu'"
    """
    proposed = proposed_name(name, NAME_CHARS_MAX)
    if isinstance(name, str) and is_name(name.replace(".", "-")):
        return f"a dot separates the tokens of a subject. Use '{proposed}'"
    rule = f"use 1 to {NAME_CHARS_MAX} of A-Z a-z 0-9 _ - and start with a letter or digit"
    return rule if proposed is None else f"{rule}, such as '{proposed}'"


def is_half(character: str) -> bool:
    """Whether it is a lone surrogate: half of a character, which UTF-8 cannot encode."""
    return "\ud800" <= character <= "\udfff"


def check_subject(subject: str, wildcards: bool) -> str:
    """The subject if it is well formed; wildcards (`*`, a final `>`) only if allowed."""
    tokens = subject.split(".") if isinstance(subject, str) else [""]
    for index, token in enumerate(tokens):
        if not token or any(ch.isspace() or ch == "\0" or is_half(ch) for ch in token):
            raise ConfigError(f"subject {subject!r}: needs non-empty tokens joined by dots")
        if token == "*" or (token == ">" and index == len(tokens) - 1):
            if not wildcards:
                raise ConfigError(f"subject {subject!r}: a wildcard cannot be published to")
        elif token == ">":
            raise ConfigError(f"subject {subject!r}: '>' is only allowed as the last token")
    return subject


def overlap(one: str, other: str) -> bool:
    """Whether a subject can match both patterns.

    >>> overlap("a.*", "a.b"), overlap("a.>", "a.b.>"), overlap("a.*", "a.b.>"), overlap("a", "b")
    (True, True, False, False)
    """
    first, second = one.split("."), other.split(".")
    for mine, theirs in zip(first, second, strict=False):
        if ">" in (mine, theirs):
            return True
        if mine != theirs and "*" not in (mine, theirs):
            return False
    return len(first) == len(second)


def copies_prefix(prefix: str, subscription: str) -> str:
    """The prefix of the subjects of events redriven for one subscription.

    They differ from the subjects of their keys, so that the last event of a key stays the one that
    was published last: for lookups, for conditional writes, and for topics that keep no others.

    >>> copies_prefix("orders", "billing")
    'orders._for.billing'
    """
    return f"{prefix}.{COPIES_TOKEN}.{key_token(subscription)}"


def key_bytes(key: str | bytes) -> bytes:
    """A key's bytes; text that was decoded from invalid UTF-8 gives the same bytes back."""
    if isinstance(key, bytes):
        return key
    try:
        return key.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError as error:
        raise ConfigError(f"key {key!r}: a lone surrogate is not text ({error})") from error
    except AttributeError:
        raise not_a_key(key) from None


def checked_key(key: str | bytes) -> bytes:
    """A key's bytes; ConfigError if it is none or too long."""
    data = key_bytes(key)
    if len(data) > KEY_BYTES_MAX:
        raise ConfigError(f"a key of {len(data):,} bytes: keys have at most {KEY_BYTES_MAX:,}")
    return data


def not_a_key(found: object) -> ConfigError:
    """The error for a key that is neither text nor bytes.

    Nothing is converted: 42 and "42" would be one key without anyone having said so.

    >>> str(not_a_key(42))
    'a key is text or bytes, found int. Convert it: key=str(42)'
    """
    example = f"{found}" if isinstance(found, Number) else "..."
    kind = type(found).__name__
    return ConfigError(f"a key is text or bytes, found {kind}. Convert it: key=str({example})")


def text_keys(keys: str | bytes | Iterable[str | bytes]) -> tuple[str, ...]:
    """The keys to choose events by, as events have them; one key alone need not be in a list.

    >>> text_keys("ann"), text_keys([b"ann", "ben"])
    (('ann',), ('ann', 'ben'))
    """
    if isinstance(keys, str | bytes) or not isinstance(keys, Iterable):
        keys = (keys,)
    return tuple(key_bytes(key).decode("utf-8", "surrogateescape") for key in keys)


def key_token(key: str | bytes | None) -> str:
    """The token of the subject that stands for a key; reversible.

    >>> key_token("order-7"), key_token("a.b"), key_token("_x"), key_token(""), key_token(None)
    ('order-7', 'a=2Eb', '=5Fx', '=', '_')
    """
    if key is None:
        return KEYLESS_TOKEN
    checked_key(key)
    return stored_key_token(key)


def stored_key_token(key: str | bytes) -> str:
    """The token of a key that was read: another client may have stored one that is longer."""
    data = key_bytes(key)
    if not data:
        return "="
    if _UNSAFE.search(data):
        data = _UNSAFE.sub(lambda found: _TOKEN_ESCAPES[found[0]], data)
    if data[0] == 95:  # tokens that start with _ are Millstream's own
        data = b"=5F" + data[1:]
    return data.decode("ascii")


def key_of_token(token: bytes) -> str | None:
    """The key that a subject token stands for; tokens that start with `_` stand for none."""
    if token.startswith(b"_"):
        return None
    if b"=" in token:
        token = b"" if token == b"=" else _ESCAPED.sub(_unescape, token)
    return token.decode("utf-8", "surrogateescape")


def _unescape(found: re.Match[bytes]) -> bytes:
    return bytes([int(found[1], 16)])


def partition_of(key: str | bytes, partitions: int) -> int:
    """The partition of a key: CRC-32 (IEEE) of its UTF-8 bytes modulo the number of partitions.

    >>> partition_of("order-7", 4)
    2
    """
    return zlib.crc32(key_bytes(key)) % partitions


def stream_name(topic: str, partition: int, partitions: int) -> str:
    """The JetStream stream that holds a partition."""
    return topic if partitions == 1 else f"{topic}-{partition}"


def partition_prefix(topic: str, partition: int, partitions: int) -> str:
    """The prefix of the subjects of a partition."""
    return topic if partitions == 1 else f"{topic}.{partition}"


def stream_subjects(topic: str, partition: int, partitions: int) -> str:
    """All subjects of a partition."""
    return f"{partition_prefix(topic, partition, partitions)}.>"
