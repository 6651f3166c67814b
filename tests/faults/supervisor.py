"""Starts the processes of a run, keeps them running, and ends all of them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol

import millstream
from millstream import Topic
from millstream.broker import Broker, BrokerSettings
from millstream.errors import MillstreamError
from tests.faults.checker import Findings, Stored
from tests.faults.disk import Disk
from tests.faults.history import History, Progress, Record, id_of, read_histories
from tests.faults.proxy import Proxy

__all__ = ["Child", "Node", "Orders", "SingleNode", "Stage", "staged", "stored_events", "until"]

REPOSITORY: Final = Path(__file__).parents[2]
START_SECONDS: Final = 60.0  # for a server to be ready
END_SECONDS: Final = 60.0  # for a worker to finish its work
WORKED: Final = 10  # operations between two faults of a short run
CATCH_UP_SECONDS: Final = 90.0  # for readers to catch up after the last fault
ANSWER_SECONDS: Final = 30.0  # for the supervisor's own requests: longer than an election
POLL: Final = 0.1
WORK_POLL: Final = 0.02  # reading new records is cheap


class Node(Protocol):
    """A server that faults can hit."""

    @property
    def name(self) -> str: ...

    @property
    def pid(self) -> int: ...

    def kill(self) -> None: ...

    def stop(self) -> None: ...

    def start(self) -> None: ...


@dataclass
class SingleNode:
    """The embedded broker as a node.

    While it is down, any process may take its port. So the proxy in front of it passes nothing on
    meanwhile, and follows it to another port.
    """

    broker: Broker
    name: str = "broker"
    proxy: Proxy | None = None
    url: str = field(init=False)

    def __post_init__(self) -> None:
        self.url = self.broker.url

    @property
    def pid(self) -> int:
        return self.broker.pid

    def kill(self) -> None:
        self._aim(None)
        self.broker.kill()

    def stop(self) -> None:
        self._aim(None)
        self.broker.stop(grace=5.0)

    def start(self) -> None:
        self.broker.start(timeout=START_SECONDS)
        self.url = self.broker.url
        self._aim(_address(self.url))

    def _aim(self, target: tuple[str, int] | None) -> None:
        if self.proxy is not None:
            self.proxy.target = target


def _address(url: str) -> tuple[str, int]:
    host, port = url.removeprefix("nats://").rsplit(":", 1)
    return host, int(port)


@dataclass(frozen=True)
class Orders:
    """What a run is to do.

    A short run has no seconds: each kind of fault once, in the midst of work, however long it
    takes the machine to get that work done.
    """

    scenario: str
    seed: int
    seconds: float
    folder: Path
    retention: str | None = None  # None: the seed decides

    @property
    def short(self) -> bool:
        return self.seconds == 0

    def retention_of(self, *choices: str) -> str:
        """The retention of the scenario's topic: as ordered where it makes sense."""
        if self.retention is None:
            return self.chance("retention").choice(choices)
        return self.retention if self.retention in choices else choices[0]

    def chance(self, purpose: str) -> random.Random:
        """Random numbers that depend only on the seed and the purpose."""
        return random.Random(f"{self.seed}.{self.scenario}.{purpose}")


