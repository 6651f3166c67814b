"""Runs handlers: one event of a key at a time and in order, many keys in parallel."""

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

__all__ = ["GroupCall", "GroupHandler", "KeyQueue", "Owner", "Workers", "caller"]

# A plain function runs in a thread; more of them than this only wait for each other.
THREADS_MAX: Final = 64
# Handlers that never wait would keep all other tasks, lease renewal included, from running.
YIELD_SECONDS: Final = 0.005

GroupHandler = Callable[[GroupEvent], Awaitable[None] | None]
GroupCall = Callable[[GroupEvent], Awaitable[None]]


class Owner(Protocol):
    """What a worker needs of the partition that a key belongs to."""

    @property
    def handing_out(self) -> bool: ...

    def started(self) -> None: ...

    def ended(self) -> None: ...

    async def process(self, queue: KeyQueue) -> None: ...


class KeyQueue:
    """The events of one key that wait here, in order; only the first one is being handled."""

    __slots__ = (
        "cause",
        "error",
        "events",
        "failures",
        "given_up",
        "key",
        "owner",
        "park_due",
        "queued",
        "running",
        "timer",
    )

    def __init__(self, owner: Owner, key: str | None) -> None:
        self.owner = owner
        self.key = key  # None: a single event without a key
        self.events: deque[AnyGroupEvent] = deque()
        self.running = False
        self.queued = False  # waits for a worker
        self.timer: asyncio.TimerHandle | None = None  # waits for its next attempt
        self.failures = 0  # of the first event
        self.error = ""  # of the last failure
        self.cause: BaseException | None = None  # the same, with its traceback
        self.park_due = False  # to be parked before anything else happens
        # Why its events become dead letters; None: handle them.
        self.given_up: str | None = None

    def failed(self, error: BaseException, text: str = "") -> None:
        """Its first event could not be handled."""
        self.failures += 1
        self.error = text or f"{type(error).__name__}: {error}"
        self.cause = error

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
        self._ready: deque[KeyQueue] = deque()
        self._running: dict[asyncio.Task[None], KeyQueue | None] = {}
        self._free = 0  # workers among them without a key
        self.failed: asyncio.Future[None] = self._loop.create_future()  # by an error of our own

    def add(self, queue: KeyQueue) -> None:
        """Handle the key's first event when a worker is free; no-op while it waits or runs."""
        if queue.queued or queue.running or queue.timer is not None or not queue.events:
            return
        if queue.owner.handing_out:
            queue.queued = True
            self._ready.append(queue)
            self._pump()

    def add_later(self, queue: KeyQueue, seconds: float) -> None:
        def due() -> None:
            queue.timer = None
            self.add(queue)

        queue.stop_waiting()
        queue.timer = self._loop.call_later(seconds, due)

    def resume(self) -> None:
        """The lease is valid again."""
        self._pump()

    def cancel(self, owner: Owner | None = None) -> None:
        """Cancel the handlers of one partition, or all; those in threads keep running."""
        if self._cancellable:
            for task, queue in list(self._running.items()):
                if queue is not None and (owner is None or queue.owner is owner):
                    task.cancel()

    @property
    def runs_this_task(self) -> bool:
        """Whether the caller is a handler."""
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
        yield_at = self._loop.time() + YIELD_SECONDS
        while self._ready and self._lease.valid:
            queue = self._ready.popleft()
            queue.queued = False
            if not queue.owner.handing_out:
                continue
            self._running[task] = queue
            self._free -= 1
            queue.running = True
            queue.owner.started()
            try:
                await queue.owner.process(queue)
            finally:
                self._running[task] = None
                self._free += 1
                queue.running = False
                queue.owner.ended()
                self.add(queue)
            if self._loop.time() >= yield_at:
                await asyncio.sleep(0)
                yield_at = self._loop.time() + YIELD_SECONDS


def caller(handler: GroupHandler, threads: int) -> tuple[GroupCall, ThreadPoolExecutor | None]:
    """How to call a handler: as a coroutine, or in a thread of the pool that is returned."""
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
