"""The loop thread: calls, posts, interrupts and iteration."""

from __future__ import annotations

import asyncio
import gc
import inspect
import logging
import os
import signal
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

from millstream.blocking.loop import LoopThread, loop_thread
from millstream.blocking.pump import AHEAD_ITEMS
from millstream.blocking.twin import in_thread
from millstream.deadline import Deadline
from millstream.errors import ConfigError, ConnectionClosed, NoMessage


@pytest.fixture(scope="module")
def loop() -> Iterator[LoopThread]:
    thread = LoopThread()
    yield thread
    thread.stop()


def wait_until(condition: Callable[[], object]) -> None:
    deadline = Deadline(30)
    while not condition():
        assert not deadline.passed
        threading.Event().wait(0.002)


async def answer(value: object) -> object:
    await asyncio.sleep(0)
    return value


async def fail() -> None:
    raise NoMessage("a.b", 1)


def test_a_call_gives_the_result_of_the_coroutine(loop: LoopThread) -> None:
    assert loop.call(answer(7)) == 7


def test_a_call_raises_what_the_coroutine_raised(loop: LoopThread) -> None:
    with pytest.raises(NoMessage):
        loop.call(fail())


def test_a_plain_function_runs_on_the_loop(loop: LoopThread) -> None:
    assert loop.invoke(lambda: threading.current_thread().name) == "millstream-loop"
    with pytest.raises(ZeroDivisionError):
        loop.invoke(lambda: 1 / 0)


async def test_it_works_in_a_thread_that_runs_a_loop_itself(loop: LoopThread) -> None:
    assert asyncio.get_running_loop().is_running()
    assert loop.call(answer("notebook")) == "notebook"


def test_one_thread_serves_the_process() -> None:
    assert loop_thread() is loop_thread()


def test_posts_run_in_order_and_before_a_later_call(loop: LoopThread) -> None:
    seen: list[int] = []
    for n in range(1000):
        loop.post(seen.append, n)
    assert loop.call(answer(None)) is None
    assert seen == list(range(1000))


def test_posts_run_without_any_call(loop: LoopThread) -> None:
    seen: list[int] = []
    for n in range(3):
        loop.post(seen.append, n)
        wait_until(lambda n=n: seen == list(range(n + 1)))  # type: ignore[misc]


def test_posts_of_many_threads_all_run(loop: LoopThread) -> None:
    seen: list[int] = []

    def work() -> None:
        for n in range(2000):
            loop.post(seen.append, n)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wait_until(lambda: len(seen) == 8000)