class Child:
    """A worker process that is restarted, as a new life, whenever it was killed."""

    def __init__(self, stage: Stage, name: str, role: str, plan: dict[str, Any]) -> None:
        self.name, self.role = name, role
        self._stage, self._plan = stage, plan
        self._module = plan.get("module", "tests.faults.worker")
        self._process: asyncio.subprocess.Process | None = None
        self.lives = 0
        self.frozen = False

    @property
    def lease(self) -> float:
        """How long, in seconds, others wait for it."""
        return float(self._plan["lease"])

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.returncode is None

    def started(self) -> bool:
        """Whether the present life has started to record and to handle signals."""
        return (self._stage.orders.folder / f"{self.name}.{self.lives - 1}.jsonl").exists()

    async def start(self) -> None:
        orders = self._stage.orders
        plan = {
            "url": self._stage.url,
            "folder": str(orders.folder),
            "seed": orders.seed,
            "name": self.name,
            "life": self.lives,
            **self._plan,
        }
        self.lives += 1
        with (orders.folder / f"{self.name}.err").open("ab") as errors:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", self._module, self.role, json.dumps(plan)),
                cwd=REPOSITORY,
                stderr=errors,
            )

    def signal(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(number)
            self.frozen = number is signal.SIGSTOP

    async def kill(self) -> None:
        self.signal(signal.SIGKILL)
        if self._process is not None:
            await self._process.wait()

    async def end(self) -> None:
        """Let it finish its work; one that does not is a problem."""
        if self._process is None:
            return
        await until(lambda: self.started() or not self.alive, END_SECONDS)
        if self.alive:
            self.signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(END_SECONDS):
                code = await self._process.wait()
        except TimeoutError:
            await self.kill()
            self._stage.findings.problem("stuck", f"{self.name} did not end in {END_SECONDS:g} s")
            return
        if code != 0:
            self._crashed(code)

    def _crashed(self, code: int) -> None:
        text = (self._stage.orders.folder / f"{self.name}.err").read_text(errors="replace")
        self._stage.findings.problem("crashed", f"{self.name} ended with {code}: {text[-800:]}")


@dataclass
class Stage:
    """Everything that runs in a scenario."""

    orders: Orders
    nodes: list[Node]
    url: str  # for the workers, through the proxy when there is one
    direct: Callable[[], str]  # for the final check
    history: History
    proxy: Proxy | None = None
    disks: dict[str, Disk] = field(default_factory=dict)  # by node, where they have their own
    children: dict[str, Child] = field(default_factory=dict)
    findings: Findings = field(default_factory=Findings)

    async def worker(self, name: str, role: str, **plan: Any) -> Child:
        """Start a worker process."""
        child = Child(self, name, role, plan)
        self.children[name] = child
        await child.start()
        return child

    def of_role(self, *roles: str) -> list[Child]:
        return [child for child in self.children.values() if child.role in roles]

    def records(self) -> list[Record]:
        return read_histories(self.orders.folder)

    async def end(self, *roles: str) -> None:
        """End the workers of some roles, all together."""
        await asyncio.gather(*(child.end() for child in self.of_role(*roles)))

    async def ready(self) -> None:
        """Return when every worker has started: earlier faults would hit nothing."""
        for child in self.children.values():
            if not await until(child.started, END_SECONDS):
                self.findings.problem("stuck", f"{child.name} did not start")

    async def worked(self) -> None:
        """Return when the workers have completed something from now on."""
        progress = Progress(self.orders.folder)
        enough = progress.count() + WORKED
        if not await until(lambda: progress.count() >= enough, END_SECONDS, WORK_POLL):
            self.findings.problem("stuck", f"no progress for {END_SECONDS:g} s")

    async def crashes(self) -> None:
        """Restart workers that ended on their own, which none should."""
        for child in self.children.values():
            if not child.alive:
                self.findings.problem("crashed", f"{child.name} ended on its own")
                await child.start()

    @asynccontextmanager
    async def mill(self) -> AsyncIterator[millstream.Mill]:
        """A connection of the supervisor's own, past the proxy."""
        async with millstream.connect(
            self.direct(), connect_timeout=ANSWER_SECONDS, request_timeout=ANSWER_SECONDS
        ) as mill:
            yield mill

    async def close(self) -> None:
        for child in self.children.values():
            with contextlib.suppress(ProcessLookupError):
                await child.kill()
        self.history.close()


@asynccontextmanager
async def staged(orders: Orders, **settings: Any) -> AsyncIterator[Stage]:
    """A broker, a proxy in front of it, and what the scenario starts; all end together."""
    orders.folder.mkdir(parents=True, exist_ok=True)
    broker = Broker(BrokerSettings(data=orders.folder / "data", **settings))
    await asyncio.to_thread(broker.start, timeout=START_SECONDS)
    try:
        async with Proxy(*_address(broker.url)) as proxy:
            url = f"nats://127.0.0.1:{proxy.port}"
            history = History(orders.folder, "nemesis")
            node = SingleNode(broker, proxy=proxy)
            stage = Stage(orders, [node], url, lambda: node.url, history, proxy)
            try:
                yield stage
            finally:
                await stage.close()
    finally:
        with contextlib.suppress(ProcessLookupError, MillstreamError):
            os.kill(broker.pid, signal.SIGCONT)
        await asyncio.to_thread(broker.stop, grace=5.0)


async def stored_events(topic: Topic, *, fail_on_data_loss: bool = True) -> list[Stored]:
    """All events of a topic."""
    return [
        Stored(id_of(event.value), event.key, event.partition, event.offset, event.index)
        async for event in topic.read(fail_on_data_loss=fail_on_data_loss)
    ]


async def until(
    condition: Callable[[], bool | Awaitable[bool]],
    seconds: float = CATCH_UP_SECONDS,
    pause: float = POLL,
) -> bool:
    """Whether the condition became true in time."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + seconds
    while True:
        result = condition()
        if result if isinstance(result, bool) else await result:
            return True
        if loop.time() > deadline:
            return False
        await asyncio.sleep(pause)
