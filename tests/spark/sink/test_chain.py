"""The fence of a task, without Spark: duplicates, zombies, lost acks, interrupted chains."""

from __future__ import annotations

from collections.abc import Iterator
from threading import Barrier, Thread
from typing import Any

import pyarrow as pa
import pytest

from millstream.broker import Role
from millstream.errors import ConfigError, RowsMoved
from millstream.events.packs.pack import EncodedPack, encode, envelope
from millstream.settings import ConnectionSettings
from millstream.spark.broker_access import connection_to
from millstream.spark.options import SinkOptions
from millstream.spark.sink.chain import Chain, Fence, UnitLimits
from millstream.spark.sink.staging import STREAM, Staging, ensure_staging
from millstream.spark.sink.targets import find_target
from millstream.spark.sink.task_sink import TaskRows, write_chains
from millstream.testing import running_broker
from millstream.wire.sync.connection import BlockingConnection
from tests.spark.conftest import Account

SUBJECT = "target._pack.spark-q-0"


@pytest.fixture
def settings(account: Account) -> ConnectionSettings:
    account.topic("target")
    return ConnectionSettings(urls=(account.url,))


@pytest.fixture
def connection(settings: ConnectionSettings) -> Iterator[BlockingConnection]:
    with BlockingConnection(settings) as made:
        yield made


def pack(*values: bytes) -> EncodedPack:
    return encode(envelope(pa.array(values, pa.binary())))


def chain(connection: BlockingConnection, batch: int, messages: int = 2) -> Chain:
    fence = Fence(connection, "target", SUBJECT, "spark-q-0")
    return Chain(fence, batch, UnitLimits(messages, 1024 * 1024))


def write(connection: BlockingConnection, batch: int, values: list[bytes], stop: int = -1) -> Chain:
    """Write one pack for each value; stop before pack `stop`, as if the worker had died."""
    made = chain(connection, batch)
    for number, value in enumerate(values):
        if number == stop:
            return made
        made.add(pack(value))
    made.finish()
    return made


def test_a_task_that_is_run_again_stores_nothing(
    account: Account, connection: BlockingConnection
) -> None:
    assert write(connection, 0, [b"a", b"b"]).stored_rows == 2
    assert write(connection, 0, [b"a", b"b"]).stored_rows == 0
    assert write(connection, 1, [b"c"]).stored_rows == 1
    assert account.values("target") == [b"a", b"b", b"c"]


def test_an_older_driver_writes_nothing_more(
    account: Account, connection: BlockingConnection
) -> None:
    write(connection, 4, [b"a"])
    write(connection, 5, [b"b"])
    assert write(connection, 4, [b"a"]).stored_rows == 0
    assert account.values("target") == [b"a", b"b"]


@pytest.mark.parametrize("stop", [1, 2, 3, 5, 6])
def test_an_interrupted_chain_is_continued_where_it_stopped(
    account: Account, connection: BlockingConnection, stop: int
) -> None:
    values = [b"%d" % n for n in range(7)]
    write(connection, 3, values, stop)
    write(connection, 3, values)
    assert account.values("target") == values
    write(connection, 4, [b"next"])
    assert account.values("target")[-1] == b"next"


def test_rows_that_moved_are_detected_before_anything_is_stored(
    account: Account, connection: BlockingConnection
) -> None:
    write(connection, 0, [b"a", b"b", b"c", b"d", b"e"], stop=3)
    before = account.values("target")
    assert before == [b"a", b"b"]
    for other in ([b"a", b"x", b"c"], [b"a"], [b"b", b"a", b"c", b"d", b"e"]):
        with pytest.raises(RowsMoved, match="commitMode to staged"):
            write(connection, 0, other)
    assert account.values("target") == before
    write(connection, 0, [b"a", b"b", b"c", b"d", b"e"])
    with pytest.raises(RowsMoved, match="stored 5 rows of batch 0"):
        write(connection, 0, [b"a", b"b", b"c", b"d"])


@pytest.mark.parametrize("count", [1, 2, 5, 9])
def test_concurrent_attempts_leave_one_copy(
    account: Account, settings: ConnectionSettings, count: int
) -> None:
    values = [b"%d" % n for n in range(count)]
    ready = Barrier(3)
    problems: list[BaseException] = []

    def twin() -> None:
        try:
            with BlockingConnection(settings) as own:
                ready.wait(120)
                for batch in range(4):
                    write(own, batch, [b"%d:" % batch + value for value in values])
        except BaseException as error:
            problems.append(error)

    twins = [Thread(target=twin) for _ in range(3)]
    for thread in twins:
        thread.start()
    for thread in twins:
        thread.join(240)
    assert not problems
    wanted = [b"%d:" % batch + value for batch in range(4) for value in values]
    assert account.values("target") == wanted


