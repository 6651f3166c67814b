"""The record of a process with tables: one message, replaced by each commit. Pure."""

from __future__ import annotations

from typing import Final

import msgspec

from millstream.errors import ConfigError, DataLoss
from millstream.events.subject import PACK_TOKEN
from millstream.wire.message import StoredMessage

__all__ = [
    "CommitRecord",
    "InputPosition",
    "other_kind",
    "read_record",
    "record_subject",
    "state_subject",
]

RECORD_TOKEN: Final = "_process"
STATE_TOKEN: Final = "_state"


class InputPosition(msgspec.Struct, frozen=True, array_like=True):
    """How far an input partition is handled."""

    offset: int = 0  # of the last message with an event that was handled
    stored: str = ""  # when it was stored, in nanoseconds: shows whether it is still the same
    events: int | None = None  # of its events that were handled; None: all

    @property
    def next(self) -> int:
        """The offset to read from."""
        return self.offset + 1 if self.events is None else self.offset


class CommitRecord(msgspec.Struct, frozen=True):
    """What a commit says besides its rows."""

    unit: int  # grows by one with each commit
    process: str
    writes: list[str]  # topics and tables
    positions: dict[str, InputPosition]  # by input stream
    chunks: int = 0  # messages of the redo
    size: int = 0  # bytes of the redo
    checksum: int = 0


_records: Final = msgspec.json.Decoder(CommitRecord)


def record_subject(prefix: str, process: str) -> str:
    """Where the record of a process is; readers of events skip it."""
    return f"{prefix}.{RECORD_TOKEN}.{process}"


def state_subject(prefix: str, process: str | None) -> str:
    """The fence of a process with tables in a stream; with None that of a table's only owner."""
    subject = f"{prefix}.{PACK_TOKEN}.{STATE_TOKEN}"
    return subject if process is None else f"{subject}.{process}"


def other_kind(process: str, topic: str) -> ConfigError:
    """The error for a process whose positions are kept in another way."""
    return ConfigError(
        f"process '{process}' has written to '{topic}' before, and was then with tables where it "
        f"is now without, or the other way round: its position is not known here, and it would "
        f"write everything again. Use another name, and other targets if they should not get "
        f"everything again"
    )


def read_record(found: StoredMessage, stream: str) -> CommitRecord:
    """The record in a message; DataLoss when it is damaged."""
    try:
        return _records.decode(found.payload)
    except msgspec.MsgspecError as error:
        raise DataLoss(
            f"the record of a process at offset {found.sequence} of '{stream}' is damaged "
            f"({error}). Check the disk"
        ) from error
