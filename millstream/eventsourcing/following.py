"""A subscription of the library that follows a topic."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from eventsourcing.persistence import ApplicationRecorder, Notification, Subscription

from millstream.blocking.reading import Following
from millstream.events.start import Start
from millstream.eventsourcing.stored import is_event, notification_of
from millstream.eventsourcing.translated import translated
from millstream.messaging.reading.replay import ReadPlan

if TYPE_CHECKING:
    from millstream.eventsourcing.recorders import MillstreamApplicationRecorder

__all__ = ["FollowingSubscription"]


class FollowingSubscription(Subscription[ApplicationRecorder]):
    """Events as they are stored, without polling; `stop` may be called from any thread."""

    def __init__(
        self,
        recorder: MillstreamApplicationRecorder,
        gt: int | None = None,
        topics: Sequence[str] = (),
    ) -> None:
        super().__init__(recorder=recorder, gt=gt, topics=topics)
        plan = ReadPlan(start=Start.at_offset((gt or 0) + 1), follow=True)
        with translated():
            self._following = Following(recorder.topic, plan)

    def stop(self) -> None:
        """End the subscription; a thread that waits for the next event ends its loop."""
        super().stop()
        self._following.stop()

    def __next__(self) -> Notification:
        """The next event; waits for one."""
        with translated():
            for event in self._following:
                if is_event(event):
                    notification = notification_of(event)
                    if not self._topics or notification.topic in self._topics:
                        return notification
        raise StopIteration
