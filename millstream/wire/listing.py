"""When a list of streams or consumers is complete. Pure; both clients follow it.

The server lists in pages, cut from the sorted names at an offset. A page may lack rows: in a
cluster the leader of a stream may not answer the node that makes the list, and the answer then
names the stream in `missing` (and why, in `offline`, if that node knows). Between two pages names
may also come and go, which moves all later rows. Nobody may act on such a list, so:

- A page that lacks a row is requested again, until it is complete or the time is up.
- Pages overlap by a row. A page that starts after the last row is not its continuation: something
  before was deleted, and the pages before it are read again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Generic, TypeVar

import msgspec

from millstream.errors import IncompleteList
from millstream.wire.api import ConsumerInfo, StreamInfo

__all__ = [
    "GATHER_SECONDS",
    "NAMES_PAGES_MAX",
    "Listing",
    "NamesPage",
    "Page",
    "consumers",
    "streams",
]

# A node waits up to 4 s for the leaders of the others before it answers with what it has.
GATHER_SECONDS: Final = 6.0
# The server gives 256 rows a page; this many pages are more rows than it can hold.
PAGES_MAX: Final = 10_000
NAMES_PAGES_MAX: Final = 10  # of names that an error may propose

Row = TypeVar("Row")


class Page(msgspec.Struct):
    """An answer of STREAM.LIST or CONSUMER.LIST."""

    total: int = 0  # of the whole list; a page after its end says 0
    offset: int = 0
    limit: int = 0
    missing: list[str] | None = None
    offline: dict[str, str] | None = None
    streams: list[StreamInfo] | None = None
    consumers: list[ConsumerInfo] | None = None


class NamesPage(msgspec.Struct):
    """An answer of STREAM.NAMES, which has up to 1,024 names."""

    total: int = 0
    streams: list[str] | None = None


class Listing(Generic[Row]):
    """One list under way: what to request next, and the rows so far.

    With `states=False` a stream counts as listed when its configuration is known. That is so for
    one whose nodes are all down: the server adds it, with an empty state, and names it missing.
    """

    def __init__(
        self,
        what: str,
        verb: str,
        rows_of: Callable[[Page], list[Row] | None],
        name_of: Callable[[Row], str],
        *,
        filters: dict[str, Any] | None = None,
        states: bool = True,
    ) -> None:
        self.verb, self.complete = verb, False
        self.rows: list[Row] = []
        self._what, self._rows_of, self._name_of = what, rows_of, name_of
        self._filters, self._states = filters or {}, states
        self._offset, self._last, self._pages = 0, "", 0
        self._missing: dict[str, str] = {}

    @property
    def request(self) -> dict[str, Any]:
        """The body of the next request."""
        return {"offset": self._offset, **self._filters}

    @property
    def short(self) -> bool:
        """The last page lacked rows."""
        return bool(self._missing)

    def take(self, page: Page) -> bool:
        """Take a page; False: it lacks rows, wait and request it again."""
        rows = self._rows_of(page) or []
        self._pages += 1
        self._missing = self._lacking(rows, page)
        if self._missing:
            return False
        if self._pages > PAGES_MAX:
            raise IncompleteList(self._what, {}, f"it changed during {PAGES_MAX:,} requests")
        names = [self._name_of(row) for row in rows]
        if self._offset > 0 and (not names or names[0] > self._last):
            self._offset = max(0, self._offset - (page.limit or len(rows) or 1))
            return True
        self.rows += [row for row, name in zip(rows, names, strict=True) if name > self._last]
        self._last = max([self._last, *names])
        end = self._offset + len(rows)
        self.complete = end >= page.total
        self._offset = max(end - 1, 0)
        return True

    def _lacking(self, rows: list[Row], page: Page) -> dict[str, str]:
        """The rows that the page should have and has not, with the reason if one is known."""
        reasons = page.offline or {}
        lacking = {name: reasons.get(name, "") for name in [*(page.missing or ()), *reasons]}
        if not self._states:
            for row in rows:
                lacking.pop(self._name_of(row), None)
        expected = max(0, min(page.limit or len(rows), page.total - self._offset))
        if not lacking and len(rows) < expected:
            lacking[f"{expected - len(rows)} of {expected}"] = "the server gave no name"
        return lacking

    def incomplete(self, seconds: float) -> IncompleteList:
        """The error when the time is up."""
        return IncompleteList(self._what, self._missing, f"within {seconds:g} s")


def streams(subject: str | None = None, states: bool = True) -> Listing[StreamInfo]:
    """The list of all streams of the account, or of those that take the given subject."""
    return Listing(
        "streams",
        "STREAM.LIST",
        lambda page: page.streams,
        lambda info: str(info.config["name"]),
        filters=None if subject is None else {"subject": subject},
        states=states,
    )


def consumers(stream: str) -> Listing[ConsumerInfo]:
    """The list of all consumers of a stream."""
    return Listing(
        f"consumers of '{stream}'",
        f"CONSUMER.LIST.{stream}",
        lambda page: page.consumers,
        lambda info: info.name,
    )
