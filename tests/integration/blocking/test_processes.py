"""The blocking API in real scripts: the end of the process, Ctrl-C, forks, notebooks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from millstream import GroupSettings, NewEvent, SubscriptionSettings, blocking
from millstream.blocking import Mill
from millstream.blocking.generated.message import Message
from millstream.deadline import Deadline
from millstream.testing import running_broker
from millstream.wire.api import parse_ack_address

ROOT = Path(__file__).parents[3]
BEGIN = """
import sys
from millstream import blocking
from millstream.errors import ConnectionClosed

mill = blocking.connect(sys.argv[1])
"""


@pytest.fixture
def mill(millstream_url: str) -> Iterator[Mill]:
    with blocking.connect(millstream_url, request_timeout=30) as connected:
        yield connected


def start(url: str, script: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [
            sys.executable,
            "-W",
            "always::ResourceWarning",
            "-c",
            BEGIN + textwrap.dedent(script),
            url,
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "NATS_TIMEOUT": "30s"},  # a busy broker is no fault of the script
    )


def until(condition: Callable[[], object]) -> None:
    deadline = Deadline(60)
    while not condition():
        assert not deadline.passed
        time.sleep(0.01)


def end(process: subprocess.Popen[str], seconds: float = 120) -> tuple[int, str, str]:
    try:
        out, errors = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        out, errors = process.communicate()
        pytest.fail(f"the script hung\n{out}\n{errors}")
    return process.returncode, out, errors


def run(url: str, script: str) -> str:
    code, out, errors = end(start(url, script))
    assert (code, errors) == (0, ""), errors
    return out


def test_a_script_that_closes_nothing_ends_soon_and_loses_nothing(
    mill: Mill, millstream_url: str
) -> None:
    topic = mill.create_topic("orders")
    topic.publish_many([NewEvent(b"%d" % n) for n in range(5)])
    run(
        millstream_url,
        """
        topic = mill.topic("orders")
        subscription = topic.subscribe("billing")
        for delivery in subscription:
            delivery.ack()
            if delivery.value == b"4":
                break
        mill.publish("news", b"last words")
        """,
    )
    # The broker has the acks when the script is gone, and counts them when it comes to it.
    until(lambda: topic.subscriptions.lag("billing").messages == 0)
    until(lambda: topic.subscriptions.info("billing").in_flight == 0)


def test_events_given_to_a_producer_are_stored_at_the_end_of_the_script(
    mill: Mill, millstream_url: str
) -> None:
    topic = mill.create_topic("orders", storage="memory")
    run(
        millstream_url,
        """
        from millstream.events.packs.packing import Packing
        producer = mill.topic("orders").producer(Packing(linger=60))
        for number in range(1000):
            producer.send(b"%d" % number)
        """,
    )
    assert [int(event.value) for event in topic.read()] == list(range(1000))


@pytest.mark.parametrize("end", ["close", "drain"])
def test_events_given_to_a_producer_are_not_lost_by_ending_the_connection(
    millstream_url: str, end: str
) -> None:
    mill = blocking.connect(millstream_url)
    producer = mill.create_topic("orders", storage="memory").event_producer()
    for number in range(1000):
        producer.send(b"%d" % number)
    getattr(mill, end)()
    with blocking.connect(millstream_url) as again:
        assert [int(e.value) for e in again.topic("orders").read()] == list(range(1000))


def test_a_script_ends_while_other_threads_wait_and_handlers_listen(
    mill: Mill, millstream_url: str
) -> None:
    mill.create_topic("orders")
    out = run(
        millstream_url,
        """
        import threading
        listening = mill.subscribe("news", handler=lambda message: None)
        listening.open()
        begun = threading.Event()
        def wait():
            begun.set()
            try:
                for delivery in mill.topic("orders").subscribe("billing"):
                    pass
            except ConnectionClosed:
                pass
        threading.Thread(target=wait, daemon=True).start()
        begun.wait()
        print("done")
        """,
    )
    assert out == "done\n"


def test_a_loop_over_a_subscription_ends_with_its_connection(
    mill: Mill, millstream_url: str
) -> None:
    mill.create_topic("orders").publish_many([b"x"] * 300)
    script = """
    taken = 0
    try:
        for delivery in mill.topic("orders").subscribe("s"):
            taken += 1
            if taken == 5:
                mill.close()
    except ConnectionClosed:
        print("closed after", taken)
    """
    assert run(millstream_url, script) == "closed after 5\n"


def test_a_script_ends_in_time_when_the_broker_is_gone() -> None:
    with running_broker() as broker:
        process = start(
            broker.url,
            """
            topic = mill.create_topic("orders", storage="memory")
            producer = topic.event_producer()
            print("ready", flush=True)
            input()
            producer.send(b"nobody will store this")
            """,
        )
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        broker.kill()
        began = time.monotonic()
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
        code, _, errors = end(process)
        assert code == 0, errors
        assert time.monotonic() - began < 60  # far below the minutes of trying to reconnect


@pytest.mark.parametrize(
    "waiting",
    [
        'for event in mill.topic("orders").read(follow=True): pass',
        'for delivery in mill.topic("orders").subscribe("s"): pass',
        'mill.topic("orders").subscribe("s").run(print)',
        'mill.subscribe("news").open().next()',
        '[message for message in mill.subscribe("news").open()]',
        'mill.topic("orders").process(mill.topic("orders"), print).run()',
    ],
    ids=["read", "subscription", "handler", "next", "subject", "process"],
)
def test_control_c_ends_a_wait(mill: Mill, millstream_url: str, waiting: str) -> None:
    mill.create_topic("orders", storage="memory")
    process = start(
        millstream_url,
        f"""
        try:
            print("ready", flush=True)
            {waiting}
        except KeyboardInterrupt:
            print("interrupted", mill.connected)
        """,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    time.sleep(0.2)  # it is most likely in the wait then; before it, the outcome is the same
    process.send_signal(signal.SIGINT)
    code, out, errors = end(process)
    assert (code, out) == (0, "interrupted True\n"), errors


def test_a_call_in_a_forked_child_asks_to_connect_again(mill: Mill, millstream_url: str) -> None:
    mill.create_topic("orders", storage="memory")
    out = run(
        millstream_url,
        """
        import os
        topic = mill.topic("orders")
        child = os.fork()
        if child == 0:
            try:
                topic.publish(b"from the child, over the parent's socket")
            except ConnectionClosed as error:
                print("forked" in str(error), flush=True)
            with blocking.connect(sys.argv[1]) as own:
                own.topic("orders").publish(b"from the child")
        else:
            assert os.waitpid(child, 0)[1] == 0
            topic.publish(b"from the parent")
            print([event.value for event in topic.read()])
        """,
    )
    assert out == "True\n[b'from the child', b'from the parent']\n"


async def test_it_works_in_the_thread_of_a_running_loop(millstream_url: str) -> None:
    with blocking.connect(millstream_url) as mill:
        topic = mill.create_topic("orders", storage="memory")
        topic.publish(b"tea")
        assert [event.value for event in topic.read()] == [b"tea"]


def test_threads_share_a_connection(mill: Mill) -> None:
    topic = mill.create_topic("orders", storage="memory")
    with ThreadPoolExecutor(8) as threads:
        receipts = list(threads.map(lambda n: topic.publish(b"%d" % n), range(200)))
    assert sorted(receipt.offset for receipt in receipts) == list(range(1, 201))


def test_threads_share_a_subscription_and_each_event_goes_to_one(mill: Mill) -> None:
    topic = mill.create_topic("orders", storage="memory")
    topic.publish_many([NewEvent(b"%d" % n) for n in range(2000)])
    seen: list[int] = []
    with topic.subscribe("billing", SubscriptionSettings(max_in_flight=5000)) as subscription:

        def work() -> None:
            for delivery in subscription:
                seen.append(int(delivery.value))
                delivery.ack()
                if len(seen) == 2000:
                    subscription.close()

        with ThreadPoolExecutor(4) as threads:
            for worker in [threads.submit(work) for _ in range(4)]:
                worker.result(timeout=60)
    assert sorted(seen) == list(range(2000))


def test_a_lease_of_an_event_not_yet_handed_out_is_renewed(mill: Mill) -> None:
    topic = mill.create_topic("orders", storage="memory")
    topic.publish_many([NewEvent(b"%d" % n) for n in range(6)])
    attempts: list[int] = []
    renewed: set[int] = set()

    def note(message: Message) -> None:
        if message.data == b"+WPI":
            renewed.add(parse_ack_address(message.subject.encode()).sequence)

    lease = SubscriptionSettings(ack_wait=8.0)  # renewed after half of it
    with (
        mill.subscribe("$JS.ACK.>", handler=note),
        topic.subscribe("billing", lease) as subscription,
    ):
        for delivery in subscription:
            attempts.append(delivery.attempt)
            delivery.ack_sync()
            if len(attempts) == 1:
                until(lambda: renewed == {2, 3, 4, 5, 6})
            if len(attempts) == 6:
                break
    assert attempts == [1] * 6
    assert topic.subscriptions.lag("billing").messages == 0


def test_a_group_member_is_stopped_by_its_own_handler(mill: Mill) -> None:
    topic = mill.create_topic("orders", partitions=2, storage="memory")
    topic.publish_many([NewEvent(b"%d" % n, f"k{n}") for n in range(10)])
    seen: list[int] = []
    group = topic.group("billing", GroupSettings(lease=60.0))

    def handle(event: object) -> None:
        seen.append(1)
        if len(seen) == 10:
            group.stop()

    with group:
        group.run(handle)
    assert len(seen) == 10


def test_a_drain_waits_for_the_event_that_another_thread_has_in_hand(millstream_url: str) -> None:
    mill = blocking.connect(millstream_url)
    topic = mill.create_topic("orders", storage="memory")
    topic.publish_many([NewEvent(b"%d" % n) for n in range(3)])
    begun, let_go, done = threading.Event(), threading.Event(), []
    subscription = topic.subscribe("billing")

    def work() -> None:
        for delivery in subscription:
            begun.set()
            let_go.wait(60)
            delivery.ack()
            done.append(delivery.value)

    with ThreadPoolExecutor(2) as threads:
        working = threads.submit(work)
        assert begun.wait(60)
        draining = threads.submit(mill.drain, timeout=60)
        until(lambda: subscription._inner.inbox.closed)
        time.sleep(0.1)
        assert not draining.done()
        let_go.set()
        draining.result(60)
        working.result(60)
    assert done == [b"0"]
    with blocking.connect(millstream_url) as again:
        until(lambda: again.topic("orders").subscriptions.lag("billing").messages == 2)
