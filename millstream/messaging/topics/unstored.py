"""Warns about messages that look like events of a topic but that no stream stores.

A topic stores what is published under its name, `orders.<key>`, or with several partitions
`orders.<partition>.<key>`. A message to `orders` itself only reaches the subscribers of the moment.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from millstream.errors import MillstreamError
from millstream.events.subject import is_name
from millstream.messaging.topics.info import TopicInfo, topic_info
from millstream.messaging.topics.lookup import find_streams
from millstream.wire.aio.jetstream import JetStream
from millstream.wire.direct import matches

__all__ = ["UnstoredWarnings", "why_unstored"]

# First tokens of subjects that are looked up, over the life of a connection.
NAMES_MAX: Final = 1000

_log = logging.getLogger("millstream.messaging")


async def why_unstored(js: JetStream, subject: str) -> str | None:
    """Why no stream stores messages of this subject though it has a topic's name; None if fine."""
    name = subject.partition(".")[0]
    info = await _topic_of(js, name) if is_name(name) else None
    return None if info is None else _reason(info, subject)


class UnstoredWarnings:
    """Looks subjects up in the background, once for each first token, and logs one warning each."""

    def __init__(self, js: JetStream) -> None:
        self._js = js
        self._topics: dict[str, TopicInfo | None] = {}  # None: not a topic, unknown, or warned
        self._looking: set[asyncio.Task[None]] = set()

    def published(self, subject: str) -> None:
        """A message was sent to this subject."""
        name = subject.partition(".")[0]
        try:
            info = self._topics[name]
        except KeyError:
            self._start(name, subject)
            return
        if info is not None:
            self._judge(info, subject)

    async def settled(self) -> None:
        """Return when everything published so far was looked up."""
        await asyncio.gather(*self._looking, return_exceptions=True)

    async def close(self, seconds: float) -> None:
        """Let running lookups end, so that a short program is warned too."""
        try:
            async with asyncio.timeout(seconds):
                await self.settled()
        except TimeoutError:
            _log.debug("closing before all subjects were looked up")

    def _start(self, name: str, subject: str) -> None:
        if len(self._topics) >= NAMES_MAX or not is_name(name):
            return
        self._topics[name] = None
        task = asyncio.create_task(self._look(name, subject))
        self._looking.add(task)
        task.add_done_callback(self._looking.discard)

    async def _look(self, name: str, subject: str) -> None:
        info = await _topic_of(self._js, name)
        if info is not None:
            self._topics[name] = info
            self._judge(info, subject)

    def _judge(self, info: TopicInfo, subject: str) -> None:
        reason = _reason(info, subject)
        if reason is not None:
            self._topics[info.name] = None
            _log.warning("%s", reason)


async def _topic_of(js: JetStream, name: str) -> TopicInfo | None:
    try:
        streams = await find_streams(js, name)
    except MillstreamError as error:  # no JetStream, no permission, closed: nothing can be said
        _log.debug("not known whether '%s' is a topic: %s", name, error)
        return None
    return topic_info(name, streams) if streams else None


def _reason(info: TopicInfo, subject: str) -> str | None:
    """In words (pure)."""
    if any(matches(taken, subject) for part in info.partitions for taken in part.subjects):
        return None
    advice = (
        f"To store events, use topic('{info.name}').publish, or 'millstream pub -t {info.name}'"
    )
    if subject == info.name:
        return (
            f"'{subject}' is a topic, but a message to the subject '{subject}' is not stored: "
            f"it only reaches subscribers that are connected now. {advice}"
        )
    if len(info.partitions) > 1 and info.prefix == info.name:
        return (
            f"a message to '{subject}' is not stored: the topic '{info.name}' has "
            f"{len(info.partitions)} partitions, with subjects like '{info.name}.0.<key>'. {advice}"
        )
    return None
