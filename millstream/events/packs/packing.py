"""How a producer gathers events into packs: when a pack is full and how packs are sent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from millstream.errors import ConfigError

__all__ = ["PACK_BYTES_MAX", "PACK_EVENTS_MAX", "Packing"]

PACK_EVENTS_MAX: Final = 1_000_000  # what readers accept
PACK_BYTES_MAX: Final = 64 * 1024 * 1024  # the largest payload a NATS server can be set to accept
PACK_BYTES_MIN: Final = 16 * 1024


@dataclass(frozen=True, slots=True)
class Packing:
    """A pack is sent when it reaches one of the limits or its first event has waited `linger`."""

    max_events: int = 5_000  # beyond this, larger packs are no faster
    max_bytes: int = 1024 * 1024  # of the complete message; at most the server's max_payload
    linger: float = 0.05  # seconds an event waits for others
    compression: Literal["auto", "none", "lz4", "zstd"] = "auto"  # auto: lz4 where it saves much
    max_in_flight: int = 8  # packs sent and not acknowledged; of a writer at least one per lane
    # An event larger than max_bytes is sent as a pack of its own if the server accepts it.
    large_alone: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.linger <= 60:
            raise ConfigError(f"linger {self.linger!r}: choose 0 to 60 seconds")
        if not 1 <= self.max_in_flight <= 1000:
            raise ConfigError(f"max_in_flight {self.max_in_flight!r}: choose 1 to 1,000 packs")
        if self.compression not in ("auto", "none", "lz4", "zstd"):
            raise ConfigError(f"compression {self.compression!r}: choose auto, none, lz4 or zstd")
        if not 1 <= self.max_events <= PACK_EVENTS_MAX:
            raise ConfigError(f"max_events {self.max_events!r}: choose 1 to {PACK_EVENTS_MAX:,}")
        if not PACK_BYTES_MIN <= self.max_bytes <= PACK_BYTES_MAX:
            raise ConfigError(f"max_bytes {self.max_bytes!r}: choose 16 KiB to 64 MiB")
