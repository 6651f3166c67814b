"""Drivers and workers killed with -9: source rows = sink rows, exactly."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections import Counter
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from millstream.messaging import NewEvent
from millstream.settings import ConnectionSettings
from millstream.spark.broker_access import jetstream_to
from millstream.spark.options import SourceOptions
from millstream.spark.source.holds import QueryHolds
from millstream.spark.source.partitions import find_partitions
from millstream.wire.sync.connection import BlockingConnection, BlockingJetStream
from millstream.wire.sync.streams import stream_info
from tests.spark.cluster_kit import PATIENCE_SECONDS, Cluster
from tests.spark.cluster_kit import driver as run_driver
from tests.spark.conftest import Account

SCRIPT = Path(__file__).parent / "copy_topic.py"
# More by hand: MILLSTREAM_KILL_ROUNDS=30 python -m pytest tests/spark/sink/test_killed.py
ROUNDS = int(os.environ.get("MILLSTREAM_KILL_ROUNDS", "2"))
ROWS = 1500


def fill(account: Account, group_id: str | None = None) -> Counter[bytes]:
    """A source of rows and an empty target; with a group, an interest topic that keeps for it."""
    account.topic("source", partitions=2, retention="interest" if group_id else "limits")
    account.topic("target", partitions=2)
    if group_id is not None:
        settings = ConnectionSettings(urls=(account.url,))
        found = find_partitions(jetstream_to(settings), SourceOptions(topics=("source",)))
        assert QueryHolds(settings, group_id, fail=True).open(found, {})
    values = [b"%d" % n for n in range(ROWS)]
    account.publish("source", [NewEvent(value, f"k{int(value) % 20}") for value in values])
    return Counter(values)


def driver(
    account: Account, master: str, checkpoint: Path, *more: str
) -> AbstractContextManager[subprocess.Popen[bytes]]:
    command = [str(SCRIPT), account.url, master, str(checkpoint), *more]
    return run_driver(command, stdout=subprocess.DEVNULL)


def stored(account: Account) -> int:
    """Messages in the target: a cheap query while Spark runs."""
    with BlockingConnection(ConnectionSettings(urls=(account.url,))) as connection:
        jetstream = BlockingJetStream(connection)
        return sum(stream_info(jetstream, f"target-{n}").state.last_seq for n in range(2))


def wait_for_more(account: Account, process: subprocess.Popen[bytes], than: int) -> None:
    limit = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < limit:
        ended = process.poll() is not None  # asked first: it may end when all is stored
        if stored(account) > than:
            return
        assert not ended, "the driver ended early"
        time.sleep(0.1)
    raise AssertionError(f"the target stays at {than} messages")


def check(account: Account, wanted: Counter[bytes]) -> None:
    found = Counter(account.values("target"))
    assert found == wanted, (
        f"missing {sum((wanted - found).values())}, twice {sum((found - wanted).values())}"
    )
    orders: dict[str | None, list[int]] = {}
    for event in account.events("target"):
        orders.setdefault(event.key, []).append(int(event.value))
    assert len(orders) == 20


@pytest.mark.parametrize(
    ("rounds", "more"),
    [
        (ROUNDS, ()),
        (ROUNDS // 2, ("--mode", "staged", "--shuffle", "--group-id", "copy")),
    ],
    ids=["direct", "staged, from an interest topic"],
)
def test_a_driver_killed_repeatedly_loses_and_duplicates_nothing(
    account: Account, tmp_path: Path, rounds: int, more: tuple[str, ...]
) -> None:
    wanted = fill(account, "copy" if "--group-id" in more else None)
    chance = random.Random(17)
    done = 0
    for _ in range(rounds):
        with driver(account, "local[2]", tmp_path / "checkpoint", *more) as process:
            wait_for_more(account, process, done)
            time.sleep(chance.uniform(0, 0.8))
            os.killpg(process.pid, signal.SIGKILL)
        done = stored(account)
    with driver(account, "local[2]", tmp_path / "checkpoint", *more, "--once") as process:
        assert process.wait(PATIENCE_SECONDS) == 0
    check(account, wanted)


# -- a cluster --------------------------------------------------------------------------------


def test_a_worker_of_a_cluster_may_die_in_the_middle(account: Account, tmp_path: Path) -> None:
    wanted = fill(account)
    with Cluster(tmp_path) as cluster:
        first = cluster.worker("first")
        cluster.worker("second")
        with driver(account, cluster.url, tmp_path / "checkpoint", "--once") as process:
            wait_for_more(account, process, 8)
            os.killpg(first.pid, signal.SIGKILL)
            assert process.wait(PATIENCE_SECONDS) == 0
    check(account, wanted)
