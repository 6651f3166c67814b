"""When a producer's pack is full. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from millstream.errors import ConfigError

if TYPE_CHECKING:
    import pyarrow as pa

    from millstream.events.packs.pack import EncodedPack, PackLimits

__all__ = ["Packing"]


@dataclass(frozen=True, slots=True)
class Packing:
    """A pack is full when the first of these limits is reached."""

    max_events: int = 5_000
    max_bytes: int = 1024 * 1024  # of the message; below the server's max_payload
    linger: float = 0.05  # seconds an event waits for others
    compression: Literal["none", "lz4", "zstd"] = "none"
    max_in_flight: int = 8  # packs sent and not acknowledged; a fence always has one

    def __post_init__(self) -> None:
        if not 0 <= self.linger <= 60:
            raise ConfigError(f"linger {self.linger!r}: choose 0 to 60 seconds")
        if not 1 <= self.max_in_flight <= 1000:
            raise ConfigError(f"max_in_flight {self.max_in_flight!r}: choose 1 to 1,000 packs")
        if self.compression not in ("none", "lz4", "zstd"):
            raise ConfigError(f"compression {self.compression!r}: choose none, lz4 or zstd")
        if self.max_events < 1 or self.max_bytes < 16 * 1024:
            raise ConfigError(
                f"a pack of at most {self.max_events!r} events and {self.max_bytes!r} bytes: "
                f"choose 1 event or more and 16 KiB or more"
            )

    def limits(self, max_payload: int) -> PackLimits:
        """The limits of a pack on a server that accepts messages of `max_payload` bytes."""
        from millstream.events.packs.pack import PackLimits

        return PackLimits(self.max_events, min(self.max_bytes, max_payload))

    def pack(self, batch: pa.RecordBatch, schema_id: str | None) -> EncodedPack:
        from millstream.events.packs.pack import encode

        return encode(batch, schema_id=schema_id, compression=self.compression)
