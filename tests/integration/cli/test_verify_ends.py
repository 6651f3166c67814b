"""`verify` and `status` report newest events that a topic has lost."""

from __future__ import annotations

import millstream
from millstream import NewEvent
from millstream.broker import kill_node
from tests.integration.cli.conftest import Cli


async def test_verify_and_status_report_events_that_a_damaged_disk_lost(cli: Cli) -> None:
    """flipped-byte, seed 113: `verify` called a log sound whose end had been cut off."""
    url = cli.json("up", "--port", "0")["url"]
    async with millstream.connect(url) as mill:
        topic = await mill.create_topic("log", partitions=2)
        await topic.publish_many(NewEvent(b"value %d" % n, f"k{n % 7}") for n in range(100))
    assert cli.json("verify", "log")["sound"]
    data = cli.folder / ".millstream"
    kill_node(data, "n1")
    (block,) = data.rglob("streams/log-1/msgs/*.blk")
    content = bytearray(block.read_bytes())
    content[len(content) // 2] ^= 4
    block.write_bytes(content)
    assert "the log of 'log-1'" in cli("up", "--port", "0").stderr

    report = cli.json("verify", "log", code=4)
    assert [(flaw["kind"], flaw["partition"]) for flaw in report["flaws"]] == [("end", 1)]
    assert "log-1" in cli("verify", "log", code=4).stdout
    status = cli.json("status", code=4)
    assert not status["ok"]
    assert [loss["stream"] for loss in status["losses"]] == ["log-1"]
    assert "lost: the log of 'log-1'" in cli("status", code=4).stdout

    lost = cli.json("topic", "info", "log")["partitions"][1]["lost"]
    assert "not accepted" in cli("topic", "info", "log").stdout
    assert (
        "are lost"
        in cli("topic", "tail", "log", "--offset", "beginning", "--exit", code=None).stderr
    )
    taken = cli.json("topic", "accept-loss", "log", "--by", "ann", "--yes")["accepted"]
    assert [(one["partition"], one["first"], one["accepted_by"]) for one in taken] == [
        (1, lost[0]["first"], "ann")
    ]
    assert "by ann" in cli("topic", "info", "log").stdout
    assert "no loss" in cli("topic", "accept-loss", "log", "--yes").stdout
    assert cli.healthy()["ok"], "at the broker's next look at its logs"
    assert "lost, accepted: the log of 'log-1'" in cli("status").stdout
