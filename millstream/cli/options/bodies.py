"""Bodies and headers of messages, as they are given on the command line or piped in."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from io import BufferedReader
from pathlib import Path
from typing import Annotated, Final, cast

import typer

from millstream.errors import ConfigError

__all__ = [
    "BodyArgument",
    "HeaderOption",
    "TemplateOption",
    "body_bytes",
    "filled",
    "header_pairs",
    "stdin_lines",
]

BodyArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="[BODY]", help="The body; @FILE takes a file, - or nothing takes what is piped in."
    ),
]
HeaderOption = Annotated[
    list[str] | None,
    typer.Option("--header", "-H", metavar="'NAME: VALUE'", help="A header; repeat it for more."),
]
TemplateOption = Annotated[
    bool,
    typer.Option(
        "--template",
        help="Fill in {{Count}}, {{Time}}, {{ID}}, {{Subject}}; in a reply also {{Request}}.",
    ),
]

CHUNK_BYTES: Final = 64 * 1024  # what a pipe holds
LINE_BYTES_MAX: Final = 64 * 1024 * 1024  # the server's hard limit for a message

_BLANK: Final = re.compile(rb"\{\{\s*(\w+)\s*\}\}")


def body_bytes(body: str | None) -> bytes:
    """The body itself, the file that @FILE names, or all that is piped in."""
    if body is not None and body.startswith("@") and len(body) > 1:
        return Path(body[1:]).read_bytes()
    if body is not None and body != "-":
        return body.encode("utf-8", "surrogateescape")
    if body is None and sys.stdin.isatty():
        raise ConfigError("there is no body: give one, or pipe one in")
    return sys.stdin.buffer.read()


def stdin_lines() -> Iterator[list[bytes]]:
    """Lines without their ends, as they are piped in: those that came together are together."""
    pipe = cast(BufferedReader, sys.stdin.buffer)
    rest: list[bytes] = []
    size = 0
    while chunk := pipe.read1(CHUNK_BYTES):
        rest.append(chunk)
        if b"\n" not in chunk:
            size += len(chunk)
            if size > LINE_BYTES_MAX:
                raise ConfigError(f"a line has over {LINE_BYTES_MAX:,} bytes; no server takes that")
            continue
        *whole, left = b"".join(rest).split(b"\n")
        rest, size = [left], len(left)
        yield [line.removesuffix(b"\r") for line in whole]
    if last := b"".join(rest):
        yield [last.removesuffix(b"\r")]


def header_pairs(headers: list[str] | None) -> list[tuple[str, str]]:
    """Headers given as 'Name: value'."""
    pairs = []
    for text in headers or ():
        name, colon, value = text.partition(":")
        if not colon or not name.strip():
            raise ConfigError(f"not a header: {text!r}. Write it like 'Name: value'")
        pairs.append((name.strip(), value.strip()))
    return pairs


def filled(template: bytes, words: Mapping[str, bytes]) -> bytes:
    """A template with its blanks filled in; a blank of another name is refused.

    >>> filled(b"n {{Count}}", {"Count": b"3"})
    b'n 3'
    """

    def fill(found: re.Match[bytes]) -> bytes:
        name = found[1].decode()
        if name not in words:
            known = ", ".join(sorted(words))
            raise ConfigError(f"the template has a blank {{{{{name}}}}}. There are: {known}")
        return words[name]

    return _BLANK.sub(fill, template)
