"""process ls: which processes have stored a position, and how far they are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import millstream.blocking
from millstream import Event, NewEvent, ProcessSettings
from tests.integration.cli.messaging_commands import Commands


def test_processes_are_listed_with_what_they_read_write_and_have_left(millstream_url: str) -> None:
    run = Commands(millstream_url)
    assert run.json("process", "ls") == []
    assert "no process" in run("process", "ls")
    with millstream.blocking.connect(millstream_url) as mill:
        numbers = mill.create_topic("numbers", partitions=2)
        squares = mill.create_topic("squares", partitions=2)
        numbers.publish_many([b"%d" % number for number in range(6)])
        with squares.producer() as producer:
            producer.send(b"a pack of no process")
        with squares.writer("other-1") as writer:
            writer.write(b"a writer with the name of a fence", position=1)
        mill.process(
            numbers, squares, lambda event: event.value * 2, ProcessSettings("squaring")
        ).run(once=True)
        (found,) = run.json("process", "ls")
        assert (found["name"], found["source"], found["target"]) == (
            *("squaring", "numbers", "squares"),
        )
        assert found["lag"] == 0
        assert sum(part["position"] for part in found["partitions"]) == 6
        numbers.publish_many([b"%d" % number for number in range(4)])
        (info,) = mill.processes()
        assert info.lag == 4
        text = run("process", "ls")
        assert "squaring" in text
        assert "ago" in text
        mill.delete_topic("numbers")
        assert mill.processes()[0].lag is None
        assert "input is gone" in run("process", "ls")


def test_a_process_with_tables_is_listed_with_all_that_it_writes(millstream_url: str) -> None:
    run = Commands(millstream_url)
    with millstream.blocking.connect(millstream_url) as mill:
        one, two = mill.create_topic("one", partitions=2), mill.create_topic("two")
        totals, last = mill.create_table("totals"), mill.create_table("last")
        copies = mill.create_topic("copies")
        one.publish_many([NewEvent(b"%d" % number, f"k{number}") for number in range(6)])
        two.publish(b"6", "k6")

        def note(event: Event, tables: dict[str, Any]) -> Iterator[NewEvent]:
            tables["totals"][event.key] = event.value
            yield NewEvent(event.value, event.key, topic="last")
            yield NewEvent(event.value, event.key, topic="copies")

        mill.process(
            [one, two], [last, copies], note, ProcessSettings("noting"), tables={"totals": totals}
        ).run(once=True)
        assert totals.as_dict() == last.as_dict() == {f"k{n}": b"%d" % n for n in range(7)}
        assert sorted(event.value for event in copies.read()) == [b"%d" % n for n in range(7)]
        (found,) = run.json("process", "ls")
        assert (found["name"], found["source"]) == ("noting", "one, two")
        assert found["target"] == "totals, last, copies"
        assert found["lag"] == 0
        places = {(part["topic"], part["partition"]) for part in found["partitions"]}
        assert places == {("one", 0), ("one", 1), ("two", 0)}
        two.publish(b"7", "k7")
        assert mill.processes()[0].lag == 1
        assert "two/0@1" in run("process", "ls")
        mill.process([one, two], copies, lambda event: event.value, name="plain").run(once=True)
        names = [(info.name, info.source, info.target) for info in mill.processes()]
        assert ("plain", "one, two", "copies") in names
