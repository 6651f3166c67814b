"""What can be chosen about a process, and what it is given."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from millstream.errors import ConfigError, PayloadTooLarge
from millstream.events.event import Partition
from millstream.events.packs.packing import Packing
from millstream.events.subject import check_name
from millstream.messaging.publishing.target import PackTarget
from millstream.settings import hold_seconds

__all__ = ["ProcessParts", "ProcessSettings", "ProcessTarget", "Transform"]

# A function of an event; with tables, of an event and the tables by their names.
Transform = Callable[..., Any | Awaitable[Any]]

# Large enough for one commit to be one pack: several are stored as an atomic batch, which costs an
# unreplicated file stream 15 ms.
COMMIT_PACKING: Final = Packing(max_events=20_000, max_bytes=4 * 1024 * 1024)

ROW_HEADER_BYTES: Final = 512  # of the batch and of the schema


@dataclass(frozen=True, slots=True)
class ProcessSettings:
    """How often a process commits and what it does with an event that fails."""

    name: str  # of two processes with the same name the newer fences out the older
    commit_every: float = 0.1  # seconds between commits at most; more while it is far behind
    commit_events: int = 10_000  # outputs between commits at most
    on_error: Literal["stop", "dead_letter"] = "stop"
    partitions: tuple[int, ...] | None = None  # of the input; None: all, in parallel
    packing: Packing = COMMIT_PACKING
    fail_on_data_loss: bool = True  # stop at events that the broker has lost; False: go on
    rows_max: int = 1_000_000  # of all its tables together, which it holds in memory

    def __post_init__(self) -> None:
        check_name("process", self.name)
        hold_seconds(self, "commit_every")
        if self.on_error not in ("stop", "dead_letter"):
            raise ConfigError(f"on_error {self.on_error!r}: choose stop or dead_letter")
        if self.commit_every <= 0 or self.commit_events < 1:
            raise ConfigError("commit_every and commit_events must be greater than zero")
        if self.rows_max < 1:
            raise ConfigError(f"rows_max {self.rows_max}: it must be greater than zero")


@dataclass(frozen=True, slots=True)
class ProcessTarget:
    """A topic or table that a process writes to."""

    name: str
    target: PackTarget
    is_table: bool  # it takes single rows by key, no packs
    message_max: int  # bytes of one message that it takes

    def takes(self, size: int) -> bool:
        """Whether a row of this many bytes fits its table, with the headers of a batch."""
        return size + ROW_HEADER_BYTES <= self.message_max

    def check_row(self, size: int) -> None:
        """PayloadTooLarge for a row that its table would not take."""
        if not self.takes(size):
            raise PayloadTooLarge(size + ROW_HEADER_BYTES, self.message_max)


@dataclass(frozen=True, slots=True)
class ProcessParts:
    """What a process reads and writes."""

    inputs: Sequence[Partition]
    outputs: Sequence[ProcessTarget]  # what the function returns goes there
    tables: dict[str, ProcessTarget]  # what the function reads and changes, by the names it uses
