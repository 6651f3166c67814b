"""The thread whose event loop does the work of every blocking call of this process."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import os
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Final, Generic, ParamSpec, Protocol, TypeVar
from weakref import WeakSet

from millstream.blocking.pump import AHEAD_ITEMS, Pump
from millstream.errors import ConfigError, ConnectionClosed, MillstreamError

__all__ = ["LoopThread", "loop_thread"]

_log = logging.getLogger("millstream.blocking")

P = ParamSpec("P")
T = TypeVar("T")

# Handlers that run at the same time in this process; each is a thread, further ones wait.
THREADS_MAX: Final = 256
# While calls without a result keep coming, the loop polls for them at this interval instead of
# being woken for each: a wake-up costs more than an ack.
POLL_SECONDS: Final = 0.001
# How long a closing connection waits for producers whose broker may be gone.
HAND_OVER_SECONDS: Final = 5.0
# In a process that was stopped and continued, any thread may receive a signal. The main thread,
# which has to act on it, does not wake up for that: it checks at this interval.
SIGNAL_SECONDS: Final = 1.0
# How long an interrupted call may take to clean up before the interrupt is raised.
CANCEL_SECONDS: Final = 2.0
# How long the end of the process waits for handlers and acks in flight: a running broker may
# be busy for seconds; for one that is gone the wait is shorter. Then for all other tasks.
EXIT_SECONDS: Final = 10.0
EXIT_ALONE_SECONDS: Final = 3.0
EXIT_TASKS_SECONDS: Final = 1.0
ENDED: Final = "the process is ending: no more calls"


class DrainableClient(Protocol):
    """What is drained at the end of the process."""

    @property
    def connected(self) -> bool: ...

    async def drain(self, timeout: float) -> None: ...


class _Call(Generic[T]):
    """One coroutine that a thread waits for."""

    __slots__ = ("_done", "_task", "_work")

    def __init__(self, work: Coroutine[Any, Any, T]) -> None:
        self._work = work
        self._task: asyncio.Task[T] | None = None
        self._done = threading.Lock()
        self._done.acquire()

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._work)
        self._task.add_done_callback(self._finish)

    def _finish(self, _task: asyncio.Task[T]) -> None:
        self._done.release()

    def cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()
        else:  # the caller was interrupted before the loop got the call
            self.drop()
            self._done.release()

    def drop(self) -> None:
        self._work.close()

    def wait(self) -> None:
        """Wait until it is done; a signal's exception (KeyboardInterrupt) ends the wait."""
        while not self.wait_for(SIGNAL_SECONDS):
            continue

    def wait_for(self, seconds: float) -> bool:
        return self._done.acquire(timeout=seconds)

    def result(self) -> T:
        if self._task is None:
            raise ConnectionClosed("the call was not started: the process is ending")
        try:
            return self._task.result()
        except asyncio.CancelledError:
            raise ConnectionClosed("the call was cancelled: the process is ending") from None


class _Invocation(Generic[T]):
    """One plain function that a thread waits for."""

    __slots__ = ("_done", "_error", "_function", "_result")

    _result: T

    def __init__(self, function: Callable[[], T]) -> None:
        self._function = function
        self._error: BaseException | None = None
        self._done = threading.Lock()
        self._done.acquire()

    def start(self) -> None:
        try:
            self._result = self._function()
        except Exception as error:
            self._error = error
        finally:
            self._done.release()

    def result(self) -> T:
        self._done.acquire()
        if self._error is not None:
            raise self._error
        return self._result


