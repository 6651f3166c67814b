"""Find topics and their streams, over the JetStream API."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable
from typing import Any, Final, TypeVar

import msgspec

from millstream.errors import MillstreamError, TopicNotFound
from millstream.messaging.topics.info import TopicInfo, topic_info
from millstream.messaging.topics.missing import NAMES_SECONDS, no_such_topic
from millstream.messaging.topics.stream_config import (
    check_stream_name,
    identity_of,
    topic_streams,
)
from millstream.wire.aio.jetstream import JetStream
from millstream.wire.api import ErrorCode, StreamInfo

__all__ = [
    "find_streams",
    "list_topics",
    "missing_topic",
    "open_topic",
    "side_by_side",
    "stream_subjects",
    "streams_of",
]

# Partitions are requested concurrently, but too few to fill the server's API queue.
AT_ONCE: Final = 16
# The server's limit of subjects in one answer.
SUBJECTS_PAGE: Final = 100_000
PAGES_MAX: Final = 10_000  # a billion keys; ends a loop that would never end

T = TypeVar("T")
R = TypeVar("R")


class _State(msgspec.Struct):
    subjects: dict[str, int] | None = None


class _Subjects(msgspec.Struct):
    state: _State
    total: int = 0


async def open_topic(js: JetStream, name: str) -> TopicInfo:
    """A topic by name, or any JetStream stream as it is, with its current state."""
    info = topic_info(name, await streams_of(js, name))
    if info.missing:
        raise TopicNotFound(
            0,
            ErrorCode.STREAM_NOT_FOUND,
            f"topic '{name}' is incomplete: of {info.settings.partitions} partitions "
            f"{', '.join(map(str, info.missing))} are missing",
            "Declare it again to complete it, or delete it",
        )
    return info


async def list_topics(js: JetStream) -> list[TopicInfo]:
    """Every topic and every other stream of the account, by name; incomplete ones included.

    IncompleteList: the broker could not reach some of them.
    """
    groups: dict[str, list[StreamInfo]] = {}
    for info in await js.streams():
        groups.setdefault(identity_of(info.config).topic, []).append(info)
    return [topic_info(name, groups[name]) for name in sorted(groups)]


async def streams_of(js: JetStream, name: str) -> list[StreamInfo]:
    """The streams of a topic that must exist."""
    found = await find_streams(js, name)
    if not found:
        raise await missing_topic(js, name)
    return found


async def missing_topic(js: JetStream, name: str, *words: str) -> TopicNotFound:
    """The error for a name that is no topic, with those that are near; `words`: text and advice."""
    try:
        streams = await js.stream_names(NAMES_SECONDS)
    except MillstreamError:  # the user may not list them: the error is the one about the name
        streams = []
    return no_such_topic(name, streams, *words)


async def find_streams(js: JetStream, name: str, timeout: float | None = None) -> list[StreamInfo]:
    """The streams of a topic, in the order of partitions; empty when there is no topic."""
    steps = topic_streams(name)
    names = next(steps)
    while True:
        found = await side_by_side(lambda stream: find_stream(js, stream, timeout), names)
        try:
            names = steps.send(found)
        except StopIteration as end:
            streams: list[StreamInfo] = end.value
            return streams


async def find_stream(js: JetStream, name: str, timeout: float | None = None) -> StreamInfo | None:
    """A stream, or None if there is none of that name."""
    check_stream_name(name)
    try:
        return await js.stream_info(name, timeout)
    except TopicNotFound:
        return None


async def stream_subjects(
    js: JetStream, stream: str, pattern: str
) -> AsyncGenerator[tuple[str, int], None]:
    """The subjects of a stream that hold messages and match, with the number of messages."""
    for page in range(PAGES_MAX):
        ask = {"subjects_filter": pattern, "offset": page * SUBJECTS_PAGE}
        info = await js.call(f"STREAM.INFO.{stream}", ask, _Subjects)
        subjects = info.state.subjects or {}
        for found in subjects.items():
            yield found
        if not subjects or (page + 1) * SUBJECTS_PAGE >= info.total:
            break


async def side_by_side(work: Callable[[T], Coroutine[Any, Any, R]], items: Iterable[T]) -> list[R]:
    """The results of all, in order, a bounded number at a time; the first error ends the rest."""
    gate = asyncio.Semaphore(AT_ONCE)

    async def one(item: T) -> R:
        async with gate:
            return await work(item)

    tasks = [asyncio.ensure_future(one(item)) for item in items]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
