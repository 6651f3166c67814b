"""Many writers at once, and a broker that is killed meanwhile: each version once, nothing lost."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit
from uuid import UUID, uuid4

import pytest
from eventsourcing.persistence import IntegrityError, OperationalError, StoredEvent, Tracking

from millstream.broker import Broker
from millstream.deadline import Deadline
from millstream.eventsourcing import (
    MillstreamApplicationRecorder,
    MillstreamDatastore,
    MillstreamProcessRecorder,
)
from millstream.settings import ConnectionSettings, Reconnect
from millstream.testing import running_broker
from tests.integration.eventsourcing.writer_child import append

ROOT = Path(__file__).parents[3]
THREADS = 16


def check_versions(recorder: MillstreamApplicationRecorder, originator: UUID) -> list[bytes]:
    """The states of an aggregate, whose versions must be dense and in the order of storing."""
    stored = recorder.select_events(originator)
    assert [one.originator_version for one in stored] == list(range(1, len(stored) + 1))
    return [one.state for one in stored]


def test_threads_that_write_to_one_aggregate_take_turns(settings: ConnectionSettings) -> None:
    shared = MillstreamDatastore(settings)
    others = [MillstreamDatastore(settings) for _ in range(3)]
    originator, each = uuid4(), 4
    recorders = [MillstreamApplicationRecorder(one, "app-events") for one in [shared, *others]]

    def work(number: int) -> list[int | None]:
        recorder = recorders[number % 4]  # four share a connection, and what it remembers
        return [append(recorder, originator, b"%d-%d" % (number, n)) for n in range(each)]

    with ThreadPoolExecutor(THREADS) as pool:
        offsets = [offset for found in pool.map(work, range(THREADS)) for offset in found]
    states = check_versions(recorders[0], originator)
    assert Counter(states) == {b"%d-%d" % (n, m): 1 for n in range(THREADS) for m in range(each)}
    found = recorders[1].select_notifications(1, 1000)
    assert sorted(one for one in offsets if one is not None) == [one.id for one in found]


def test_processes_that_write_to_one_aggregate_take_turns(
    settings: ConnectionSettings, millstream_url: str
) -> None:
    recorder = MillstreamApplicationRecorder(MillstreamDatastore(settings), "app-events")
    originator, each = uuid4(), 10
    module = "tests.integration.eventsourcing.writer_child"
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", module, millstream_url, str(originator), name, str(each)],
            cwd=ROOT,
        )
        for name in ("a", "b", "c")
    ]
    try:
        assert [process.wait(120) for process in processes] == [0, 0, 0]
    finally:
        for process in processes:
            process.kill()
    wanted = {f"{name}-{n}".encode(): 1 for name in "abc" for n in range(each)}
    assert Counter(check_versions(recorder, originator)) == wanted


def test_several_aggregates_change_together_or_not_at_all(settings: ConnectionSettings) -> None:
    """Each transfer adds an event to two of four accounts; a half one would leave odd counts."""
    datastore = MillstreamDatastore(settings)
    recorder = MillstreamApplicationRecorder(datastore, "app-events")
    accounts = [uuid4() for _ in range(4)]

    def version(account: UUID) -> int:
        last = recorder.select_events(account, desc=True, limit=1)
        return last[0].originator_version if last else 0

    def transfer(number: int) -> None:
        pair = accounts[number % 4], accounts[(number + 1 + number // 4 % 3) % 4]
        while True:
            state = b"%d" % number
            events = [StoredEvent(one, version(one) + 1, "app:Moved", state) for one in pair]
            try:
                offsets = recorder.insert_events(events)
            except IntegrityError:
                continue
            assert offsets is not None
            assert offsets[1] == offsets[0] + 1
            return

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(transfer, range(24)))
    states = [state for account in accounts for state in check_versions(recorder, account)]
    assert Counter(states) == {b"%d" % number: 2 for number in range(24)}


def test_of_two_that_process_the_same_events_one_stores_each_result(
    settings: ConnectionSettings,
) -> None:
    recorders = [
        MillstreamProcessRecorder(MillstreamDatastore(settings), "app-events") for _ in range(2)
    ]

    def follow(recorder: MillstreamProcessRecorder) -> list[int]:
        won = []
        for position in range(1, 41):
            event = StoredEvent(uuid4(), 1, "app:Seen", b"")  # only the position is the same
            try:
                recorder.insert_events([event], tracking=Tracking("upstream", position))
            except IntegrityError:
                continue
            won.append(position)
        return won

    with ThreadPoolExecutor(2) as pool:
        won = [position for found in pool.map(follow, recorders) for position in found]
    assert sorted(won) == list(range(1, 41))
    assert len(recorders[0].select_notifications(None, 100)) == 40
    assert {one.max_tracking_id("upstream") for one in recorders} == {40}


@pytest.fixture
def broker() -> Iterator[Broker]:
    with running_broker() as broker:
        yield broker


def crash(broker: Broker) -> None:
    """Kill the broker, and start it on the same port when the dead one has let go of it.

    A process that is killed while it waits for the disk keeps its sockets until the disk is done;
    a broker started meanwhile would choose another port.
    """
    url = broker.url
    broker.kill()
    address = urlsplit(url)
    deadline = Deadline(60)
    while not deadline.passed:
        try:
            socket.create_connection((address.hostname or "", address.port or 0), 1).close()
        except ConnectionRefusedError:
            break
        except OSError:  # it is ending: ask again
            continue
    broker.start()
    assert broker.url == url


def test_a_killed_broker_loses_nothing_and_stores_nothing_twice(
    broker: Broker, settings: ConnectionSettings
) -> None:
    """Single events and pairs, by eight threads, while the broker is killed and restarted twice."""
    quick = Reconnect(wait=0.02, wait_max=0.1, give_up_after=60)
    datastore = MillstreamDatastore(replace(settings, urls=(broker.url,), reconnect=quick))
    recorder = MillstreamApplicationRecorder(datastore, "app-events")
    originator = uuid4()
    stored: set[bytes] = set()
    unknown: set[bytes] = set()
    done = threading.Event()

    def singles(number: int) -> None:
        count = 0
        while not done.is_set():
            state = b"%d-%d" % (number, count := count + 1)
            (unknown if append(recorder, originator, state) is None else stored).add(state)

    def pairs(number: int) -> None:
        count = 0
        while not done.is_set():
            state = b"pair-%d-%d" % (number, count := count + 1)
            events = [StoredEvent(uuid4(), 1, "app:Made", state) for _ in range(2)]
            try:
                recorder.insert_events(events)
            except OperationalError:
                unknown.add(state)
            else:
                stored.add(state)

    def progress(count: int) -> None:
        enough = len(stored) + count
        while len(stored) < enough and not any(one.done() for one in work):  # one may have failed
            done.wait(0.01)

    with ThreadPoolExecutor(8) as pool:
        work = [pool.submit(singles if n % 2 else pairs, n) for n in range(8)]
        try:
            for _ in range(2):
                progress(30)
                crash(broker)
            progress(30)
        finally:
            done.set()
        for one in work:
            one.result()
    check_versions(recorder, originator)
    found = Counter(one.state for one in recorder.select_notifications(None, 1_000_000))
    for state, count in found.items():
        assert count == (2 if state.startswith(b"pair") else 1)
    assert stored <= found.keys() <= stored | unknown
    datastore.close()