def test_a_lost_ack_does_not_write_twice(
    account: Account, connection: BlockingConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = BlockingConnection.request
    lost: list[str] = []

    def losing(self: BlockingConnection, subject: str, *args: Any, **named: Any) -> Any:
        answer = real(self, subject, *args, **named)
        if subject == SUBJECT and len(lost) < 2:
            lost.append(subject)
            self.lose()
            raise ConnectionErrorOfOurs("the ack was lost")
        return answer

    from millstream.errors import ConnectFailed as ConnectionErrorOfOurs

    monkeypatch.setattr(BlockingConnection, "request", losing)
    made = write(connection, 0, [b"a", b"b", b"c", b"d", b"e"])
    assert len(lost) == 2
    assert made.report == "5 rows, the last at offset 6"  # also those without an ack
    assert account.values("target") == [b"a", b"b", b"c", b"d", b"e"]


def test_fences_do_not_grow_with_batches(account: Account, connection: BlockingConnection) -> None:
    for batch in range(10):
        write(connection, batch, [b"%d" % batch])

    async def subjects(mill: Any) -> int:
        return int((await mill.jetstream.stream_info("target")).state.num_subjects)

    assert account.run(subjects) == 1


def rows(settings: ConnectionSettings, task: int = 0) -> TaskRows:
    options = SinkOptions(topic="target", staged=True, pack_rows=2)
    return TaskRows(settings, options, find_target(settings, "target"), task)


def frame(values: list[bytes]) -> list[pa.RecordBatch]:
    return [pa.record_batch({"value": pa.array(values, pa.binary())})]


def test_the_first_commit_decides_what_a_staged_batch_is(
    account: Account, settings: ConnectionSettings
) -> None:
    ensure_staging(settings, 1)
    staging = Staging(settings, "spark-q", 0)
    staging.stage(rows(settings), frame([b"from", b"a", b"failed", b"attempt"]))
    _, first = staging.stage(rows(settings), frame([b"a", b"b", b"c"]))
    _, second = staging.stage(rows(settings, 1), frame([b"d"]))
    assert account.values("target") == []
    staging.commit([*second, *first])
    assert account.values("target") == [b"a", b"b", b"c", b"d"]
    # Spark runs the batch again, and the rows have moved: the first commit holds.
    again = Staging(settings, "spark-q", 0)
    assert again.stage(rows(settings), frame([b"d", b"a"])) == (2, ())
    again.commit([])
    assert account.values("target") == [b"a", b"b", b"c", b"d"]


def test_an_interrupted_commit_is_continued(account: Account, settings: ConnectionSettings) -> None:
    ensure_staging(settings, 1)
    staging = Staging(settings, "spark-q", 7)
    _, packs = staging.stage(rows(settings), frame([b"a", b"b", b"c"]))
    staging._agree(list(packs))  # the manifest is stored, then the driver dies
    assert account.values("target") == []
    Staging(settings, "spark-q", 7).commit([])
    assert account.values("target") == [b"a", b"b", b"c"]


def test_staged_packs_are_removed_when_they_are_committed(
    account: Account, settings: ConnectionSettings
) -> None:
    ensure_staging(settings, 1)
    for batch in range(3):
        staging = Staging(settings, "spark-q", batch)
        _, packs = staging.stage(rows(settings), frame([b"a", b"b", b"c"]))
        staging.commit(packs)

    async def left(mill: Any) -> int:
        return int((await mill.jetstream.stream_info("mill-staging")).state.messages)

    assert account.run(left) == 1  # the last manifest
    assert len(account.values("target")) == 9


def test_the_staging_stream_of_an_earlier_version_is_closed_to_rollups(
    account: Account, settings: ConnectionSettings
) -> None:
    async def config(mill: Any) -> dict[str, Any]:
        return dict((await mill.jetstream.stream_info(STREAM)).config)

    async def old(mill: Any) -> None:
        await mill.jetstream.update_stream({**await config(mill), "allow_rollup_hdrs": True})

    ensure_staging(settings, 1)
    account.run(old)
    staging = Staging(settings, "spark-q", 0)
    _, packs = staging.stage(rows(settings), frame([b"a", b"b", b"c"]))
    ensure_staging(settings, 1)  # another query starts, of this version
    assert not account.run(config)["allow_rollup_hdrs"]
    staging.commit(packs)
    assert account.values("target") == [b"a", b"b", b"c"]


def test_a_user_without_the_right_to_purge_commits_all_the_same() -> None:
    """What was staged then expires later."""
    with running_broker(auth=True) as broker:
        admin, app = (
            ConnectionSettings(urls=(broker.url,), user=who.user, password=who.password)
            for who in map(broker.credentials, (Role.ADMIN, Role.APP))
        )
        assert admin.password is not None
        login = f"{admin.user}:{admin.password.reveal()}"
        account = Account(broker.url.replace("://", f"://{login}@"))
        account.topic("target")
        for batch in range(3):
            ensure_staging(app, 1)
            staging = Staging(app, "spark-q", batch)
            _, packs = staging.stage(rows(app), frame([b"%d" % batch]))
            staging.commit(packs)
            staging.commit(packs)
        assert account.values("target") == [b"0", b"1", b"2"]


def test_a_topic_without_packs_is_refused_before_anything_is_stored(
    account: Account, settings: ConnectionSettings
) -> None:
    account.topic("single", partitions=2, packs=False)
    task = TaskRows(settings, SinkOptions(topic="single"), find_target(settings, "single"), 0)
    ensure_staging(settings, 1)
    with pytest.raises(ConfigError, match="packs=False"):
        task.check(frame([])[0].schema)
    with pytest.raises(ConfigError, match="packs=False"):
        Staging(settings, "spark-q", 0).stage(task, frame([b"a"]))
    with pytest.raises(ConfigError, match="packs=False"):
        write_chains(task, frame([b"a"]), "spark-q-0", 0)
    assert account.values("single") == []


def test_large_rows_of_a_task_are_split_into_units(
    account: Account, settings: ConnectionSettings
) -> None:
    options = SinkOptions(topic="target", pack_rows=1000, compression="none")
    task = TaskRows(settings, options, find_target(settings, "target"), 0)
    values = [b"%07d" % n + b"x" * 1000 for n in range(40_000)]  # 40 MB: two units
    batches = [pa.record_batch({"value": pa.array(values, pa.binary())})]
    assert write_chains(task, batches, "spark-big-0", 0) == 40_000
    assert write_chains(task, batches, "spark-big-0", 0) == 40_000
    assert account.values("target") == values
    assert connection_to(settings).is_open
