"""Tables as they were: the right value of each key at any time, or HistoryGone."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

import millstream
from millstream import Mill, TopicSettings
from millstream.broker import Role, User
from millstream.errors import ConfigError, DataLoss, HistoryGone, PermissionDenied
from millstream.events.subject import partition_of
from millstream.messaging.topics.purging import Purge
from millstream.settings import LOST_METADATA, Secret
from millstream.tables import PastTable, Table
from millstream.testing import running_broker

MICROSECOND = timedelta(microseconds=1)


@pytest.fixture
async def mill(millstream_url: str) -> AsyncIterator[Mill]:
    async with millstream.connect(millstream_url, request_timeout=30) as mill:
        yield mill


async def stored(table: Table, key: str) -> datetime:
    """When the last change of a key was stored."""
    event = await table.topic.last(key)
    assert event is not None
    return event.timestamp


async def put(table: Table, key: str, value: bytes) -> datetime:
    await table.put(key, value)
    return await stored(table, key)


async def value_at(table: Table, time: datetime, key: str) -> Any:
    entry = await (await table.at(time)).get(key)
    return None if entry is None else entry.value


# -- against a model ----------------------------------------------------------------------


@dataclass
class Written:
    """One change of a key, as it was made."""

    time: datetime
    value: bytes | None
    first: bool  # stored under the condition that the key had no value


@dataclass
class Model:
    """Everything that was ever written, and what a table with this history still holds."""

    history: int
    partitions: int
    writes: dict[str, list[Written]] = field(default_factory=dict)

    def forgets(self, key: str) -> bool:
        """Whether anything was removed from the partition of a key."""
        here = partition_of(key, self.partitions)
        return any(
            len(writes) > self.history and partition_of(other, self.partitions) == here
            for other, writes in self.writes.items()
        )

    def expected(self, key: str, time: datetime) -> bytes | None:
        """The value at a time; HistoryGone when nobody could tell from what is stored."""
        writes = self.writes.get(key, [])
        before = [write for write in writes if write.time <= time]
        kept = writes[-self.history :]
        if before and before[-1] in kept:
            return before[-1].value
        untold = len(writes) >= self.history and self.forgets(key)
        if before or (untold and not kept[0].first):
            raise HistoryGone("stock", key, time, "model")
        return None


GONE = "gone"


def told(model: Model, key: str, time: datetime) -> bytes | str | None:
    try:
        return model.expected(key, time)
    except HistoryGone:
        return GONE


async def answered(past: PastTable, key: str) -> bytes | str | None:
    try:
        entry = await past.get(key)
    except HistoryGone as error:
        return GONE if error.key == key else "another key"
    return None if entry is None else entry.value


@pytest.mark.parametrize("partitions", [1, 3])
@pytest.mark.parametrize("history", [1, 2, 4])
async def test_any_time_gives_the_value_of_then_or_says_that_it_is_gone(
    mill: Mill, history: int, partitions: int
) -> None:
    chance = random.Random(history * 10 + partitions)
    # Without direct reads the value is looked up as in a table with several replicas.
    direct = None if partitions == 1 else False
    table = await mill.create_table("stock", history=history, partitions=partitions, direct=direct)
    model = Model(history, partitions)
    keys = ["a", "b.c", "schlüssel", "d", "e", "never"]
    times = [(await table.topic.info()).created]
    for number in range(40):
        key = chance.choices(keys[:-1], weights=[8, 4, 2, 1, 1])[0]
        value = None if chance.random() < 0.25 else b"%d" % number
        first = key not in model.writes and value is not None and chance.random() < 0.5
        if value is None:
            await table.delete(key)
        else:
            await table.put(key, value, revision=0 if first else None)
        time = await stored(table, key)
        model.writes.setdefault(key, []).append(Written(time, value, first))
        times.append(time)
    answers = {"value": 0, "none": 0, "gone": 0}
    for time in chance.sample(times, 25):
        moment = time + chance.choice([-1, 0, 1]) * MICROSECOND
        moment = max(moment, times[0] + MICROSECOND)
        past = await table.at(moment)
        state: dict[str, bytes] = {}
        gone: list[str] = []
        for key in keys:
            right = told(model, key, moment)
            assert await answered(past, key) == right, (key, moment)
            answers[right if isinstance(right, str) else "none" if right is None else "value"] += 1
            if isinstance(right, bytes):
                state[key] = right
            elif right is not None:
                gone.append(key)
        assert await known_part(past) == (state, gone[0] if len(gone) == 1 else None, len(gone))
    assert min(answers.values()) > 0, answers


async def known_part(past: PastTable) -> tuple[dict[str, bytes], str | None, int]:
    """All values that are known, and how many are not (its name if it is one)."""
    found: dict[str, bytes] = {}
    try:
        async for entry in past.entries():
            found[entry.key] = entry.value
    except HistoryGone as error:
        return found, None if error.others else error.key, error.others + 1
    return found, None, 0


# -- what removes values ------------------------------------------------------------------


async def test_a_deletion_is_part_of_the_past(mill: Mill) -> None:
    table = await mill.create_table("stock", history=5)
    first = await put(table, "apples", b"3")
    await table.delete("apples")
    deleted = await stored(table, "apples")
    again = await put(table, "apples", b"4")
    assert await value_at(table, first, "apples") == b"3"
    assert await value_at(table, deleted, "apples") is None
    assert await (await table.at(deleted)).as_dict() == {}
    assert await value_at(table, again, "apples") == b"4"
    assert await value_at(table, first - MICROSECOND, "apples") is None


async def test_the_error_says_which_value_is_gone_and_what_to_do(mill: Mill) -> None:
    table = await mill.create_table("stock", history=2)
    first = await put(table, "apples", b"1")
    second = await put(table, "apples", b"2")
    await put(table, "apples", b"3")
    await put(table, "pears", b"1")
    past = await table.at(first)
    with pytest.raises(HistoryGone, match="create the table with a larger history") as caught:
        await past.get("apples")
    error = caught.value
    assert (error.table, error.key, error.time) == ("stock", "apples", first)
    assert error.oldest == second
    assert isinstance(error, LookupError)
    with pytest.raises(HistoryGone):
        await past.as_dict()
    assert await past.get("pears") is None  # one value of two: it had none before
    assert [entry.key async for entry in past.entries(["pears"])] == []


async def test_while_nothing_was_removed_every_answer_is_certain(mill: Mill) -> None:
    table = await mill.create_table("stock", history=1)
    first = await put(table, "apples", b"1")
    await put(table, "pears", b"1")  # as many values as are kept, and yet its first
    assert await (await table.at(first)).as_dict() == {"apples": b"1"}
    assert await value_at(table, first, "pears") is None
    await put(table, "apples", b"2")
    with pytest.raises(HistoryGone):
        await value_at(table, first, "pears")


async def test_a_past_table_does_not_change(mill: Mill) -> None:
    table = await mill.create_table("stock", history=3)
    await table.put("apples", b"1")
    past = await table.at(datetime.now(UTC) + timedelta(seconds=2))  # clocks differ: this is now
    await table.put("apples", b"2")
    await table.put("pears", b"1")
    assert await past.as_dict() == {"apples": b"1"}
    assert past.time <= datetime.now(UTC)
    for _ in range(2):
        await table.put("apples", b"3")
    with pytest.raises(HistoryGone):
        await past.get("apples")


async def test_times_that_no_table_has_are_refused(mill: Mill) -> None:
    table = await mill.create_table("stock", history=3)
    created = (await table.topic.info()).created
    with pytest.raises(HistoryGone, match="it was created at"):
        await table.at(created - timedelta(days=1))
    assert await (await table.at(created)).as_dict() == {}
    with pytest.raises(ConfigError, match="in the future"):
        await table.at(datetime.now(UTC) + timedelta(hours=1))
    with pytest.raises(ConfigError, match="no time zone"):
        await table.at(datetime(2026, 1, 1))  # noqa: DTZ001


@pytest.mark.parametrize("what", [Purge(), Purge(key="apples"), Purge(before=3)], ids=str)
async def test_after_a_purge_what_was_before_it_is_in_doubt(mill: Mill, what: Purge) -> None:
    table = await mill.create_table("stock", history=5)
    first = await put(table, "apples", b"1")
    await table.put("apples", b"2")
    await table.put("pears", b"1")
    await table.topic.admin.purge(what)
    last = await put(table, "plums", b"1")
    for key in ("apples", "plums"):
        with pytest.raises(HistoryGone, match="were purged"):
            await value_at(table, first, key)
    with pytest.raises(HistoryGone, match="were purged") as caught:
        await (await table.at(first)).as_dict()
    assert caught.value.key is None
    assert await value_at(table, last, "apples") is None  # it was purged before that
    assert (await mill.create_table("stock", history=5)).name == "stock"  # the note is no setting


async def test_a_larger_history_does_not_bring_back_the_certainty(mill: Mill) -> None:
    table = await mill.create_table("stock", history=1)
    first = await put(table, "apples", b"1")
    await table.put("apples", b"2")
    await mill.edit_topic("stock", history=10)
    table = await mill.table("stock")
    later = await put(table, "pears", b"1")
    with pytest.raises(HistoryGone):
        await value_at(table, first, "apples")  # one value of ten, and yet there was another
    await table.put("apples", b"3")
    assert await value_at(table, later, "apples") == b"2"
    assert await value_at(table, later, "plums") is None


@pytest.mark.parametrize(
    ("settings", "why"),
    [({"max_messages": 2}, "max_messages"), ({"max_bytes": 200}, "max_bytes")],
    ids=["messages", "bytes"],
)
async def test_a_limit_of_the_table_puts_its_past_in_doubt(
    mill: Mill, settings: dict[str, Any], why: str
) -> None:
    table = await mill.create_table("stock", history=5, **settings)
    first = await put(table, "apples", b"1")
    assert await value_at(table, first - MICROSECOND, "pears") is None  # nothing is removed yet
    for number in range(6):
        last = await put(table, f"k{number}", b"1")
    with pytest.raises(HistoryGone, match=why):
        await value_at(table, first, "apples")
    with pytest.raises(HistoryGone, match=why):
        await (await table.at(first)).as_dict()
    assert await value_at(table, last, "k5") == b"1"


async def test_values_that_are_too_old_put_the_past_in_doubt(mill: Mill) -> None:
    table = await mill.create_table("stock", history=5, max_age="200ms")
    first = await put(table, "apples", b"1")
    while await table.get("apples") is not None:
        await table.revision("apples")
    with pytest.raises(HistoryGone, match="removed after 200ms"):
        await value_at(table, first, "apples")


async def test_a_copy_knows_only_what_was_copied(mill: Mill) -> None:
    origin = await mill.create_table("stock", history=1)
    await put(origin, "pears", b"1")
    first = await put(origin, "apples", b"1")
    last = await put(origin, "apples", b"2")
    copy = await mill.create_table("copy", TopicSettings(mirror="stock", history=10))
    while await copy.get("apples") is None:
        await copy.topic.info()
    with pytest.raises(HistoryGone, match="is a copy"):
        await value_at(copy, first, "apples")
    assert await value_at(copy, first, "pears") == b"1"
    assert await value_at(copy, last, "apples") == b"2"


# -- who reads, and what is lost ----------------------------------------------------------


async def test_a_user_that_may_only_read_reads_the_past_and_erases_nothing() -> None:
    users = (
        User("boss", Secret("b"), role=Role.ADMIN),
        User("eyes", Secret("e"), role=Role.READER),
    )
    async with (
        running_broker(users=users) as broker,
        millstream.connect(broker.url, user="boss", password="b") as admin,
        millstream.connect(broker.url, user="eyes", password="e") as reader,
    ):
        table = await admin.create_table("stock", history=2)
        await table.put("pears", b"1")
        first = await put(table, "apples", b"1")
        await put(table, "apples", b"2")
        seen = await reader.table("stock")
        assert await (await seen.at(first)).as_dict() == {"apples": b"1", "pears": b"1"}
        await table.put("apples", b"3")
        assert await value_at(seen, first, "pears") == b"1"
        with pytest.raises(HistoryGone):
            await value_at(seen, first, "apples")
        with pytest.raises(PermissionDenied):
            await seen.topic.admin.erase(1)
        assert await table.topic.admin.erase(1) is True
        assert await table.topic.admin.erase(1) is False
        with pytest.raises(HistoryGone, match="were purged"):
            await value_at(seen, first, "pears")


async def test_a_value_that_the_broker_has_lost_is_not_an_older_one(mill: Mill) -> None:
    table = await mill.create_table("stock", history=5)
    first = await put(table, "apples", b"1")
    last = await put(table, "pears", b"1")
    jetstream = table.topic._jetstream
    config = (await jetstream.stream_info("stock")).config
    note = '[{"first": 2, "last": 2, "found": "2026-11-01T00:00:00Z"}]'
    metadata = {**config["metadata"], LOST_METADATA: note}
    await jetstream.update_stream({**config, "metadata": metadata})
    assert await value_at(table, first, "apples") == b"1"
    past = await table.at(last)
    for key in ("apples", "plums"):
        with pytest.raises(DataLoss, match="are lost"):
            await past.get(key)
    with pytest.raises(DataLoss, match="are lost"):
        await past.as_dict()
