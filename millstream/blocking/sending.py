"""Sending events one by one without a thread switch for each."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Sized
from itertools import islice
from typing import Any, Final, Generic, ParamSpec, TypeVar

from millstream.blocking.loop import LoopThread
from millstream.blocking.twin import ContextTwin
from millstream.closing import AsyncClosing, leave
from millstream.errors import ConnectionClosed

__all__ = ["Pending", "Sending"]

P = ParamSpec("P")
T = TypeVar("T")

# Events waiting for the loop; beyond that the sender waits. Enough to make a thread switch cheap.
WAITING_MAX: Final = 1024
# Events of a generator that are handed over together.
LOT_EVENTS: Final = 5000
# A busy sender must yield to the other tasks of the loop.
YIELD_EVENTS: Final = 256

_Send = tuple[Callable[..., Awaitable[Any]], tuple[Any, ...], dict[str, Any], "Pending[Any] | None"]


class Pending(Generic[T]):
    """The receipt of an event that was sent and perhaps not stored yet."""

    __slots__ = ("_sender", "future")

    def __init__(self, sender: Sending) -> None:
        self._sender = sender
        self.future: asyncio.Future[T] | None = None  # when it is handed over

    def done(self) -> bool:
        """Whether it is stored or refused."""
        return self._sender._error is not None if self.future is None else self.future.done()

    def result(self, timeout: float | None = None) -> T:
        """The receipt, or the error that refused it; TimeoutError after `timeout` seconds."""
        return self._sender._wait_for(self, timeout)


class Sending(ContextTwin):
    """A blocking object whose events go to the loop in groups, in order.

    So `send` returns before the event is checked. When one is refused (a bad key, a closed
    connection), later ones are not sent either, and the next call raises the error; whatever
    `flush` or the end of `with` has not confirmed counts as not sent.
    """

    __slots__ = ("_error", "_flag", "_runs", "_waiters", "_waiting")

    _inner: AsyncClosing

    def __init__(self, loop: LoopThread, inner: AsyncClosing) -> None:
        super().__init__(loop, inner)
        self._waiting: deque[_Send] = deque()
        self._runs = False  # a task of the loop works on what waits, or is about to
        self._flag = threading.Lock()  # held while `_runs` becomes true: one caller starts the task
        self._waiters: list[asyncio.Future[None]] = []
        self._error: Exception | None = None

    # -- in the caller's thread -----------------------------------------------------------

    def _send(
        self, send: Callable[P, Awaitable[object]], *args: P.args, **kwargs: P.kwargs
    ) -> None:
        self._put((send, args, kwargs, None))

    def _send_pending(
        self, send: Callable[P, Awaitable[asyncio.Future[T]]], *args: P.args, **kwargs: P.kwargs
    ) -> Pending[T]:
        pending: Pending[T] = Pending(self)
        self._put((send, args, kwargs, pending))
        return pending

    def _send_lots(
        self,
        send: Callable[..., Coroutine[Any, Any, None]],
        values: Iterable[Any],
        keys: Iterable[Any] | None = None,
        *,
        key: str | None = None,
    ) -> None:
        """Send many events. A generator runs in this thread: it may block, and need not end."""
        if not isinstance(values, Iterator):
            if isinstance(keys, Iterator) and isinstance(values, Sized):
                keys = list(islice(keys, len(values) + 1))  # one too many is an error
            self._after(send, values, keys, key=key)
            return
        left = None if keys is None else iter(keys)
        while True:
            some = list(islice(values, LOT_EVENTS))
            given = None if left is None else list(islice(left, len(some) or 1))
            self._after(send, some, given, key=key)  # keys that are left over are an error too
            if not some:
                return

    def _put(self, send: _Send) -> None:
        if self._error is not None:
            raise self._error
        if len(self._waiting) >= WAITING_MAX:
            self._loop.call(self._sent())
        self._waiting.append(send)
        if not self._runs and self._claim():
            self._loop.post(self._start)

    def _claim(self) -> bool:
        """Whether the caller has to start the task."""
        with self._flag:
            if self._runs:
                return False
            self._runs = True
            return True

    def _after(
        self, call: Callable[P, Coroutine[Any, Any, T]], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Call this after all events so far are handed over."""

        async def both() -> T:
            await self._sent()
            return await call(*args, **kwargs)

        return self._loop.call(both())

    def _end(
        self, call: Callable[P, Coroutine[Any, Any, None]], *args: P.args, **kwargs: P.kwargs
    ) -> None:
        """Like `_after`, but also when an event was refused; that error is raised in the end."""

        async def both() -> None:
            refused = await self._refused()
            try:
                await call(*args, **kwargs)
            finally:
                if refused is not None:
                    raise refused

        self._loop.call(both())

    def _wait_for(self, pending: Pending[T], timeout: float | None) -> T:
        return self._loop.call(asyncio.wait_for(self._receipt(pending), timeout))

    def _look(self, read: Callable[[], T]) -> T:
        """Read this after all events so far are handed over."""

        async def look() -> T:
            await self._sent()
            return read()

        return self._loop.call(look())

    def _leave(self, error: BaseException | None) -> None:
        self._loop.call(self._close(error))

    # -- on the loop ----------------------------------------------------------------------

    def _start(self) -> None:
        task = asyncio.get_running_loop().create_task(self._work())
        self._loop.senders.add(task)
        task.add_done_callback(self._loop.senders.discard)

    async def _work(self) -> None:
        done = 0
        while True:
            try:
                while self._waiting and self._error is None:
                    send, args, kwargs, pending = self._waiting.popleft()
                    result = await send(*args, **kwargs)
                    if pending is not None:
                        pending.future = result
                    done += 1
                    if done % YIELD_EVENTS == 0:
                        await asyncio.sleep(0)
            except Exception as error:
                self._error = error
            if self._error is not None:
                self._waiting.clear()
            self._runs = False
            # Events added before the flag was cleared must be sent by this task.
            if not self._waiting or not self._claim():
                break
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def _receipt(self, pending: Pending[T]) -> T:
        while pending.future is None and self._error is None:
            await self._sent()
        if pending.future is not None:
            return await asyncio.shield(pending.future)
        raise ConnectionClosed(f"not sent: {self._error}") from self._error

    async def _sent(self) -> None:
        while self._runs:
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            await waiter
        if self._error is not None:
            raise self._error

    async def _refused(self) -> Exception | None:
        """Why an event was refused, once everything is handed over."""
        try:
            await self._sent()
        except Exception as error:
            return error
        return None

    async def _close(self, error: BaseException | None) -> None:
        refused = await self._refused()
        if refused is not None and error is None:
            with contextlib.suppress(Exception):  # the first error says why
                await leave(self._inner, refused)
            raise refused
        await leave(self._inner, error)
