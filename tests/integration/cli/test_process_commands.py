"""process ls: which processes have stored a position, and how far they are."""

from __future__ import annotations

import millstream.blocking
from millstream import ProcessSettings
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