def test_a_post_that_fails_is_logged_and_stops_nothing(
    loop: LoopThread, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse() -> None:
        raise ConnectionClosed("the connection was closed")

    seen: list[int] = []
    with caplog.at_level(logging.WARNING, "millstream.blocking"):
        loop.post(refuse)
        loop.post(seen.append, 1)
        wait_until(lambda: seen == [1])
    assert "the connection was closed" in caplog.text


def test_a_call_from_the_loop_itself_is_refused_not_hung(loop: LoopThread) -> None:
    with pytest.raises(ConfigError, match="wait for itself"):
        loop.invoke(lambda: loop.call(answer(1)))


@pytest.mark.parametrize("taken_by_the_main_thread", [True, False])
def test_an_interrupt_ends_the_wait_and_cancels_the_work(
    loop: LoopThread, taken_by_the_main_thread: bool
) -> None:
    cancelled = threading.Event()
    begun = threading.Event()

    async def for_ever() -> None:
        begun.set()
        try:
            await asyncio.sleep(60)
        finally:
            cancelled.set()

    def interrupt() -> None:
        begun.wait(30)
        if taken_by_the_main_thread:
            os.kill(os.getpid(), signal.SIGINT)
        else:
            signal.pthread_kill(loop._thread.ident or 0, signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        loop.call(for_ever())
    assert cancelled.wait(30)  # the interrupt does not wait for it without end


@pytest.mark.parametrize("known", [False, True], ids=["not yet", "already"])
def test_an_interrupt_leaves_no_task_whether_or_not_the_call_has_started(
    loop: LoopThread, monkeypatch: pytest.MonkeyPatch, known: bool
) -> None:
    begun = threading.Event()

    async def for_ever() -> None:
        begun.set()
        await asyncio.Event().wait()

    hand_over = loop._loop.call_soon_threadsafe

    def interrupted(function: Callable[..., object], *args: Any) -> None:
        monkeypatch.undo()
        if known:
            hand_over(function, *args)
            assert begun.wait(30)
        raise KeyboardInterrupt

    monkeypatch.setattr(loop._loop, "call_soon_threadsafe", interrupted)
    work = for_ever()
    with pytest.raises(KeyboardInterrupt):
        loop.call(work)
    wait_until(lambda: inspect.getcoroutinestate(work) == inspect.CORO_CLOSED)
    wait_until(lambda: loop.invoke(lambda: _tasks_of(work)) == [])
    assert begun.is_set() == known


def _tasks_of(work: object) -> list[asyncio.Task[Any]]:
    return [task for task in asyncio.all_tasks() if task.get_coro() is work]


def test_a_stopped_loop_refuses_calls() -> None:
    loop = LoopThread()
    loop.stop()
    with pytest.raises(ConnectionClosed):
        loop.call(answer(1))
    with pytest.raises(ConnectionClosed):
        loop.post(print)


def test_a_loop_that_ends_after_the_check_of_a_call_refuses_it_as_well() -> None:
    loop = LoopThread()
    loop.stop()
    wait_until(loop._loop.is_closed)
    loop._refusal = None  # as the call saw it
    work = answer(1)
    with pytest.raises(ConnectionClosed):
        loop.call(work)
    assert inspect.getcoroutinestate(work) == inspect.CORO_CLOSED
    with pytest.raises(ConnectionClosed):
        loop.invoke(print)
    with pytest.raises(ConnectionClosed):
        loop.post(print)


def test_stopping_ends_the_waits_of_other_threads() -> None:
    loop = LoopThread()
    begun = threading.Event()
    errors: list[BaseException] = []

    async def for_ever() -> None:
        begun.set()
        await asyncio.Event().wait()

    def wait() -> None:
        try:
            loop.call(for_ever())
        except ConnectionClosed as error:
            errors.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    assert begun.wait(30)
    loop.stop()
    thread.join(30)
    assert len(errors) == 1


# -- iterating ----------------------------------------------------------------------------


class Source:
    """Numbers, and what became of the generator that gave them."""

    def __init__(self, count: int, error: Exception | None = None) -> None:
        self.given = 0
        self.closed = threading.Event()
        self._count = count
        self._error = error

    async def numbers(self) -> AsyncIterator[int]:
        try:
            for n in range(self._count):
                self.given += 1
                yield n
            if self._error is not None:
                raise self._error
        finally:
            self.closed.set()


@pytest.mark.parametrize("count", [0, 1, AHEAD_ITEMS - 1, AHEAD_ITEMS, 3 * AHEAD_ITEMS + 7])
def test_every_item_comes_once_and_in_order(loop: LoopThread, count: int) -> None:
    assert list(loop.iterate(Source(count).numbers())) == list(range(count))


def test_an_error_is_raised_after_the_items_before_it(loop: LoopThread) -> None:
    items = loop.iterate(Source(3, NoMessage("a", 1)).numbers())
    assert [next(items) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(NoMessage):
        next(items)


def test_the_input_is_read_ahead_only_up_to_the_limit(loop: LoopThread) -> None:
    source = Source(10_000)
    items = loop.iterate(source.numbers(), 10)
    assert next(items) == 0
    wait_until(lambda: source.given == 20)  # one chunk here, one waiting
    loop.call(asyncio.sleep(0.01))
    assert source.given == 20
    assert next(items) == 1


def test_leaving_the_loop_closes_the_source(loop: LoopThread) -> None:
    source = Source(10_000)
    for item in loop.iterate(source.numbers()):
        if item == 3:
            break
    gc.collect()
    assert source.closed.wait(30)


def test_an_item_is_not_kept_back_until_a_chunk_is_full(loop: LoopThread) -> None:
    gate = loop.invoke(asyncio.Event)

    async def slow() -> AsyncIterator[int]:
        yield 1
        await gate.wait()
        yield 2

    items = loop.iterate(slow())
    assert next(items) == 1
    loop.invoke(gate.set)
    assert list(items) == [2]


# -- handlers -----------------------------------------------------------------------------


def test_a_handler_runs_in_a_worker_thread(loop: LoopThread) -> None:
    call = in_thread(lambda n: (n, threading.current_thread().name), int)
    number, name = loop.call(_awaited(call("5")))
    assert number == 5
    assert name.startswith("millstream-handler")


def test_many_handlers_wait_at_the_same_time(loop: LoopThread) -> None:
    together = threading.Barrier(40)

    def meet(_: None) -> int:
        return together.wait(60)

    call = in_thread(meet)

    async def all_of_them() -> int:
        return len(set(await asyncio.gather(*(call(None) for _ in range(40)))))

    assert loop.call(all_of_them()) == 40


def test_a_handler_that_raises_stop_iteration_does_not_hang(loop: LoopThread) -> None:
    def empty(_: None) -> object:
        return next(iter(()))

    with pytest.raises(RuntimeError, match="StopIteration"):
        loop.call(_awaited(in_thread(empty)(None)))


def test_an_asynchronous_handler_is_refused() -> None:
    async def handler(_: object) -> None: ...

    with pytest.raises(ConfigError, match="plain"):
        in_thread(handler)


async def _awaited(work: object) -> tuple[object, str]:
    return await work  # type: ignore[misc,no-any-return]
