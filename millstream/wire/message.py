"""A message about to be published."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["OutgoingMessage"]


class OutgoingMessage(NamedTuple):
    """Subject, header block (may be empty) and payload of one message."""

    subject: bytes
    headers: bytes
    payload: bytes | memoryview
