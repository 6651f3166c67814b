"""A cluster that runs a slow task twice (speculation): each row is in the topic once."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from millstream.messaging import NewEvent
from millstream.wire.handshake import parse_address
from tests.faults.proxy import Proxy
from tests.spark.cluster_kit import PATIENCE_SECONDS, Cluster
from tests.spark.cluster_kit import driver as run_driver
from tests.spark.conftest import Account
from tests.spark.sink.speculate import ROWS

SCRIPT = Path(__file__).parent / "speculate.py"
HEADERS_BYTES = 2048  # more than a message has before its payload
# What task 0 sends: a unit on its fence, or packs that are put aside under a name of the attempt.
SENT = re.compile(
    rb"HPUB (?:(?P<fence>\S+\._pack\.spark-\S+-0) (?:[^\r\n]*\r\n){1,20}?"
    rb"Mill-Note: batch=\d+ unit=(?P<unit>\d+) |(?P<aside>mill-staging\.\S+\.\d+\.0)\.\S+ )"
)


@dataclass(frozen=True)
class SentTo:
    """The subject, and the unit on it, that rows of task 0 were sent to."""

    subject: str
    unit: int


class Wire(Proxy):
    """Records which attempts of task 0 have sent their rows to which subject.

    With `meet` it holds what one attempt sends until the other one has sent the same.
    """

    def __init__(self, host: str, port: int, meet: bool) -> None:
        super().__init__(host, port)
        self._meet = meet
        self._last: dict[asyncio.StreamWriter, bytes] = {}
        self._moved = asyncio.Condition()
        self.sent: dict[SentTo, list[asyncio.StreamWriter]] = {}

    async def admit(self, chunk: bytes, towards: asyncio.StreamWriter) -> None:
        await super().admit(chunk, towards)
        seen = self._last.get(towards, b"") + chunk
        self._last[towards] = seen[-HEADERS_BYTES:]
        for found in SENT.finditer(seen):
            subject = (found["fence"] or found["aside"]).decode()
            by = self.sent.setdefault(SentTo(subject, int(found["unit"] or 1)), [])
            async with self._moved:
                if towards not in by:
                    by.append(towards)
                self._moved.notify_all()
                while self._meet and len(by) < 2:
                    await self._moved.wait()

    async def started(self) -> None:
        """Wait until something of task 0 is stored: it sends its second unit, or stages packs.

        The second unit of a fence is sent when the first one is acknowledged.
        """
        async with self._moved:
            await self._moved.wait_for(
                lambda: any(sent.unit > 1 or "staging" in sent.subject for sent in self.sent)
            )


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[subprocess.Popen[str]]:
    """A driver on two executors whose hosts have different names, with speculation on."""
    with Cluster(tmp_path_factory.mktemp("cluster")) as cluster:
        cluster.worker("first")
        cluster.worker("second", "localhost")
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        with run_driver([str(SCRIPT), cluster.url], text=True, **pipes) as process:
            yield process


def order(driver: subprocess.Popen[str], what: dict[str, Any]) -> str:
    assert driver.stdin is not None
    assert driver.stdout is not None
    driver.stdin.write(json.dumps(what) + "\n")
    driver.stdin.flush()
    answer = driver.stdout.readline()
    assert answer, f"the driver ended: {driver.poll()}"
    return str(json.loads(answer))


def attempts(folder: Path) -> set[str]:
    """The tasks that ran and their attempts."""
    return {file.name for file in folder.iterdir() if re.fullmatch(r"\d-\d", file.name)}


async def run(
    driver: subprocess.Popen[str], account: Account, folder: Path, kind: str, mode: str, stall: bool
) -> Wire:
    """Let the driver write `target`; both attempts of task 0 run, and each row is stored once."""
    atomic = not stall  # else each pack is a unit of its own, stored before the next is made
    await asyncio.to_thread(account.topic, "target", partitions=2, atomic=atomic)
    if kind == "stream":
        await asyncio.to_thread(account.topic, "source", partitions=2)
        events = [NewEvent(b"%d" % n, f"from-{n % 20}") for n in range(ROWS)]
        await asyncio.to_thread(account.publish, "source", events)
    server = parse_address(account.url)
    async with Wire(server.host, server.port, meet=not stall) as wire:
        url = account.url.replace(f":{server.port}", f":{wire.port}")
        what = {"url": url, "kind": kind, "mode": mode, "folder": str(folder), "stall": stall}
        answer = asyncio.create_task(asyncio.to_thread(order, driver, what))
        async with asyncio.timeout(PATIENCE_SECONDS):
            if stall:
                started = asyncio.create_task(wire.started())
                await asyncio.wait([started, answer], return_when=asyncio.FIRST_COMPLETED)
                started.cancel()
                (folder / "go").touch()
            assert await answer == "done"
    assert attempts(folder) == {"0-0", "0-1", "1-0"}
    values = await asyncio.to_thread(account.values, "target")
    found = Counter(int(value.rstrip(b".")) for value in values)
    assert found == Counter(range(ROWS))
    return wire


@pytest.mark.parametrize("mode", ["direct", "staged"])
@pytest.mark.parametrize("kind", ["batch", "stream"])
async def test_two_attempts_that_store_the_same_rows_simultaneously_leave_one_copy(
    driver: subprocess.Popen[str], account: Account, tmp_path: Path, kind: str, mode: str
) -> None:
    wire = await run(driver, account, tmp_path, kind, mode, stall=False)
    subjects = 2 if mode == "direct" else 1  # the partitions' fences, or the staged packs
    assert [len(by) for by in wire.sent.values()] == [2] * subjects


@pytest.mark.parametrize("kind", ["batch", "stream"])
async def test_a_second_attempt_continues_after_what_a_stalled_task_has_stored(
    driver: subprocess.Popen[str], account: Account, tmp_path: Path, kind: str
) -> None:
    wire = await run(driver, account, tmp_path, kind, "direct", stall=True)
    first = next(iter(wire.sent.values()))[0]
    subject = next(sent.subject for sent in wire.sent if sent.unit == 2)
    assert wire.sent[SentTo(subject, 1)] == [first]
    last = max(sent.unit for sent in wire.sent if sent.subject == subject)
    (twin,) = wire.sent[SentTo(subject, last)]
    assert twin is not first


@pytest.mark.parametrize("kind", ["batch", "stream"])
async def test_what_a_stalled_task_has_staged_does_not_count(
    driver: subprocess.Popen[str], account: Account, tmp_path: Path, kind: str
) -> None:
    wire = await run(driver, account, tmp_path, kind, "staged", stall=True)
    assert [len(by) for by in wire.sent.values()] == [2]
