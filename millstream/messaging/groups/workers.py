"""Runs handlers: each key one event at a time and in order, many keys at once."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
from collections import deque
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, Protocol

from millstream.messaging.groups.assignment import Lease
from millstream.messaging.groups.event import AnyGroupEvent, GroupEvent

__all__ = ["GroupCall", "GroupHandler", "KeyLane", "Owner", "Workers", "caller"]

# A plain function runs in a thread; more of them than this only wait for each other.
THREADS_MAX: Final = 64
# Handlers that never wait would keep everyone else, the lease included, from running.
TURN_SECONDS: Final = 0.005

GroupHandler = Callable[[GroupEvent], Awaitable[None] | None]
GroupCall = Callable[[GroupEvent], Awaitable[None]]


class Owner(Protocol):
    """What a worker needs of the partition that a lane belongs to."""

    @property
    def handing_out(self) -> bool: ...

    def started(self) -> None: ...

    def ended(self) -> None: ...

    async def process(self, lane: KeyLane) -> None: ...


class KeyLane:
    """The events of one key that wait here, in order; only the first one is ever handled."""

    __slots__ = (
        "bury",
        "error",
        "failures",
        "key",
        "owner",
        "park_due",
        "queue",
        "queued",
        "running",
        "timer",
    )

    def __init__(self, owner: Owner, key: str | None) -> None:
        self.owner = owner
        self.key = key  # None: a single event without a key
        self.queue: deque[AnyGroupEvent] = deque()
        self.running = False
        self.queued = False  # waits for a worker
        self.timer: asyncio.TimerHandle | None = None  # waits for its next try
        self.failures = 0  # of the first event
        self.error = ""  # of the last failure
        self.park_due = False  # to be parked before anything else happens
        self.bury: str | None = None  # why its events go to the dead letters; None: handle them

    def stop_waiting(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None


class Workers:
    """At most `concurrency` handlers at a time, and none while the lease is not valid."""

    def __init__(self, concurrency: int, lease: Lease, cancellable: bool) -> None:
        self._concurrency = concurrency
        self._lease = lease
        self._cancellable = cancellable  # threads cannot be stopped from outside
        self._loop = asyncio.get_running_loop()
        self._ready: deque[KeyLane] = deque()
        self._running: dict[asyncio.Task[None], KeyLane | None] = {}
        self._free = 0  # workers among them that look for a lane
        self.failed: asyncio.Future[None] = self._loop.create_future()  # by an error of our own

    def add(self, lane: KeyLane) -> None:
        """Handle the lane's first event when its turn comes; no-op while it waits or runs."""
        if lane.queued or lane.running or lane.timer is not None or not lane.queue:
            return
        if lane.owner.handing_out:
            lane.queued = True
            self._ready.append(lane)
            self._pump()

    def add_later(self, lane: KeyLane, seconds: float) -> None:
        def due() -> None:
            lane.timer = None
            self.add(lane)

        lane.stop_waiting()
        lane.timer = self._loop.call_later(seconds, due)

    def resume(self) -> None:
        """The lease is valid again."""
        self._pump()

    def cancel(self, owner: Owner | None = None) -> None:
        """Cancel the handlers of one partition, or all; those in threads run on."""
        if self._cancellable:
            for task, lane in list(self._running.items()):
                if lane is not None and (owner is None or lane.owner is owner):
                    task.cancel()

    @property
    def runs_this_task(self) -> bool:
        """Whether it is asked from inside a handler."""
        return asyncio.current_task() in self._running

    async def ended(self) -> None:
        """Return when no handler runs."""
        while self._running:
            await asyncio.wait(list(self._running))

    # -- inside ---------------------------------------------------------------------------

    def _pump(self) -> None:
        while (
            len(self._ready) > self._free
            and len(self._running) < self._concurrency
            and self._lease.valid
        ):
            task = self._loop.create_task(self._work())
            self._running[task] = None
            self._free += 1
            task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        if self._running.pop(task, None) is None:
            self._free -= 1
        if not task.cancelled() and (error := task.exception()) and not self.failed.done():
            self.failed.set_exception(error)
        self._pump()

    async def _work(self) -> None:
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("a worker runs as a task")
        turn = self._loop.time() + TURN_SECONDS
        while self._ready and self._lease.valid:
            lane = self._ready.popleft()
            lane.queued = False
            if not lane.owner.handing_out:
                continue
            self._running[task] = lane
            self._free -= 1
            lane.running = True
            lane.owner.started()
            try:
                await lane.owner.process(lane)
            finally:
                self._running[task] = None
                self._free += 1
                lane.running = False
                lane.owner.ended()
                self.add(lane)
            if self._loop.time() >= turn:
                await asyncio.sleep(0)
                turn = self._loop.time() + TURN_SECONDS


def caller(handler: GroupHandler, threads: int) -> tuple[GroupCall, ThreadPoolExecutor | None]:
    """How to call a handler: as a coroutine, or in a thread of the pool that is given back."""
    call = getattr(handler, "__call__", None)  # noqa: B004 - an object may be called by `async def`
    if inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(call):
        run: Any = handler
        return run, None
    pool = ThreadPoolExecutor(min(threads, THREADS_MAX), "millstream-group")

    async def in_thread(event: GroupEvent) -> None:
        context = contextvars.copy_context()
        loop = asyncio.get_running_loop()
        result = await loop.run_in_executor(pool, context.run, handler, event)
        if inspect.isawaitable(result):
            await result

    return in_thread, pool
