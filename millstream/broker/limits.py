"""Limits of one server: sizes and numbers, checked when they are created."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Final

from millstream.declared import Declaration, Form, declared
from millstream.errors import ConfigError

__all__ = ["LIMITS", "Limits"]

LIMITS: Final = "Limits and server"  # heading of the options
_MEBIBYTE: Final = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one server; None means chosen from this machine when it starts."""

    max_payload: int = declared(
        8 * _MEBIBYTE,  # a pack of several thousand events fits
        Declaration("Maximum size of a message.", Form.SIZE, LIMITS),
    )
    max_file_store: int | None = declared(
        None,
        Declaration(
            "Maximum size of all streams on disk.",
            Form.SIZE,
            LIMITS,
            default_text="less than the free disk space",
        ),
    )
    max_memory_store: int | None = declared(
        None,
        Declaration(
            "Maximum size of all streams in memory.",
            Form.SIZE,
            LIMITS,
            default_text="a quarter of the RAM",
        ),
    )
    max_server_memory: int | None = declared(
        None,
        Declaration(
            "Maximum memory of the server process; one that takes more is stopped.",
            Form.SIZE,
            LIMITS,
            default_text="three quarters of the RAM",
        ),
    )
    max_connections: int = declared(
        65_536, Declaration("Maximum number of clients.", Form.NUMBER, LIMITS)
    )
    default_max_consumers: int = declared(
        100_000,  # the server's 1,000 is soon used up by readers
        Declaration("Maximum number of consumers of a stream that sets none.", Form.NUMBER, LIMITS),
    )

    def __post_init__(self) -> None:
        for name in (item.name for item in fields(self)):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ConfigError(f"{name} must be above 0, not {value}")
        if self.max_payload > 64 * _MEBIBYTE:
            raise ConfigError(
                f"max_payload is {self.max_payload:,} bytes; the server allows at most 64 MiB"
            )
