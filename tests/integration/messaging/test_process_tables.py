"""Tables that a process keeps: state, outputs and positions are one commit."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest

from millstream import Event, Mill, NewEvent
from millstream.deadline import Deadline
from millstream.errors import ConfigError, DataLoss, FencedOut, ProcessFailed
from millstream.events.packs.packing import Packing
from millstream.messaging.process import ProcessSettings
from millstream.messaging.processing import table_worker
from tests.integration.messaging.process_table_child import Tables, count, make
from tests.integration.messaging.process_table_kit import (
    Total,
    check_all,
    check_totals,
    create,
    fill,
)

# -- what it does -------------------------------------------------------------------------


async def test_a_table_is_the_fold_of_the_input(mill: Mill) -> None:
    source, totals, *_ = await create(mill)
    await fill(source, 0, 300)
    process = await make(mill, "one")
    await process.run(once=True)
    await check_totals(source, totals)
    assert process.handled == 300
    again = await make(mill, "one")
    await again.run(once=True)
    assert (again.handled, again.produced) == (0, 0)
    await fill(source, 300, 350)
    await (await make(mill, "one")).run(once=True)
    await check_totals(source, totals)
    changes = totals.changes()
    assert (await anext(changes)).key in {f"k{number}" for number in range(7)}
    assert [report.sound async for report in totals.topic.admin.verify()][-1]


async def test_tables_and_a_topic_change_together(mill: Mill) -> None:
    parts = await create(mill)
    await fill(parts[0], 0, 300)
    await (await make(mill, "two")).run(once=True)
    await check_all(*parts)


async def test_a_table_in_memory_is_like_a_dict(mill: Mill) -> None:
    source = await mill.create_topic("in")
    table = await mill.create_table("rows", schema=Total)
    typed = await mill.table("rows", Total)
    raw = await mill.create_table("raw")
    await table.put("old", {"count": 1, "sum": 1})
    await table.put("gone", {"count": 1, "sum": 1})
    for step in range(3):
        await source.publish(b"%d" % step)
    seen: list[Any] = []

    def use(event: Event, tables: Tables) -> None:
        rows, plain = tables["rows"], tables["raw"]
        if event.value == b"0":
            rows["a"] = Total(1, 2)
            rows["a"].sum = 99  # a copy
            seen.append((rows["a"], rows.get("b"), "gone" in rows, len(rows), sorted(rows)))
            del rows["gone"]
            plain["json"], plain["text"] = {"n": 1}, "text"
        elif event.value == b"1":
            seen.append((rows.pop("a"), rows.setdefault("b", Total(3, 4)), plain["json"]))
            with pytest.raises(ConfigError, match="use del"):
                rows["c"] = None
            with pytest.raises(ConfigError, match="text or bytes"):
                rows[7] = Total(1, 1)  # type: ignore[index]
            with pytest.raises(KeyError):
                del rows["never"]
        else:
            rows.update(a=Total(5, 6))
            seen.append(sorted(rows))

    tables = {"rows": typed, "raw": raw}
    await mill.process(source, [], use, tables=tables).run(once=True)
    assert seen == [
        (Total(1, 2), None, True, 3, ["a", "gone", "old"]),
        (Total(1, 2), Total(3, 4), b'{"n":1}'),
        ["a", "b", "old"],
    ]
    stored = {"a": Total(5, 6), "b": Total(3, 4), "old": Total(1, 1)}
    assert await typed.as_dict() == stored
    assert await raw.as_dict() == {"json": b'{"n":1}', "text": b"text"}


async def test_outputs_say_which_topic_or_table_they_are_for(mill: Mill) -> None:
    source = await mill.create_topic("in", partitions=2)
    odd, even = await mill.create_topic("odd"), await mill.create_topic("even", partitions=2)
    last = await mill.create_table("last", partitions=2)
    for number in range(20):
        await source.publish(b"%d" % number, f"k{number % 4}")

    def split(event: Event) -> list[NewEvent]:
        number = int(event.value)
        made = [NewEvent(event.value, event.key, topic="odd" if number % 2 else "even")]
        if number % 4 == 3:
            return [*made, NewEvent(None, event.key, topic="last")]
        row = NewEvent(event.value, event.key, headers={"h": "v"}, id=f"i{number}", topic="last")
        return [*made, NewEvent(b"first", event.key, topic="last"), row]

    process = mill.process(source, [odd, even, last], split, name="split")
    await process.run(once=True)
    assert sorted([int(e.value) async for e in odd.read()]) == list(range(1, 20, 2))
    assert sorted([int(e.value) async for e in even.read()]) == list(range(0, 20, 2))
    assert await last.as_dict() == {"k0": b"16", "k1": b"17", "k2": b"18"}
    event = await last.topic.last("k0")
    assert event is not None
    assert (event.headers, event.id) == ({"h": "v"}, "i16")
    assert await last.revision("k3") > 0  # deleted


async def test_several_topics_go_to_several_topics(mill: Mill) -> None:
    """Without tables: each input partition has its own position in each output partition."""
    one, two = await mill.create_topic("one"), await mill.create_topic("two", partitions=2)
    left, right = await mill.create_topic("left"), await mill.create_topic("right", partitions=2)

    def split(event: Event) -> NewEvent:
        side = "left" if int(event.value) % 2 else "right"
        return NewEvent(f"{event.topic} {event.value.decode()}".encode(), topic=side)

    async def outputs() -> list[str]:
        found = [e.value.decode() async for e in left.read()]
        return sorted([*found, *[e.value.decode() async for e in right.read()]])

    await fill(one, 0, 20)
    await mill.process(one, [left, right], split, name="p").run(once=True)
    await fill(one, 20, 30)
    await fill(two, 0, 20)
    expected = sorted([f"one {n}" for n in range(30)] + [f"two {n}" for n in range(20)])
    for sources in ([one, two], [two, one], [one], two):
        await mill.process(sources, [left, right], split, name="p").run(once=True)
        assert await outputs() == expected
    with pytest.raises(ProcessFailed, match="is for 'middle': the targets are 'left', 'right'"):
        await mill.process(
            one, [left, right], lambda e: NewEvent(b"", topic="middle"), name="q"
        ).run(once=True)
    with pytest.raises(ProcessFailed, match="names no target"):
        await mill.process(one, [left, right], lambda e: b"", name="q").run(once=True)


async def test_events_of_an_interest_topic_are_kept_until_they_are_committed(mill: Mill) -> None:
    source = await mill.create_topic("in", retention="interest")
    await mill.create_table("totals", schema=Total)
    totals = await mill.table("totals")

    def broken(event: Event, tables: Tables) -> None:
        if event.value == b"3":
            raise ValueError("not this one")
        count(event, tables)

    await mill.process(source, [], count, tables=[totals], name="p").run(once=True)
    await source.publish_many([NewEvent(b"%d" % number, "k") for number in range(6)])
    with pytest.raises(ProcessFailed):
        await mill.process(source, [], broken, tables=[totals], name="p").run(once=True)
    assert await totals.as_dict() == {"k": {"count": 3, "sum": 3}}
    await mill.process(source, [], count, tables=[totals], name="p").run(once=True)
    assert await totals.as_dict() == {"k": {"count": 6, "sum": 15}}
    assert (await source.info()).messages == 0
    queue = await mill.create_topic("queue", retention="workqueue")
    with pytest.raises(ConfigError, match="work queue"):
        await mill.process(queue, [], count, tables=[totals], name="p").run(once=True)


async def test_several_topics_are_folded_into_one_table(mill: Mill) -> None:
    one, two = await mill.create_topic("one"), await mill.create_topic("two", partitions=2)
    await mill.create_table("totals", schema=Total)
    totals = await mill.table("totals")
    await fill(one, 0, 50)
    await mill.process(one, [], count, tables=[totals], name="p").run(once=True)
    await fill(one, 50, 60)
    await fill(two, 0, 40)
    for _ in range(2):
        await mill.process([one, two], [], count, tables=[totals], name="p").run(once=True)
    found = await totals.as_dict()
    assert sum(row["count"] for row in found.values()) == 100
    assert sum(row["sum"] for row in found.values()) == sum(range(60)) + sum(range(40))


async def test_a_commit_is_made_in_the_middle_of_a_pack(
    mill: Mill, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = await mill.create_topic("in"), await mill.create_topic("out")
    seen = await mill.create_table("seen")
    async with source.producer(Packing(max_events=100)) as producer:
        for number in range(100):
            await producer.send(b"%d" % number)
    monkeypatch.setattr(table_worker, "COMMIT_ROWS", 30)

    def note(event: Event, tables: Tables) -> bytes:
        tables["seen"][f"k{int(event.value)}"] = event.value
        if int(event.value) == broken:
            raise ValueError("not this one")
        return bytes(event.value)

    broken = 70
    with pytest.raises(ProcessFailed, match="not this one"):
        await mill.process(source, target, note, tables=[seen], name="p").run(once=True)
    assert [int(e.value) async for e in target.read()] == list(range(70))
    assert len(await seen.as_dict()) == 70
    broken = -1
    await mill.process(source, target, note, tables=[seen], name="p").run(once=True)
    assert [int(e.value) async for e in target.read()] == list(range(100))
    assert len(await seen.as_dict()) == 100


async def test_a_commit_of_many_rows_is_several_batches(mill: Mill) -> None:
    source = await mill.create_topic("in")
    seen = await mill.create_table("seen", partitions=2)
    await source.publish(b"1")
    await source.publish(b"2")

    def note(event: Event, tables: Tables) -> None:
        for number in range(6000):
            tables["seen"][f"k{number}"] = event.value

    await mill.process(source, [], note, tables=[seen], name="p").run(once=True)
    assert Counter((await seen.as_dict()).values()) == {b"2": 6000}


# -- what goes wrong ----------------------------------------------------------------------


async def test_the_changes_of_a_failing_event_are_undone(mill: Mill) -> None:
    source, totals, *_ = await create(mill)
    await mill.create_topic("good", schema=Total)
    target = await mill.topic("good")
    for number in range(12):
        await source.publish(b"%d" % number, f"k{number % 2}")

    def fragile(event: Event, tables: Tables) -> list[NewEvent]:
        number = int(event.value)
        count(event, tables)
        tables["totals"]["new" if number == 3 else f"k{number % 2}"] = {"count": -1, "sum": -1}
        count(event, tables)
        if number in (3, 4):
            raise ValueError("not this one")
        tables["totals"].pop("new", None)
        row = tables["totals"][f"k{number % 2}"] = {"count": number, "sum": number}
        # 5 and 8 fail when packs are made, 6 at once: a row of a table needs a key.
        made: list[NewEvent] = [NewEvent(row if number not in (5, 8) else {"count": "x"})]
        return [*made, NewEvent(row, None, topic="rows")] if number == 6 else made

    rows = await mill.create_table("rows", schema=Total)

    def routed(event: Event, tables: Tables) -> list[NewEvent]:
        made = fragile(event, tables)
        return [NewEvent(m.value, m.key, topic=m.topic or "good") for m in made]

    settings = ProcessSettings("p", on_error="dead_letter")
    process = mill.process(source, [target, rows], routed, settings, tables={"totals": totals})
    await process.run(once=True)
    dead = await mill.topic("in-p-dead")
    assert sorted([int(e.value) async for e in dead.read()]) == [3, 4, 5, 6, 8]
    assert sorted([e.value["sum"] async for e in target.read()]) == [0, 1, 2, 7, 9, 10, 11]
    assert await totals.as_dict() == {
        "k0": {"count": 10, "sum": 10},
        "k1": {"count": 11, "sum": 11},
    }
    assert await rows.as_dict() == {}


async def test_a_second_process_takes_the_tables_over(mill: Mill) -> None:
    parts = await create(mill)
    first = await make(mill, "two")
    running = asyncio.create_task(first.run())
    await fill(parts[0], 0, 30)
    deadline = Deadline(40)
    while first.handled < 30:
        assert not deadline.passed
        await asyncio.sleep(0.01)
    second = await make(mill, "two")
    following = asyncio.create_task(second.run())
    number = 30
    while not running.done():
        assert not deadline.passed
        await fill(parts[0], number, number + 10)
        number += 10
    with pytest.raises(FencedOut, match="taken over"):
        await running
    second.stop()
    await following
    await (await make(mill, "two")).run(once=True)
    await check_all(*parts)


async def test_a_table_has_one_owner(mill: Mill) -> None:
    source, totals, *_ = await create(mill)
    await fill(source, 0, 10)
    await (await make(mill, "one")).run(once=True)
    other = mill.process(source, [], count, tables={"totals": totals}, name="other")
    with pytest.raises(ConfigError, match="'totals' is the state of process 'fold'"):
        await other.run(once=True)
    writing = mill.process(source, totals, lambda e: NewEvent(e.value, "k"), name="writing")
    with pytest.raises(ConfigError, match="'totals' is the state of process 'fold'"):
        await writing.run(once=True)
    await fill(source, 10, 20)
    await (await make(mill, "one")).run(once=True)  # none of them got in its way
    await check_totals(source, totals)


async def test_what_cannot_work_is_refused(mill: Mill) -> None:
    source, totals, words, out = await create(mill)
    with pytest.raises(ConfigError, match="given twice"):
        mill.process(source, totals, count, tables={"totals": totals})
    with pytest.raises(ConfigError, match="needs a target, or tables"):
        mill.process(source, [], count)
    with pytest.raises(ConfigError, match="not a table"):
        mill.process(source, out, count, tables={"s": source})  # type: ignore[dict-item]
    tiny = await mill.create_table("tiny", max_message_size=600)
    await source.publish(b"1", "k1")
    with pytest.raises(ConfigError, match="positions of 3 input partitions"):
        await mill.process(source, tiny, lambda e: NewEvent(b"", "k"), name="t").run(once=True)
    expiring = await mill.create_table("expiring", max_age="1h")
    with pytest.raises(ConfigError, match="drops rows by itself"):
        mill.process(source, out, count, tables=[expiring])
    with pytest.raises(ConfigError, match="rows_max"):
        ProcessSettings("p", rows_max=0)
    await fill(source, 0, 20)
    process = mill.process(source, [], count, tables=[totals], name="p", rows_max=3)
    with pytest.raises(ConfigError, match="use a Spark pipeline"):
        await process.run(once=True)
    await words.put_many({f"k{number}": b"x" for number in range(5)})
    process = mill.process(source, [], count, tables=[words], name="p", rows_max=3)
    with pytest.raises(ConfigError, match="use a Spark pipeline"):
        await process.run(once=True)
    rows = await mill.create_table("rows")
    keyless = mill.process(source, rows, lambda event: NewEvent(b"x"), name="keyless")
    with pytest.raises(ProcessFailed, match="'rows' needs a key"):
        await keyless.run(once=True)


async def test_an_event_that_changes_too_much_is_refused(
    mill: Mill, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table_worker, "EVENT_BYTES_MAX", 10_000)
    source, rows = await mill.create_topic("in"), await mill.create_table("rows")
    await source.publish(b"1")

    def note(event: Event, tables: Tables) -> None:
        for number in range(200):
            tables["rows"][f"k{number}"] = b"x" * 100

    with pytest.raises(ProcessFailed, match="one event changed 200 rows"):
        await mill.process(source, [], note, tables=[rows]).run(once=True)
    assert await rows.as_dict() == {}


async def test_a_row_that_its_table_would_not_take_fails_its_event(mill: Mill) -> None:
    source = await mill.create_topic("in")
    rows = await mill.create_table("rows", max_message_size=2000)
    small = await mill.create_table("small", max_message_size=2000)
    for size in (10, 1000, 5000, 100):
        await source.publish(b"x" * size)

    def note(event: Event, tables: Tables) -> list[NewEvent]:
        tables["rows"][f"k{len(event.value)}"] = event.value[:1400]
        if len(event.value) == 1000:
            return [NewEvent(b"x", "k", headers={"h": "x" * 2000})]
        if len(event.value) == 100:
            tables["rows"]["large"] = b"x" * 1600
        return [NewEvent(event.value, f"k{len(event.value)}")]

    process = mill.process(source, small, note, tables=[rows], name="p", on_error="dead_letter")
    await process.run(once=True)
    assert await small.as_dict() == {"k10": b"x" * 10}
    assert await rows.as_dict() == {"k10": b"x" * 10}
    dead = [len(event.value) async for event in (await mill.topic("in-p-dead")).read()]
    assert sorted(dead) == [100, 1000, 5000]


async def test_tables_that_were_recreated_or_left_out_are_noticed(mill: Mill) -> None:
    source, _, words, out = await create(mill)
    await fill(source, 0, 40)
    await (await make(mill, "two")).run(once=True)
    process = mill.process(source, out, count, tables={"words": words}, name="fold")
    with pytest.raises(ConfigError, match="whose record is in 'totals'"):
        await process.run(once=True)
    await mill.delete_topic("totals")
    await mill.create_table("totals", schema=Total)
    with pytest.raises(ConfigError, match="recreated or restored"):
        await (await make(mill, "two")).run(once=True)


async def test_a_process_is_not_changed_to_one_with_tables_or_back(mill: Mill) -> None:
    """It would not find its position and write everything again."""
    source, totals, _, out = await create(mill)
    await fill(source, 0, 10)

    def plain(event: Event, tables: Tables | None = None) -> bytes:
        return bytes(event.value)

    await mill.process(source, out, plain, name="p").run(once=True)
    with pytest.raises(ConfigError, match="has written to 'out' before"):
        await mill.process(source, out, plain, name="p", tables=[totals]).run(once=True)
    other = await mill.create_table("other")
    await mill.process(source, out, plain, name="p-q", tables=[other]).run(once=True)
    with pytest.raises(ConfigError, match="has written to 'out' before"):
        await mill.process(source, out, plain, name="p-q").run(once=True)
    assert len([event async for event in out.read()]) == 20


async def test_a_recreated_input_is_data_loss(mill: Mill) -> None:
    source, *_ = await create(mill)
    await fill(source, 0, 40)
    await (await make(mill, "one")).run(once=True)
    await mill.delete_topic("in")
    await mill.create_topic("in", partitions=3)
    with pytest.raises(DataLoss, match="last offset 0"):
        await (await make(mill, "one")).run(once=True)
