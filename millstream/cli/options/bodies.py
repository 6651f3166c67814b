"""Bodies and headers of messages, as they are given on the command line or piped in."""

import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from io import BufferedReader
from itertools import count
from pathlib import Path
from typing import Annotated, Final, cast

import typer

from millstream.errors import ConfigError
from millstream.settings import parse_duration

__all__ = [
    "BodyArgument",
    "BodyOptions",
    "HeaderOption",
    "TemplateOption",
    "body_bytes",
    "fill_template",
    "header_pairs",
    "stdin_lines",
    "template_variables",
]

BodyArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="[BODY]", help="The body; @FILE reads a file, - or no body reads stdin."
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

BATCH_MESSAGES: Final = 1000  # repeated messages that are published together

Body = tuple[bytes, dict[str, bytes]]  # a body, with the variables of its template

_VARIABLE: Final = re.compile(rb"\{\{\s*(\w+)\s*\}\}")


def body_bytes(body: str | None) -> bytes:
    """The body itself, the file that @FILE names, or all that is piped in."""
    if body is not None and body.startswith("@") and len(body) > 1:
        return Path(body[1:]).read_bytes()
    if body is not None and body != "-":
        return body.encode("utf-8", "surrogateescape")
    if body is None and sys.stdin.isatty():
        raise ConfigError("no body: give one, or pipe one in")
    return sys.stdin.buffer.read()


def stdin_lines() -> Iterator[list[bytes]]:
    """Lines of stdin without their line ends, as they arrive; one list per read."""
    pipe = cast(BufferedReader, sys.stdin.buffer)
    rest: list[bytes] = []
    size = 0
    while chunk := pipe.read1(CHUNK_BYTES):
        rest.append(chunk)
        if b"\n" not in chunk:
            size += len(chunk)
            if size > LINE_BYTES_MAX:
                raise ConfigError(f"a line has over {LINE_BYTES_MAX:,} bytes; no server accepts it")
            continue
        *complete, left = b"".join(rest).split(b"\n")
        rest, size = [left], len(left)
        yield [line.removesuffix(b"\r") for line in complete]
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


def fill_template(template: bytes, variables: Mapping[str, bytes]) -> bytes:
    """A template with its variables filled in; an unknown variable is refused.

    >>> fill_template(b"n {{Count}}", {"Count": b"3"})
    b'n 3'
    """

    def fill(found: re.Match[bytes]) -> bytes:
        name = found[1].decode()
        if name not in variables:
            known = ", ".join(sorted(variables))
            raise ConfigError(f"the template has an unknown {{{{{name}}}}}. Known are: {known}")
        return variables[name]

    return _VARIABLE.sub(fill, template)


def template_variables(number: int, subject: str) -> dict[str, bytes]:
    """The variables of the template of the n-th message."""
    from millstream.cli.options.times import time_text
    from millstream.deadline import now_ns
    from millstream.wire.protocol import unique_token

    return {
        "Count": b"%d" % number,
        "Time": time_text(now_ns()).encode(),
        "ID": unique_token().encode(),
        "Subject": subject.encode("utf-8", "surrogateescape"),
    }


@dataclass(frozen=True, slots=True)
class BodyOptions:
    """What is published, and how often."""

    body: BodyArgument = None
    lines: Annotated[
        bool, typer.Option("--lines", "-l", help="Publish each line of stdin as one message.")
    ] = False
    header: HeaderOption = None
    times: Annotated[
        int, typer.Option("--count", "-c", min=1, help="Number of times to send it.")
    ] = 1
    sleep: Annotated[
        str, typer.Option("--sleep", help="Pause after each message, such as 100ms.")
    ] = "0s"
    template: TemplateOption = False

    @property
    def several(self) -> bool:
        """Whether more than one message may be published."""
        return self.lines or self.times > 1

    def check(self) -> None:
        """Refuse wrong values, and options that exclude each other."""
        if self.lines and (self.body not in (None, "-") or self.times > 1):
            raise ConfigError("--lines reads stdin, once: leave the body and --count out")
        self.headers()
        self.pause()

    def headers(self) -> list[tuple[str, str]]:
        """The headers of every message."""
        return header_pairs(self.header)

    def pause(self) -> float:
        """Seconds after each message."""
        return parse_duration(self.sleep)

    def batches(self, subject: str, null: bool = False) -> Iterator[list[Body]]:
        """Bodies in batches: lines as they arrive, repeated ones up to BATCH_MESSAGES."""
        if self.lines:
            number = count(1)
            for lines in stdin_lines():
                yield [self._filled(line, next(number), subject) for line in lines]
            return
        once = b"" if null else body_bytes(self.body)
        for first in range(1, self.times + 1, BATCH_MESSAGES):
            end = min(first + BATCH_MESSAGES, self.times + 1)
            yield [self._filled(once, number, subject) for number in range(first, end)]

    def _filled(self, body: bytes, number: int, subject: str) -> Body:
        if not self.template:
            return body, {}
        variables = template_variables(number, subject)
        return fill_template(body, variables), variables
