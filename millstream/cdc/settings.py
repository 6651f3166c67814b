"""The settings of a capture: cdc.toml, or the table [cdc] of millstream.toml."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from millstream.settings import Secret, hide_password

__all__ = ["CaptureSettings", "Format", "Mask", "OutboxSettings", "TableSettings"]

Format = Literal["changes", "rows"]
Mask = Literal["hash", "null", "redact"]


@dataclass(frozen=True, slots=True)
class TableSettings:
    """What one table has of its own."""

    topic: str | None = None  # None: by CaptureSettings.topic
    columns: tuple[str, ...] = ()  # captured; empty: all
    exclude: tuple[str, ...] = ()  # left out
    key: tuple[str, ...] = ()  # empty: the primary key, or the replica identity's index
    mask: Mapping[str, Mask] = field(default_factory=dict)  # by column
    text: tuple[str, ...] = ()  # columns that are captured as the database writes them


@dataclass(frozen=True, slots=True)
class OutboxSettings:
    """A table whose new rows are events of the topics that they name."""

    table: str  # "public.outbox"
    topic: str = "topic"  # column with the topic's name
    key: str = "key"  # column with the key; null: no key
    value: str = "value"  # column with the value: text, JSON or bytes; null: a deletion
    headers: str | None = None  # column with a JSON object of texts
    id: str | None = "id"  # column with the event's id


@dataclass(frozen=True, slots=True)
class CaptureSettings:
    """One capture: where from, which tables, and what becomes of them."""

    name: str  # of its slot, publication, writers: letters, digits, '_'
    source: str  # postgresql://..., mysql://..., sqlite:///path
    tables: tuple[str, ...] = ("*",)  # patterns; "!pattern" leaves tables out
    table: Mapping[str, TableSettings] = field(default_factory=dict)  # by full name
    outbox: tuple[OutboxSettings, ...] = ()
    topic: str = "{table}"  # may have {namespace}, {table}, {name}
    format: Format = "changes"
    snapshot: bool = True  # rows that are there when the capture begins
    whole_transactions: bool = False  # rows of a transaction in one topic are stored in one step
    truncate: Literal["stop", "event", "ignore"] = "stop"
    mask_key: Secret | None = None  # of the mask "hash"
    heartbeat: float = 10.0  # seconds between positions that are stored for idle tables
    log_budget: int = 10 * 1024**3  # bytes of log that the source may keep for this capture

    def settings_of(self, table: str) -> TableSettings:
        """Those of a table, by its full name."""
        return self.table.get(table, TableSettings())

    def topic_of(self, namespace: str, table: str) -> str:
        """The topic of a table."""
        full = f"{namespace}.{table}" if namespace else table
        own = self.settings_of(full).topic
        return own or self.topic.format(namespace=namespace, table=table, name=self.name)

    def __repr__(self) -> str:
        """Without passwords."""
        return f"CaptureSettings(name={self.name!r}, source={hide_password(self.source)!r})"
