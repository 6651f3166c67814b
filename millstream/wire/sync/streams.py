"""Asking about streams and single messages with the blocking client."""

from __future__ import annotations

import base64
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from millstream.deadline import Deadline
from millstream.errors import ApiError, RequestTimeout
from millstream.wire import listing
from millstream.wire.api import ErrorCode, StreamInfo
from millstream.wire.listing import GATHER_SECONDS, Page
from millstream.wire.message import StoredMessage
from millstream.wire.sync.connection import BlockingJetStream

__all__ = [
    "find_stream",
    "find_streams",
    "get_message",
    "get_messages",
    "has_subjects",
    "list_streams",
    "sequence_at",
    "stream_info",
]

PAUSE_SECONDS: Final = 0.1


class _Got(msgspec.Struct):
    message: dict[str, Any]


class _State(msgspec.Struct):
    subjects: dict[str, int] | None = None


class _Subjects(msgspec.Struct):
    state: _State


def stream_info(
    jetstream: BlockingJetStream, name: str, timeout: float | None = None
) -> StreamInfo:
    """A stream's configuration and state; TopicNotFound when there is none."""
    return jetstream.call(f"STREAM.INFO.{name}", None, StreamInfo, timeout)


def find_stream(
    jetstream: BlockingJetStream, name: str, timeout: float | None = None
) -> StreamInfo | None:
    """A stream, or None if there is none of that name."""
    return find_streams(jetstream, [name], timeout)[0]


def find_streams(
    jetstream: BlockingJetStream, names: Sequence[str], timeout: float | None = None
) -> list[StreamInfo | None]:
    """The streams of these names, asked for together; None for each that does not exist."""
    questions = [(f"STREAM.INFO.{name}", None) for name in names]
    return [
        None if answer is None else msgspec.json.decode(answer, type=StreamInfo)
        for answer in _answers(jetstream, questions, ErrorCode.STREAM_NOT_FOUND, timeout)
    ]


def _answers(
    jetstream: BlockingJetStream,
    questions: Sequence[tuple[str, object]],
    missing: int,
    timeout: float | None,
) -> list[bytes | None]:
    """The answers; None where the server refused with the error code `missing`."""
    found: list[bytes | None] = []
    for answer in jetstream.ask_all(questions, timeout):
        if not isinstance(answer, ApiError):
            found.append(answer)
        elif answer.err_code == missing:
            found.append(None)
        else:
            raise answer
    return found


def has_subjects(jetstream: BlockingJetStream, stream: str, pattern: str) -> bool:
    """Whether a stream holds messages on subjects that match."""
    ask = {"subjects_filter": pattern}
    return bool(jetstream.call(f"STREAM.INFO.{stream}", ask, _Subjects).state.subjects)


def list_streams(jetstream: BlockingJetStream, timeout: float | None = None) -> list[StreamInfo]:
    """All streams of the account. IncompleteList: some are unreachable.

    `timeout` is for each page of the list.
    """
    seconds = jetstream.connection.settings.request_timeout if timeout is None else timeout
    wanted, deadline = listing.streams(), Deadline(seconds)
    while not wanted.complete:
        try:
            page = jetstream.call(
                wanted.verb, wanted.request, Page, deadline.left(), GATHER_SECONDS
            )
        except RequestTimeout as error:
            raise (wanted.incomplete(seconds) if wanted.short else error) from error
        if wanted.take(page):
            deadline = Deadline(seconds)
        elif deadline.passed:
            raise wanted.incomplete(seconds)
        else:
            time.sleep(deadline.left(at_most=PAUSE_SECONDS))
    return wanted.rows


def get_message(
    jetstream: BlockingJetStream,
    stream: str,
    ask: Mapping[str, Any],
    timeout: float | None = None,
) -> StoredMessage | None:
    """One message by `seq`, `last_by_subj` or `next_by_subj`, as its leader has it; None: none."""
    return get_messages(jetstream, stream, [ask], timeout)[0]


def get_messages(
    jetstream: BlockingJetStream,
    stream: str,
    asks: Sequence[Mapping[str, Any]],
    timeout: float | None = None,
) -> list[StoredMessage | None]:
    """Several messages, asked for together; see `get_message`."""
    questions = [(f"STREAM.MSG.GET.{stream}", ask) for ask in asks]
    return [
        None if answer is None else _stored(answer)
        for answer in _answers(jetstream, questions, ErrorCode.MESSAGE_NOT_FOUND, timeout)
    ]


def _stored(answer: bytes) -> StoredMessage:
    found = msgspec.json.decode(answer, type=_Got).message
    return StoredMessage(
        found["subject"],
        found["seq"],
        base64.b64decode(found.get("hdrs", "")),
        base64.b64decode(found.get("data", "")),
        found["time"],
    )


def sequence_at(
    jetstream: BlockingJetStream, stream: str, time: str, timeout: float | None = None
) -> int | None:
    """The first sequence stored at or after a time (RFC 3339); None when there is none yet."""
    ask = {"start_time": time, "next_by_subj": ">"}
    found = get_message(jetstream, stream, ask, timeout)
    return None if found is None else found.sequence
