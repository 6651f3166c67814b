"""What a running capture says about itself; made to travel as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from millstream.cdc.model import CaptureLag

__all__ = ["CaptureState", "CaptureStatus", "TableState", "TableStatus"]

CaptureState = Literal["checking", "snapshot", "streaming", "stopped", "failed"]
TableState = Literal["waiting", "snapshot", "streaming"]


@dataclass(slots=True)
class TableStatus:
    """One captured table. The capture counts in it while it runs."""

    table: str  # "public.orders"
    topic: str
    state: TableState = "waiting"
    snapshot_rows: int = 0  # stored by this snapshot, also before a restart
    snapshot_estimate: int | None = None  # rows that the snapshot will have; None: unknown
    events: int = 0  # stored since this process began, without the snapshot
    position: str | None = None  # of the last stored change: its commit, and its number in it


@dataclass(slots=True)
class CaptureStatus:
    """One capture, as it is at this moment."""

    name: str
    state: CaptureState
    source: str  # without its password
    since: str  # when this process began, ISO 8601 in UTC
    tables: list[TableStatus] = field(default_factory=list)
    lag: CaptureLag = field(default_factory=CaptureLag)
    error: str | None = None  # why it failed
    alarms: list[str] = field(default_factory=list)  # what needs a look before it becomes an error

    def to_json(self) -> dict[str, Any]:
        """As plain data for JSON."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> CaptureStatus:
        """From what `to_json` returned, perhaps in another version: unknown fields are left out."""
        status: CaptureStatus = _known(cls, data)
        status.tables = [_known(TableStatus, each) for each in data.get("tables", [])]
        status.lag = _known(CaptureLag, data.get("lag") or {})
        return status


def _known(kind: Any, data: Mapping[str, Any]) -> Any:
    return kind(**{name: data[name] for name in kind.__dataclass_fields__ if name in data})
