"""The test cases that the library ships for persistence modules, on a real broker."""

from __future__ import annotations

from threading import Event
from typing import ClassVar, cast
from unittest import TestCase, mock
from uuid import NAMESPACE_URL, UUID, uuid4, uuid5

import pytest
from eventsourcing.persistence import StoredEvent, Tracking, TrackingRecorder
from eventsourcing.tests import application, persistence, projection
from eventsourcing.utils import Environment

from millstream.eventsourcing import (
    MillstreamAggregateRecorder,
    MillstreamApplicationRecorder,
    MillstreamDatastore,
    MillstreamFactory,
    MillstreamProcessRecorder,
    MillstreamTrackingRecorder,
)
from millstream.settings import ConnectionSettings


class OnABroker:
    """What every case needs: the settings that the fixture of the same name sets."""

    settings: ConnectionSettings

    def datastore(self) -> MillstreamDatastore:
        return MillstreamDatastore(self.settings)


class TestAggregateRecorder(OnABroker, persistence.AggregateRecorderTestCase):
    def create_recorder(self) -> MillstreamAggregateRecorder:
        return MillstreamAggregateRecorder(self.datastore(), "app-events")


class TestAggregateRecorderWithTextIds(TestAggregateRecorder):
    def new_originator_id(self) -> str:
        return f"account.{uuid4()} *"


class TestApplicationRecorder(OnABroker, persistence.ApplicationRecorderTestCase):
    def create_recorder(self) -> MillstreamApplicationRecorder:
        return MillstreamApplicationRecorder(self.datastore(), "app-events")

    def test_insert_subscribe(self) -> None:
        self.optional_test_insert_subscribe()


class TestTrackingRecorder(OnABroker, persistence.TrackingRecorderTestCase):
    def create_recorder(self) -> MillstreamTrackingRecorder:
        return MillstreamTrackingRecorder(self.datastore(), "app-events")


class TestProcessRecorder(OnABroker, persistence.ProcessRecorderTestCase):
    def create_recorder(self) -> MillstreamProcessRecorder:
        return MillstreamProcessRecorder(self.datastore(), "app-events")


class TestProcessRecorderAsApplicationRecorder(TestApplicationRecorder):
    def create_recorder(self) -> MillstreamProcessRecorder:
        return MillstreamProcessRecorder(self.datastore(), "app-events")


class TestNonInterleaving(OnABroker, persistence.NonInterleavingNotificationIDsBaseCase):
    def create_recorder(self) -> MillstreamApplicationRecorder:
        return MillstreamApplicationRecorder(self.datastore(), "app-events")


class TestFactory(OnABroker, persistence.InfrastructureFactoryTestCase[MillstreamFactory]):
    def setUp(self) -> None:
        self.env = Environment("TestCase")
        self.env[MillstreamFactory.PERSISTENCE_MODULE] = "millstream.eventsourcing"
        (self.env["NATS_URL"],) = self.settings.urls
        super().setUp()

    def expected_factory_class(self) -> type[MillstreamFactory]:
        return MillstreamFactory

    def expected_aggregate_recorder_class(self) -> type[MillstreamAggregateRecorder]:
        return MillstreamAggregateRecorder

    def expected_application_recorder_class(self) -> type[MillstreamApplicationRecorder]:
        return MillstreamApplicationRecorder

    def expected_tracking_recorder_class(self) -> type[MillstreamTrackingRecorder]:
        return MillstreamTrackingRecorder

    def tracking_recorder_subclass(self) -> type[MillstreamTrackingRecorder]:
        return OwnTrackingRecorder

    def expected_process_recorder_class(self) -> type[MillstreamProcessRecorder]:
        return MillstreamProcessRecorder


class OwnTrackingRecorder(MillstreamTrackingRecorder):
    """A recorder that an application might define."""


class TestExampleApplication(OnABroker, application.ExampleApplicationTestCase):
    expected_factory_topic = "millstream.eventsourcing.factory:MillstreamFactory"


@pytest.mark.filterwarnings("default::DeprecationWarning")  # it tests deprecated names as well
class TestApplication(OnABroker, application.ApplicationTestCase):
    """Applications that are not told otherwise store their events on topics here."""


class EventCounters(MillstreamProcessRecorder, projection.EventCountersView):
    """A view whose counters are stored together with the position they were counted up to."""

    def _count(self, name: str) -> int:
        last = self.select_events(self._id(name), desc=True, limit=1)
        return last[0].originator_version if last else 0

    def _increment(self, name: str, tracking: Tracking) -> None:
        event = StoredEvent(self._id(name), self._count(name) + 1, "counted", b"")
        self.insert_events([event], tracking=tracking)

    def _id(self, name: str) -> UUID:
        return uuid5(NAMESPACE_URL, name)

    def get_created_event_counter(self) -> int:
        return self._count("created")

    def get_subsequent_event_counter(self) -> int:
        return self._count("subsequent")

    def incr_created_event_counter(self, tracking: Tracking) -> None:
        self._increment("created", tracking)

    def incr_subsequent_event_counter(self, tracking: Tracking) -> None:
        self._increment("subsequent", tracking)


class TestEventCountersView(OnABroker, projection.EventCountersViewTestCase):
    def construct_event_counters_view(self) -> projection.EventCountersView:
        return EventCounters(self.datastore(), "view-events")


class Patient:
    """Waits longer for other threads than the second that the library's cases give them."""

    def setUp(self) -> None:
        waits = TrackingRecorder.wait

        def wait(
            self: TrackingRecorder,
            application_name: str,
            notification_id: int | None,
            timeout: float = 1.0,
            interrupt: Event | None = None,
        ) -> None:
            waits(self, application_name, notification_id, 60 * timeout, interrupt)

        patching = mock.patch.object(TrackingRecorder, "wait", wait)
        if "error" not in str(getattr(self, "_testMethodName", "")):  # which waits in vain
            patching.start()
            cast(TestCase, self).addCleanup(patching.stop)


class TestProjection(Patient, OnABroker, projection.AggregateEventCountersProjectionTestCase):
    view_class = EventCounters
    env: ClassVar[dict[str, str]] = {}


class TestEventSourcedProjection(Patient, OnABroker, projection.EventSourcedProjectionTestCase):
    env: ClassVar[dict[str, str]] = {}
