"""Direct requests: reading a stream batch by batch without a consumer. Pure.

A direct answer has the offset of each message in headers that the server adds. Readers take
messages as a consumer delivers them, so the address of an ack is made from those.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from millstream.wire.message import RawMessage, StoredMessage, stored_ns_of
from millstream.wire.protocol import HEADERS_END, parse_header_items, status_of

__all__ = [
    "BATCH_MESSAGES",
    "DirectMessage",
    "matches",
    "next_of_leader",
    "next_of_stream",
    "status_of_answer",
]

BATCH_MESSAGES: Final = 1000
BATCH_BYTES: Final = 8 * 1024 * 1024
_SEQUENCE_MARK: Final = b"\r\nNats-Sequence: "
_ADDED: Final = b"Nats-Stream: "  # the first header that the server adds


class DirectMessage(NamedTuple):
    """One message of an answer: where it is stored, and what it is."""

    stream: str
    sequence: int
    subject: str
    time: str
    pending: str
    headers: bytes
    payload: bytes

    @classmethod
    def of_answer(cls, headers: bytes, payload: bytes) -> DirectMessage:
        """A message as a direct answer has it."""
        # The last of them, because the server's headers come after the message's own.
        own, added, rest = headers.rpartition(_ADDED)
        whole = own.endswith(b"\r\n") and HEADERS_END not in own
        known = dict(parse_header_items(b"\r\n%b%b" % (added, rest)))
        return cls(
            known["Nats-Stream"],
            int(known["Nats-Sequence"]),
            known["Nats-Subject"],
            known["Nats-Time-Stamp"],
            known.get("Nats-Num-Pending", "0"),
            # The server takes the last two bytes of a message's headers off without a look at
            # them. If one line does not end there, they were damaged: hand them out without an end.
            headers if whole else own.rstrip(b"\r\n"),
            payload,
        )

    @classmethod
    def of_leader(cls, stream: str, found: StoredMessage) -> DirectMessage:
        """A message as the leader gave it: for streams that allow no direct requests."""
        known = (stream, found.sequence, found.subject, found.time)
        return cls(*known, "0", found.headers, found.payload)

    def as_delivered(self, number: int) -> RawMessage:
        """The message as a consumer would deliver it as its `number`-th."""
        numbers = f"{self.sequence}.{number}.{stored_ns_of(self.time)}.{self.pending}"
        reply = f"$JS.ACK.{self.stream}.direct.1.{numbers}"
        subject = self.subject.encode("utf-8", "surrogateescape")
        return RawMessage(subject, reply.encode(), self.headers, self.payload)


def status_of_answer(headers: bytes) -> int:
    """The status that ends an answer; 0: it is one of its messages.

    A stored message may start like a status; only messages have a sequence.
    """
    code, _ = status_of(headers)
    return 0 if _SEQUENCE_MARK in headers else code


def next_of_stream(sequence: int, subjects: Sequence[str], max_payload: int) -> dict[str, Any]:
    """The direct request for the next batch from a sequence on.

    The server takes one subject to choose by; with several, it gives everything.
    """
    ask: dict[str, Any] = {
        "seq": sequence,
        "batch": BATCH_MESSAGES,
        "max_bytes": max(BATCH_BYTES, max_payload * 2),
    }
    if len(subjects) == 1:
        ask["next_by_subj"] = subjects[0]
    return ask


def next_of_leader(sequence: int, subjects: Sequence[str]) -> dict[str, Any]:
    """The request to the leader for the next single message from a sequence on."""
    return {"seq": sequence, "next_by_subj": subjects[0] if len(subjects) == 1 else ">"}


def matches(pattern: str, subject: str) -> bool:
    """Whether a subject matches a pattern.

    >>> matches("orders.*", "orders.eu"), matches("orders.>", "orders.eu.1"), matches("a", "b")
    (True, True, False)
    """
    wanted, found = pattern.split("."), subject.split(".")
    for index, token in enumerate(wanted):
        if token == ">":
            return len(found) > index
        if index >= len(found) or (token != "*" and token != found[index]):
            return False
    return len(wanted) == len(found)
