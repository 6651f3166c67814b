"""Bytes that are not UTF-8 in columns that hold text: a reversible form. Pure.

In Python the header names and ids of events are text in which a byte that is not UTF-8 is a
surrogate escape. Arrow, Parquet, Spark and packs have no such text: there the byte 0x80 + n is the
private-use character U+EF80 + n. One of these 128 characters in the original is written as its
three bytes, so that every name is read back unchanged.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from millstream.errors import ConfigError

__all__ = ["escaped", "header_pairs", "unescaped"]

_FIRST: Final = 0xEF80  # stands for the byte 0x80
_SURROGATE: Final = 0xDC80  # as in Python's `surrogateescape`
_TO_ESCAPE: Final = re.compile("[\udc80-\udcff\uef80-\uefff]")
_ESCAPED: Final = re.compile("[\uef80-\uefff]")


def escaped(text: str) -> str:
    r"""The text for a column, from text that may have surrogate escapes.

    >>> escaped("trace"), escaped(b"a\xff".decode("utf-8", "surrogateescape")) == "a\uefff"
    ('trace', True)
    """
    if text.isascii():
        return text
    found = _TO_ESCAPE.sub(_escape, text)
    if any("\ud800" <= letter <= "\udfff" for letter in found):
        raise ConfigError(f"{text[:60]!r}: a lone surrogate is not text")
    return found


def unescaped(text: str) -> str:
    r"""The text with surrogate escapes, from a column.

    >>> unescaped("a\uefff").encode("utf-8", "surrogateescape")
    b'a\xff'
    """
    if text.isascii() or _ESCAPED.search(text) is None:
        return text
    found = _ESCAPED.sub(lambda one: chr(ord(one[0]) - _FIRST + _SURROGATE), text)
    return found.encode("utf-8", "surrogateescape").decode("utf-8", "surrogateescape")


def header_pairs(headers: Mapping[str, str]) -> list[tuple[str, bytes]]:
    """Headers as a column holds them: names as text, values as bytes."""
    try:
        return [
            (escaped(name), text.encode("utf-8", "surrogateescape"))
            for name, text in headers.items()
        ]
    except UnicodeEncodeError as error:
        raise ConfigError(f"headers {headers!r:.200}: a lone surrogate is not text") from error


def _escape(found: re.Match[str]) -> str:
    data = found[0].encode("utf-8", "surrogateescape")
    return "".join(chr(_FIRST + byte - 0x80) for byte in data)
