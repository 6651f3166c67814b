"""Storing events and a tracking record together: all of them or none, each version once.

Every subject that is written to is written after its last known message, which the server checks.
So whoever decides with an older one is refused, in whatever thread or process it runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from eventsourcing.persistence import (
    IntegrityError,
    NotSupportedError,
    OperationalError,
    StoredEvent,
    Tracking,
)

from millstream import blocking
from millstream.errors import WrongSequence
from millstream.events.event import NewEvent, PublishOptions
from millstream.events.subject import key_token
from millstream.eventsourcing.datastore import Heads
from millstream.eventsourcing.stored import (
    NOTHING,
    OriginatorHead,
    head_of,
    headers_of,
    is_event,
    key_of,
    position_of,
    tracking_headers,
    tracking_key,
    version_of,
)
from millstream.eventsourcing.translated import translated
from millstream.wire.batch import BATCH_MESSAGES_MAX

__all__ = ["Appending"]

# Each refusal means that another writer was successful; more of them than this do not happen in
# the time that the library's callers wait.
ATTEMPTS_MAX: Final = 100
# The first version of an aggregate: a new one is expected not to exist, without asking.
FIRST_VERSION: Final = 1
UNKNOWN_OFFSET: Final = 1  # of a message that is not stored yet


@dataclass(frozen=True, slots=True)
class _Message:
    """A message to be stored, and its key's state after it (but for the offset)."""

    event: NewEvent
    key: str
    head: OriginatorHead


class _Line:
    """The events of one originator in one call."""

    def __init__(self, base: OriginatorHead) -> None:
        self.base = base  # what is stored
        self.head = base  # with the events of this call
        self.added: set[int] = set()
        self.stored: set[int] | None = None  # the versions up to `base`, where they were read


class Appending:
    """Appends to one topic."""

    def __init__(self, topic: blocking.Topic, heads: Heads, taken_of: Heads | None = None) -> None:
        self._topic = topic
        self._heads = heads
        self._taken_of = taken_of  # the events that snapshots are taken of

    def subject(self, key: str) -> str:
        """The subject of a key's messages: reading it uses the server's index."""
        return f"{self._topic.name}.{key_token(key)}"

    def append(self, stored: Sequence[StoredEvent], tracking: Tracking | None) -> list[int]:
        """Store all of it or nothing; returns the offsets of the events.

        IntegrityError when a version of an originator is stored already, or when the position of
        `tracking` or a later one is.
        """
        count = len(stored) + (tracking is not None)
        if count == 0:
            return []
        if count > BATCH_MESSAGES_MAX:
            raise NotSupportedError(
                f"{count:,} records at once: at most {BATCH_MESSAGES_MAX:,} are stored together. "
                f"Save fewer events with one call"
            )
        fresh = False  # whether the state of the keys was asked for during this call
        with translated():
            for _ in range(ATTEMPTS_MAX):
                try:
                    messages = self._tracked(tracking, fresh) + self._messages(stored, fresh)
                    return self._store(messages)[count - len(stored) :]
                except (WrongSequence, IntegrityError) as refused:
                    if fresh and isinstance(refused, IntegrityError):
                        raise
                fresh = True
        raise OperationalError(
            f"not stored in '{self._topic.name}': in {ATTEMPTS_MAX} attempts another writer was "
            f"first each time. Try again"
        )

    def tracked(self, application_name: str) -> OriginatorHead:
        """The last tracking record of an application; its version is the position."""
        key = tracking_key(application_name)
        last = self._topic.last(key)
        if last is None:
            return NOTHING
        position = position_of(last)
        head = OriginatorHead(last.offset, position, position, position)
        self._heads.put(key, head)
        return head

    # -- what to store --------------------------------------------------------------------

    def _messages(self, stored: Sequence[StoredEvent], fresh: bool) -> list[_Message]:
        """The events as messages, the first one of each originator with an expectation."""
        messages: list[_Message] = []
        lines: dict[str, _Line] = {}
        for one in stored:
            key, version = key_of(one.originator_id), one.originator_version
            options = None
            if key not in lines:
                lines[key] = _Line(self._head(key, version, fresh))
                options = PublishOptions(expected_last=lines[key].base.offset)
            line = lines[key]
            if self._is_taken(key, line, version):
                raise IntegrityError(
                    f"version {version} of {key} is stored already in '{self._topic.name}'"
                )
            line.added.add(version)
            line.head = line.head.then(version, UNKNOWN_OFFSET)
            taken_of = None if self._taken_of is None else self._taken_of.get(key)
            headers = headers_of(one, line.head, taken_of)
            new = NewEvent(one.state, key, headers, options=options)
            messages.append(_Message(new, key, line.head))
        return messages

    def _tracked(self, tracking: Tracking | None, fresh: bool) -> list[_Message]:
        """The tracking record as a message, if there is one."""
        if tracking is None:
            return []
        key, position = tracking_key(tracking.application_name), tracking.notification_id
        before = None if fresh else self._heads.get(key)
        if before is None:
            before = self.tracked(tracking.application_name)
        if before.offset and before.version >= position:
            raise IntegrityError(
                f"notification {position} of '{tracking.application_name}' was processed before: "
                f"'{self._topic.name}' has {before.version}"
            )
        options = PublishOptions(expected_last=before.offset)
        new = NewEvent(b"", key, tracking_headers(position), options=options)
        return [_Message(new, key, before.then(position, UNKNOWN_OFFSET))]

    def _head(self, key: str, version: int, fresh: bool) -> OriginatorHead:
        if not fresh:
            known = self._heads.get(key)
            if known is not None:
                return known
            if version <= FIRST_VERSION:
                return NOTHING
        return head_of(self._topic.last(key))

    def _is_taken(self, key: str, line: _Line, version: int) -> bool:
        if version in line.added:
            return True
        held = line.base.holds(version)
        if held is None:  # the versions have gaps, or went down: as those of snapshots may
            if line.stored is None:
                line.stored = self._versions(key, line.base.offset)
            held = version in line.stored
        return held

    def _versions(self, key: str, last: int) -> set[int]:
        events = self._topic.read(subjects=[self.subject(key)], end=last + 1)
        return {version_of(event) for event in events if is_event(event)}

    # -- storing --------------------------------------------------------------------------

    def _store(self, messages: Sequence[_Message]) -> list[int]:
        keys = {message.key for message in messages}
        try:
            if len(messages) == 1:  # a batch of one takes several times as long
                (new,) = (message.event for message in messages)
                receipts = [
                    self._topic.publish(
                        new.value, new.key, headers=new.headers, options=new.options
                    )
                ]
            else:
                receipts = self._topic.publish_atomic([message.event for message in messages])
        except BaseException:  # an interrupt too: it may or may not be stored
            for key in keys:
                self._heads.forget(key)
            raise
        for message, receipt in zip(messages, receipts, strict=True):
            self._heads.put(message.key, replace(message.head, offset=receipt.offset))
        return [receipt.offset for receipt in receipts]
