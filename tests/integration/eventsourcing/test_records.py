"""What is stored and how it is read back, beyond the library's own test cases."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from uuid import NAMESPACE_URL, UUID, uuid4, uuid5

import pytest
from eventsourcing.application import AggregateNotFoundError, Application, ProcessingEvent
from eventsourcing.dispatch import singledispatchmethod
from eventsourcing.domain import Aggregate, event
from eventsourcing.persistence import (
    DataError,
    InfrastructureFactory,
    InfrastructureFactoryError,
    IntegrityError,
    InternalError,
    NotSupportedError,
    OperationalError,
    ProgrammingError,
    StoredEvent,
    Tracking,
)
from eventsourcing.system import (
    MultiThreadedRunner,
    ProcessApplication,
    Runner,
    SingleThreadedRunner,
    System,
)
from eventsourcing.utils import Environment, get_topic

from millstream.eventsourcing import (
    MillstreamAggregateRecorder,
    MillstreamApplicationRecorder,
    MillstreamDatastore,
    MillstreamProcessRecorder,
    MillstreamTrackingRecorder,
    recorders,
)
from millstream.settings import ConnectionSettings

A, B = uuid4(), uuid4()


@pytest.fixture
def datastore(settings: ConnectionSettings) -> MillstreamDatastore:
    return MillstreamDatastore(settings)


@pytest.fixture
def recorder(datastore: MillstreamDatastore) -> MillstreamProcessRecorder:
    return MillstreamProcessRecorder(datastore, "app-events")


def stored(version: int, originator: UUID | str = A, state: bytes = b"{}") -> StoredEvent:
    return StoredEvent(originator, version, "app:Event", state)


def versions(found: Any) -> list[int]:
    return [one.originator_version for one in found]


# -- the form of what is stored -----------------------------------------------------------


def test_an_event_is_one_plain_message_that_any_client_reads(
    recorder: MillstreamProcessRecorder, datastore: MillstreamDatastore
) -> None:
    recorder.insert_events([stored(1), stored(2)], tracking=Tracking("up", 7))
    recorder.insert_events([stored(1, "a.b c")])
    topic = datastore.mill.topic("app-events")
    found = [(one.subject, one.key, one.value, dict(one.headers)) for one in topic.read()]
    first = {"Event-Topic": "app:Event", "Event-Version": "1", "Event-Run": "1"}
    assert found == [
        ("app-events.tracking:up", "tracking:up", b"", {"Tracking-Id": "7"}),
        (f"app-events.{A}", str(A), b"{}", first),
        (f"app-events.{A}", str(A), b"{}", first | {"Event-Version": "2"}),
        ("app-events.a=2Eb=20c", "a.b c", b"{}", first | {"Event-Id-Type": "text"}),
    ]


def test_texts_and_uuids_come_back_as_they_were(recorder: MillstreamProcessRecorder) -> None:
    for originator in (A, "account.7 *", "ümläut"):
        recorder.insert_events([stored(1, originator, b"")])
    found = recorder.select_notifications(None, 10)
    assert [one.originator_id for one in found] == [A, "account.7 *", "ümläut"]
    assert [one.state for one in found] == [b"", b"", b""]


# -- versions -----------------------------------------------------------------------------


def test_versions_may_have_gaps_and_go_down_but_each_exists_once(
    recorder: MillstreamProcessRecorder, settings: ConnectionSettings
) -> None:
    """As those of snapshots do. A second recorder knows only what is stored."""
    other = MillstreamAggregateRecorder(MillstreamDatastore(settings), "app-events")
    for version in (10, 20, 5, 6, 30, 7):
        recorder.insert_events([stored(version)])
        for taken in (recorder, other):
            with pytest.raises(IntegrityError):
                taken.insert_events([stored(version)])
    for version in (5, 6, 7, 10, 20, 30):
        with pytest.raises(IntegrityError):
            other.insert_events([stored(40), stored(version)])
    other.insert_events([stored(8), stored(15)])
    for found in (recorder, other):
        assert versions(found.select_events(A)) == [5, 6, 7, 8, 10, 15, 20, 30]
        assert versions(found.select_events(A, desc=True, limit=1)) == [30]
        assert versions(found.select_events(A, lte=19, desc=True, limit=2)) == [15, 10]
        assert versions(found.select_events(A, gt=7, lte=15)) == [8, 10, 15]
        assert versions(found.select_events(A, gt=15)) == [20, 30]  # the last one stored is 15
        assert versions(found.select_events(A, gt=30)) == []
    assert len(recorder.select_notifications(None, 100)) == 8


def test_what_another_recorder_added_is_selected_after_a_version(
    recorder: MillstreamProcessRecorder, settings: ConnectionSettings
) -> None:
    other = MillstreamAggregateRecorder(MillstreamDatastore(settings), "app-events")
    recorder.insert_events([stored(1), stored(2)])
    assert versions(recorder.select_events(A, gt=2)) == []
    other.insert_events([stored(3)])
    other.insert_events([stored(4)])
    assert versions(recorder.select_events(A, gt=2)) == [3, 4]
    assert versions(recorder.select_events(A, gt=1)) == [2, 3, 4]
    recorder.insert_events([stored(5)])
    assert versions(recorder.select_events(A, gt=4)) == [5]


class Meter(Aggregate):
    """An aggregate with many events."""

    def __init__(self) -> None:
        self.value = 0

    @event("Read")
    def read(self) -> None:
        self.value += 1


class Meters(Application[UUID]):
    is_snapshotting_enabled = True


def test_after_a_snapshot_only_later_events_are_read() -> None:
    """In another process too: the snapshot says where its event is stored."""
    with Meters() as meters:
        meter = Meter()
        for _ in range(50):
            meter.read()
        meters.save(meter)
        meters.take_snapshot(meter.id)
        for _ in range(3):
            meter.read()
        meters.save(meter)
    with Meters() as other:
        recorder = other.recorder
        assert isinstance(recorder, MillstreamApplicationRecorder)
        for _ in range(2):  # what the first time has taught must not be in the way
            loaded: Meter = other.repository.get(meter.id)
            assert (loaded.value, loaded.version) == (53, 54)
            assert len(list(recorder._events_of(str(meter.id), 51))) == 3
        assert len(list(recorder._events_of(str(meter.id), 50))) == 54


def test_an_aggregate_that_was_purged_begins_again(
    recorder: MillstreamProcessRecorder, datastore: MillstreamDatastore
) -> None:
    recorder.insert_events([stored(1), stored(2)])
    recorder.insert_events([stored(1, B)])
    from millstream.messaging.topics.admin import Purge

    datastore.mill.topic("app-events").admin.purge(Purge(key=str(A)))
    assert recorder.select_events(A) == []
    recorder.insert_events([stored(1)])
    assert versions(recorder.select_events(A)) == [1]
    assert recorder.max_notification_id() == 4


# -- notifications and tracking -----------------------------------------------------------


def test_tracking_records_are_no_notifications(recorder: MillstreamProcessRecorder) -> None:
    assert recorder.max_notification_id() is None
    recorder.insert_tracking(Tracking("up", 1))
    assert recorder.max_notification_id() is None
    ids = recorder.insert_events([stored(1), stored(2)], tracking=Tracking("up", 2))
    assert ids == [3, 4]
    for position in range(3, 103):
        recorder.insert_tracking(Tracking("up", position))
    assert recorder.max_notification_id() == 4
    assert recorder.insert_events([stored(3)]) == [105]
    assert [one.id for one in recorder.select_notifications(1, 10)] == [3, 4, 105]
    assert [one.id for one in recorder.select_notifications(4, 2)] == [4, 105]
    assert [one.id for one in recorder.select_notifications(1, 10, stop=104)] == [3, 4]
    assert recorder.select_notifications(106, 10) == []


def test_old_tracking_records_are_removed(
    recorder: MillstreamProcessRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorders, "TRIM_RECORDS", 5)
    recorder.insert_events([stored(1)], tracking=Tracking("other", 1))
    for position in range(1, 13):
        recorder.insert_tracking(Tracking("up", position))
    (state,) = recorder.topic.info().partitions
    assert state.messages == 2 + 1 + 2  # the last one kept at 10, and two more
    with pytest.raises(IntegrityError):
        recorder.insert_tracking(Tracking("up", 12))
    assert (recorder.max_tracking_id("up"), recorder.max_tracking_id("other")) == (12, 1)
    assert recorder.max_notification_id() == 2


def test_a_subscription_waits_for_events_until_another_thread_stops_it(
    recorder: MillstreamProcessRecorder,
) -> None:
    subscription = recorder.subscribe(gt=None, topics=["app:Event"])
    seen, first = [], threading.Event()

    def follow() -> None:
        with subscription:
            for notification in subscription:
                seen.append(notification.id)
                first.set()

    with ThreadPoolExecutor(1) as pool:
        ended = pool.submit(follow)
        recorder.insert_tracking(Tracking("up", 1))
        recorder.insert_events([stored(1)])
        assert first.wait(60)
        subscription.stop()
        ended.result(60)
    assert seen == [2]


# -- settings and errors ------------------------------------------------------------------


def test_topics_are_named_after_the_application_or_a_setting(
    datastore: MillstreamDatastore,
) -> None:
    class Ledger(Application[UUID]):
        is_snapshotting_enabled = True

    with Ledger() as app:
        app.save(Aggregate())
        app.close()
    with Ledger(env={"LEDGER_MILLSTREAM_TOPIC": "books"}) as app:
        app.close()
    names = sorted(info.name for info in datastore.mill.topics())
    assert names == ["Ledger-events", "Ledger-snapshots", "books-events", "books-snapshots"]
    assert not datastore.mill.topic("Ledger-events").settings.takes_packs


def test_a_topic_that_does_not_fit_is_refused(datastore: MillstreamDatastore) -> None:
    datastore.mill.create_topic("packed-events")
    datastore.mill.create_topic("many-events", partitions=2, packs=False)
    for name in ("packed-events", "many-events"):
        with pytest.raises(ProgrammingError, match="does not fit"):
            MillstreamApplicationRecorder(datastore, name)
    with pytest.raises(ProgrammingError, match="missing"):
        MillstreamApplicationRecorder(datastore, "missing-events", create=False)


def test_what_cannot_be_stored_is_refused_with_the_errors_of_the_library(
    recorder: MillstreamProcessRecorder, datastore: MillstreamDatastore
) -> None:
    with pytest.raises(NotSupportedError, match="1,001 records"):
        recorder.insert_events([stored(n) for n in range(1001)])
    with pytest.raises(DataError, match="reserved"):
        recorder.insert_events([stored(1, "tracking:up")])
    with pytest.raises(DataError):
        recorder.insert_events([stored(1, state=bytes(100_000_000))])
    datastore.mill.topic("app-events").publish(b"?", key=str(A))
    with pytest.raises(InternalError, match="Another client"):
        recorder.insert_events([stored(2)])
    assert recorder.select_notifications(None, 10) == []
    datastore.close()
    with pytest.raises(OperationalError):
        recorder.max_notification_id()


def test_the_login_comes_from_the_settings_of_the_application(
    monkeypatch: pytest.MonkeyPatch, millstream_url: str, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setenv("NATS_CONTEXT", "missing")  # an address counts more than a context
    address = urlsplit(millstream_url)
    host = f"nats://{address.hostname}:{address.port}"
    env = {"PERSISTENCE_MODULE": "millstream.eventsourcing", "LEDGER_NATS_URL": host}
    with pytest.raises(OperationalError):
        InfrastructureFactory.construct(Environment("Ledger", env))
    login = {"NATS_USER": address.username or "", "NATS_PASSWORD": address.password or ""}
    factory = InfrastructureFactory.construct(Environment("Ledger", env | login))
    assert factory.application_recorder().max_notification_id() is None
    with pytest.raises(DataError, match="missing"):
        InfrastructureFactory.construct(
            Environment("Ledger", {**env, "LEDGER_NATS_URL": ""} | {"NATS_CONTEXT": "missing"})
        )


def test_no_broker_is_an_operational_error() -> None:
    env = {"PERSISTENCE_MODULE": "millstream.eventsourcing", "NATS_URL": "nats://127.0.0.1:1"}
    with pytest.raises(OperationalError):
        InfrastructureFactory.construct(env)


def test_a_recorder_of_another_kind_is_refused(millstream_url: str) -> None:
    wrong = get_topic(MillstreamTrackingRecorder)
    env = {"NATS_URL": millstream_url, "APPLICATION_RECORDER_TOPIC": wrong}
    env["PERSISTENCE_MODULE"] = "millstream.eventsourcing"
    factory = InfrastructureFactory.construct(env)
    with pytest.raises(InfrastructureFactoryError, match="MillstreamApplicationRecorder"):
        factory.application_recorder()


# -- a system of applications -------------------------------------------------------------


class Order(Aggregate):
    """An order, which is counted by another application."""

    def __init__(self, item: str) -> None:
        self.item = item


class Tally(Aggregate):
    """How often an item was ordered."""

    def __init__(self, item: str) -> None:
        self.item = item
        self.count = 0

    @staticmethod
    def create_id(item: str) -> UUID:
        return uuid5(NAMESPACE_URL, item)

    @event("Counted")
    def add(self) -> None:
        self.count += 1


class Orders(Application[UUID]):
    def order(self, item: str) -> int:
        return self.save(Order(item))[-1].notification.id


class Tallies(ProcessApplication[UUID]):
    @singledispatchmethod
    def policy(self, domain_event: Any, processing_event: ProcessingEvent[UUID]) -> None:
        """Other events are not counted."""

    @policy.register
    def ordered(self, domain_event: Order.Created, processing_event: ProcessingEvent[UUID]) -> None:
        item = domain_event.item  # type: ignore[attr-defined]
        try:
            tally: Tally = self.repository.get(Tally.create_id(item))
        except AggregateNotFoundError:
            tally = Tally(item)
        tally.add()
        processing_event.collect_events(tally)


@pytest.mark.parametrize("kind", [SingleThreadedRunner, MultiThreadedRunner])
def test_a_system_of_applications_processes_each_event_once(kind: type[Runner[UUID]]) -> None:
    with kind(System(pipes=[[Orders, Tallies]])) as runner:
        orders, tallies = runner.get(Orders), runner.get(Tallies)
        items = ["tea", "milk", "tea", "tea"]
        last = [orders.order(item) for item in items][-1]
        tallies.recorder.wait("Orders", last, timeout=60)
        counts: dict[str, int] = {}
        for item in items:
            counts[item] = tallies.repository.get(Tally.create_id(item)).count
        assert counts == {"tea": 3, "milk": 1}
