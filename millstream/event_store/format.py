"""One append as one message: its bytes. Pure; shared by the store and by Spark.

The payload has one line of JSON for each event, `{"Deposited":{"amount":5}}`: the tag is the
event's name and, from the second version of its schema on, that version: `Deposited.2`. The header
`Mill-Versions: 15-17` has the aggregate's versions of the first and the last of them. A message
without a value that has this header is the end of an aggregate: it was deleted or archived.

The header `Mill-Previous: 9120,2f,a1c` says where the aggregate's last appends before this one are:
the offset of the newest, then how far back it is from each to the one before, in hex. It saves the
broker the search; what is read that way is checked by its versions, so it need not be right.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Final

import msgspec

from millstream.errors import ConfigError
from millstream.events.subject import is_name

__all__ = [
    "ARCHIVED_HEADER",
    "CAUSATION_HEADER",
    "CORRELATION_HEADER",
    "EVENTS_MAX",
    "PREVIOUS_HEADER",
    "PREVIOUS_MAX",
    "STORED_HEADER",
    "VERSIONS_HEADER",
    "check_event_name",
    "join_lines",
    "next_previous",
    "read_previous",
    "read_tag",
    "read_versions",
    "split_lines",
    "tag_of",
    "versions_text",
]

VERSIONS_HEADER: Final = "Mill-Versions"
PREVIOUS_HEADER: Final = "Mill-Previous"
CORRELATION_HEADER: Final = "Mill-Correlation"
CAUSATION_HEADER: Final = "Mill-Causation"
ARCHIVED_HEADER: Final = "Mill-Archived"  # the topic that holds the events of the aggregate now
STORED_HEADER: Final = "Mill-Stored"  # when an archived event was stored first
EVENTS_MAX: Final = 10_000  # of one append; it must also fit into one message

# Appends that one of them leads back to: read together, so that is also how many messages a round
# trip brings. More would make every message longer.
PREVIOUS_MAX: Final = 10
# No append leads back to a larger one: the server cuts off a client that it holds 64 MiB for.
LARGE_BYTES: Final = 1024 * 1024

_VERSION_DIGITS: Final = 18
_LINE: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])


def check_event_name(name: str) -> str:
    """The name if an event can have it; else a ConfigError."""
    if not is_name(name) or name == "Deleted":
        raise ConfigError(
            f"event name {name!r}: use letters, digits, _ and -, and not 'Deleted', which is the "
            f"end of an aggregate. Give another one: events={{'Name': {name:.40}}}"
        )
    return name


def tag_of(name: str, version: int) -> str:
    """The tag of an event: its name, and the version of its schema from 2 on.

    >>> tag_of("Deposited", 1), tag_of("Deposited", 2)
    ('Deposited', 'Deposited.2')
    """
    return name if version == 1 else f"{name}.{version}"


def read_tag(tag: str) -> tuple[str, int]:
    """Name and schema version of a tag; a ValueError when it is none.

    >>> read_tag("Deposited"), read_tag("Deposited.2")
    (('Deposited', 1), ('Deposited', 2))
    """
    name, dot, version = tag.partition(".")
    if not dot:
        return name, 1
    if not (version.isascii() and version.isdigit() and len(version) <= _VERSION_DIGITS):
        raise ValueError(f"{tag!r:.80} is not the tag of an event")
    return name, int(version)


def join_lines(events: Iterable[tuple[str, bytes]]) -> bytes:
    """The payload of events, given as tag and JSON.

    >>> join_lines([("Opened", b"{}"), ("Deposited.2", b'{"amount":5}')])
    b'{"Opened":{}}\\n{"Deposited.2":{"amount":5}}'
    """
    return b"\n".join([b'{"%b":%b}' % (tag.encode(), body) for tag, body in events])


def split_lines(payload: bytes) -> list[tuple[str, bytes]]:
    """Tag and JSON of each event of a payload; a ValueError when it is not one.

    >>> split_lines(b'{"Opened":{}}\\n{ "Deposited.2": {"amount":5} }')
    [('Opened', b'{}'), ('Deposited.2', b'{"amount":5}')]
    """
    found = []
    for line in payload.split(b"\n"):
        # As this module writes it: the tag needs no escapes, so it ends at the next quote.
        end = line.find(b'":{', 2)
        if line.startswith(b'{"') and line.endswith(b"}}") and 0 < end == line.find(b'"', 2):
            found.append((line[2:end].decode(), line[end + 2 : -1]))
        else:
            found.append(_foreign_line(line))
    return found


def _foreign_line(line: bytes) -> tuple[str, bytes]:
    """The same for a line that another program wrote."""
    try:
        ((tag, body),) = _LINE.decode(line).items()
    except (msgspec.DecodeError, UnicodeDecodeError, ValueError) as error:
        raise ValueError(f"not an event of a store: {line!r:.80}") from error
    return tag, bytes(body)


def versions_text(first: int, last: int) -> str:
    """The value of the header that has the versions of an append."""
    return f"{first}-{last}"


def read_versions(headers: Mapping[str, str]) -> tuple[int, int]:
    """The versions of the first and last event of an append; a ValueError when there are none.

    >>> read_versions({"Mill-Versions": "15-17"})
    (15, 17)
    """
    text = headers.get(VERSIONS_HEADER, "")
    first, dash, last = text.partition("-")
    for number in (first, last):
        if not (number.isascii() and number.isdigit() and len(number) <= _VERSION_DIGITS):
            raise ValueError(f"header {VERSIONS_HEADER} is {text!r:.40}, not as a store writes it")
    if not dash or not 1 <= int(first) <= int(last):
        raise ValueError(f"header {VERSIONS_HEADER} is {text!r:.40}, not as a store writes it")
    return int(first), int(last)


def next_previous(previous: str, offset: int, size: int = 0) -> str:
    """What an append says of those before it: of the one at an offset, and of what that one says.

    `size` is the length of that one's payload.

    >>> next_previous("", 9000), next_previous("9000", 9120)
    ('9000', '9120,78')
    """
    if size > LARGE_BYTES:
        return ""
    newest, _, rest = previous.partition(",")
    try:
        back = offset - int(newest)
    except ValueError:
        return str(offset)
    if back < 1:
        return str(offset)
    kept = rest.split(",")[: PREVIOUS_MAX - 2] if rest else []
    return ",".join((str(offset), f"{back:x}", *kept))


def read_previous(text: str) -> list[int]:
    """The offsets that such a header leads to, the newest first; none when it is not one.

    >>> read_previous("9120,78,1"), read_previous("9120,9121"), read_previous("")
    ([9120, 9000, 8999], [], [])
    """
    newest, *distances = text.split(",")
    try:
        offsets = [int(newest)]
        for distance in distances[: PREVIOUS_MAX - 1]:
            offsets.append(offsets[-1] - int(distance, 16))
    except ValueError:
        return []
    fine = all(later > earlier for later, earlier in pairwise(offsets))
    return offsets if fine and offsets[-1] > 0 else []
