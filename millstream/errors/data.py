"""Errors about stored events and their schemas."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import datetime
from typing import Any, Final

from millstream.errors.base import MillstreamError

__all__ = [
    "BackupError",
    "DataLoss",
    "HistoryGone",
    "Incompatible",
    "NotJson",
    "PackError",
    "SchemaError",
    "SchemaNotFound",
    "Undecodable",
    "Unfit",
    "Unmappable",
]


class DataLoss(MillstreamError):
    """Events that should be in the topic are missing."""


class HistoryGone(MillstreamError, LookupError):
    """A table no longer knows what it was at a time: values of then are removed.

    `key` is the first key of which that is so (None: of any), `others` how many more there may be,
    `oldest` when the oldest value that is stored of it was stored (None: none is).
    """

    def __init__(
        self,
        table: str,
        key: str | None,
        time: datetime,
        reason: str,
        *,
        oldest: datetime | None = None,
        others: int = 0,
        advice: str = "",
    ) -> None:
        self.table, self.key, self.time, self.reason = table, key, time, reason
        self.oldest, self.others = oldest, others
        what = "what it was" if key is None else f"the value of key {key!r}"
        more = f" (and of up to {others:,} more keys)" if others else ""
        advice = advice or "To look back further, keep the table without that"
        super().__init__(
            f"table '{table}': {what}{more} at {time.isoformat()} is not known any more: {reason}. "
            f"{advice}"
        )


class BackupError(MillstreamError):
    """A backup cannot be made, is damaged, or cannot be restored; the message says what exists."""


class Undecodable(MillstreamError, ValueError):
    """A stored event cannot be decoded; the message says which one, why, and how to continue."""

    def __init__(self, topic: str, partition: int, offset: int, index: int, reason: str) -> None:
        self.topic, self.partition, self.offset, self.index = topic, partition, offset, index
        self.reason = reason
        super().__init__(
            f"{topic}/{partition}, offset {offset}, index {index}: {reason}. To continue without "
            f"it, read with undecodable set to drop (in Spark also to null, with a column 'reason')"
        )


class NotJson(MillstreamError, ValueError):
    """`json()` was asked for, and the value is not JSON; the message says where and why."""

    def __init__(self, where: str, reason: str) -> None:
        self.where, self.reason = where, reason
        super().__init__(f"{where}: not JSON: {reason}. Its bytes are in `value` or `data`")


class SchemaError(MillstreamError, ValueError):
    """A schema cannot be used, mapped or changed in this way."""


class Unmappable(SchemaError):
    """A format cannot represent a type exactly, so the schema is refused when it is declared."""

    def __init__(self, field: str, type_: str, format_: str, reason: str) -> None:
        self.field, self.type, self.format, self.reason = field, type_, format_, reason
        super().__init__(f"field '{field}': {type_} cannot be mapped ({format_}): {reason}")


class Incompatible(SchemaError):
    """A version is not compatible with earlier ones; nothing was registered.

    `problems` has every reason: field, rule, message, direction and version.
    """

    def __init__(self, topic: str, mode: str, problems: Sequence[Any]) -> None:
        self.topic, self.mode, self.problems = topic, mode, tuple(problems)
        more = f" (and {len(self.problems) - 1} more)" if len(self.problems) > 1 else ""
        super().__init__(
            f"the schema is not compatible with the versions of '{topic}' under {mode}: "
            f"{self.problems[0]}{more}"
        )


class SchemaNotFound(SchemaError, LookupError):
    """The registry has no schema of that topic, version or id."""


class Unfit(SchemaError):
    """A value does not fit its schema; the message names field, expected and found.

    `row` is the index of the value, if several were given together.
    """

    def __init__(self, field: str, expected: str, found: str, row: int | None = None) -> None:
        self.field, self.expected, self.found, self.row = field, expected, found, row
        where = "the value" if not field else f"field '{field}'"
        if row is not None:
            where = f"row {row}, {where}"
        super().__init__(f"{where}: expected {expected}, found {found}")

    @classmethod
    def from_text(cls, text: str) -> SchemaError:
        """The error with this text, which a guard answered."""
        parts = _UNFIT.fullmatch(text)
        if parts is None:
            return SchemaError(text)
        row, field, expected, found = parts.groups()
        return cls(field or "", expected, found, None if row is None else int(row))


_UNFIT: Final = re.compile(
    r"(?:row (\d+), )?(?:the value|field '(.*?)'): expected (.*?), found (.*)", re.DOTALL
)


class PackError(MillstreamError, ValueError):
    """The bytes are not a valid pack; nothing was decoded from them.

    `reason` is one word for programs (docs/PACKS.md lists them), the text is for people.
    """

    def __init__(self, text: str, reason: str = "unsound") -> None:
        self.text, self.reason = text, reason
        super().__init__(text, reason)

    def __str__(self) -> str:
        return f"not a valid pack ({self.reason}): {self.text}"
