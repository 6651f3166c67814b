"""A persistence module for the library `eventsourcing`: its events are stored on topics.

Set `PERSISTENCE_MODULE=millstream.eventsourcing` for an application written with that library.
docs/EVENTSOURCING.md has an example and the settings.
"""

from millstream.eventsourcing.datastore import MillstreamDatastore
from millstream.eventsourcing.factory import MillstreamFactory
from millstream.eventsourcing.following import FollowingSubscription
from millstream.eventsourcing.recorders import (
    MillstreamAggregateRecorder,
    MillstreamApplicationRecorder,
    MillstreamProcessRecorder,
    MillstreamTrackingRecorder,
)

__all__ = [
    "FollowingSubscription",
    "MillstreamAggregateRecorder",
    "MillstreamApplicationRecorder",
    "MillstreamDatastore",
    "MillstreamFactory",
    "MillstreamProcessRecorder",
    "MillstreamTrackingRecorder",
]