class LoopThread:
    """An event loop in a daemon thread. All its methods may be called from any other thread."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._loop.set_default_executor(ThreadPoolExecutor(THREADS_MAX, "millstream-handler"))
        self._refusal: str | None = None  # why no more calls are accepted
        self._clients: WeakSet[DrainableClient] = WeakSet()
        # Calls without a result. They come from deliveries under a lease, so the subscriptions'
        # max_in_flight limits their number.
        self._posts: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()
        self.senders: set[asyncio.Task[None]] = set()  # tasks that hand events over to producers
        self._polling = False  # the loop checks `_posts` without being woken
        self._thread = threading.Thread(target=self._run, name="millstream-loop", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._loop.run_forever()
        finally:
            self._loop.close()

    @property
    def is_current(self) -> bool:
        """Whether the caller runs on the loop's own thread, where nothing may wait."""
        return threading.get_ident() == self._thread.ident

    # -- calling --------------------------------------------------------------------------

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the loop and return its result; Ctrl-C cancels it."""
        call = _Call(work)
        try:
            self._check()
        except BaseException:
            call.drop()
            raise
        try:
            self._soon(self._start, call)
            call.wait()
        except BaseException:  # an interrupt may come at any point, also in the middle of `_soon`
            self._give_up(call)
            raise
        return call.result()

    def _give_up(self, call: _Call[T]) -> None:
        try:
            self._soon(call.cancel)
        except ConnectionClosed:
            call.drop()
        else:
            call.wait_for(CANCEL_SECONDS)

    def _soon(self, function: Callable[..., object], *args: Any) -> None:
        """Call this on the loop soon; ConnectionClosed when it ended after the caller's check."""
        try:
            self._loop.call_soon_threadsafe(function, *args)
        except RuntimeError as error:
            raise ConnectionClosed(ENDED) from error

    def _start(self, call: _Call[T] | _Invocation[T]) -> None:
        self._run_posts()  # they were made before the call, so they come first
        call.start()

    def invoke(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a plain function on the loop and return its result."""
        self._check()
        invocation = _Invocation(partial(function, *args, **kwargs))
        self._soon(self._start, invocation)
        return invocation.result()

    def call_last(self, work: Coroutine[Any, Any, T]) -> T:
        """Like `call`, but after every producer has handed over its events."""
        try:
            self._check()
        except MillstreamError:
            work.close()
            raise
        return self.call(self._last(work))

    async def _last(self, work: Coroutine[Any, Any, T]) -> T:
        try:
            await self._handed_over()
        except BaseException:
            work.close()
            raise
        return await work

    async def _handed_over(self) -> None:
        if self.senders:
            await asyncio.wait(set(self.senders), timeout=HAND_OVER_SECONDS)

    def post(self, function: Callable[..., object], *args: Any) -> None:
        """Call a plain function on the loop within a millisecond, without waiting for it.

        Errors are logged, because no caller waits for it.
        """
        if self._refusal is not None:
            raise ConnectionClosed(self._refusal)
        self._posts.append((function, args))
        if not self._polling:
            self._polling = True
            self._soon(self._poll)

    def _poll(self) -> None:
        if self._run_posts():
            self._loop.call_later(POLL_SECONDS, self._poll)
            return
        self._polling = False
        if self._posts:  # posted before the flag was cleared, so there is no wake-up for it
            self._polling = True
            self._loop.call_soon(self._poll)

    def _run_posts(self) -> int:
        count = len(self._posts)
        for _ in range(count):
            function, args = self._posts.popleft()
            try:
                function(*args)
            except MillstreamError as error:
                _log.warning("%s failed: %s", getattr(function, "__qualname__", function), error)
        return count

    def iterate(self, source: AsyncIterator[T], ahead: int = AHEAD_ITEMS) -> Iterator[T]:
        """The items of an asynchronous iterator, up to `ahead` of them fetched before the reader.

        They come over in chunks, because a hop between threads costs more than an item.
        """
        pump: Pump[T] | None = None
        try:
            pump = self.invoke(Pump, source, ahead)
            while chunk := self.call(pump.take()):
                yield from chunk
        finally:
            # The reader may have gone with a `break`, and the garbage collector may run this in
            # any thread: it must not wait.
            if pump is not None and self._refusal is None:
                with contextlib.suppress(RuntimeError):
                    self._loop.call_soon_threadsafe(pump.stop)

    def _check(self) -> None:
        if self._refusal is not None:
            raise ConnectionClosed(self._refusal)
        if self.is_current:
            raise ConfigError(
                "a blocking call inside the event loop of millstream.blocking would wait for "
                "itself: callbacks such as `on_drop` must be quick and make no calls"
            )

    # -- life -----------------------------------------------------------------------------

    def keep(self, client: DrainableClient) -> None:
        """Drain this client when the process ends, if it was not closed before."""
        self._clients.add(client)

    def stop(self) -> None:
        """Drain every client and end the thread, in bounded time."""
        closing = _Call(self._drain_clients())
        self._loop.call_soon_threadsafe(self._start, closing)
        closing.wait_for(EXIT_SECONDS + 2 * EXIT_TASKS_SECONDS)
        self._refusal = ENDED
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(EXIT_TASKS_SECONDS)

    async def _drain_clients(self) -> None:
        patience = {
            client: EXIT_SECONDS if client.connected else EXIT_ALONE_SECONDS
            for client in list(self._clients)
        }
        seconds = max(patience.values(), default=EXIT_ALONE_SECONDS)
        try:
            async with asyncio.timeout(seconds):
                await self._handed_over()
                ending = (client.drain(limit) for client, limit in patience.items())
                await asyncio.gather(*ending, return_exceptions=True)
        except TimeoutError:
            _log.warning("not drained in %g s: what is not confirmed may be lost", seconds)
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            if task is not None:
                task.cancel()
        if others:
            await asyncio.wait(others, timeout=EXIT_TASKS_SECONDS)

    def abandon(self) -> None:
        """In the child of a fork: the thread does not exist, and the sockets are the parent's."""
        self._refusal = (
            "this connection was opened before the process forked, and belongs to the parent: "
            "connect again in the child"
        )


_lock = threading.Lock()
_current: LoopThread | None = None
# Loops of parent processes. Collecting them would close file descriptors that are in use.
_inherited: list[LoopThread] = []


def loop_thread() -> LoopThread:
    """The one loop thread of this process, started by the first caller."""
    global _current
    with _lock:
        if _current is None:
            _current = LoopThread()
        return _current


def _after_fork_in_child() -> None:
    global _current, _lock
    _lock = threading.Lock()
    if _current is not None:
        _current.abandon()
        _inherited.append(_current)
        _current = None


def _at_exit() -> None:
    if _current is not None:
        _current.stop()


os.register_at_fork(after_in_child=_after_fork_in_child)
atexit.register(_at_exit)
