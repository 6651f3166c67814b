"""Atomic batches on the wire: their headers and limits. Pure."""

from __future__ import annotations

from typing import Final

__all__ = ["BATCH_BYTES_MAX", "BATCH_MESSAGES_MAX", "with_batch_headers"]

# The server's own limit of messages in a batch.
BATCH_MESSAGES_MAX: Final = 1000
# The server queues a batch's bytes and silently drops what exceeds 128 MB; half of that is safe.
BATCH_BYTES_MAX: Final = 64 * 1024 * 1024
_HEADER_END: Final = b"\r\n\r\n"


def with_batch_headers(block: bytes, batch_id: str, number: int, commit: bool) -> bytes:
    """The header block with the headers of a batch added."""
    own = f"\r\nNats-Batch-Id: {batch_id}\r\nNats-Batch-Sequence: {number}".encode()
    if commit:
        own += b"\r\nNats-Batch-Commit: 1"
    head = block.removesuffix(_HEADER_END) if block else b"NATS/1.0"
    return head + own + _HEADER_END
