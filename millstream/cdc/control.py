"""How a running capture is asked and stopped, from any machine that reaches the broker.

It is a service of the broker with two endpoints, `_cdc.NAME.status` and `_cdc.NAME.stop`; no topic
has such subjects, because no topic's name begins with '_'.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from millstream.cdc.status import CaptureStatus
from millstream.closing import AsyncClosing
from millstream.deadline import Deadline
from millstream.errors import (
    CaptureBusy,
    CaptureError,
    CaptureNotRunning,
    NoResponders,
    RequestTimeout,
)
from millstream.version import __version__

if TYPE_CHECKING:
    from millstream.messaging import Message
    from millstream.mill import Mill

__all__ = ["Control", "ask_status", "ask_stop"]

_ASK_SECONDS: Final = 5.0  # for an answer: a capture is busy for milliseconds at a time
_STOP_POLL: Final = 0.05  # seconds between questions whether it still runs


class Control(AsyncClosing):
    """Answers for a running capture while `async with` lasts; CaptureBusy if another one does."""

    def __init__(
        self,
        mill: Mill,
        name: str,
        status: Callable[[], CaptureStatus],
        stop: asyncio.Event,
    ) -> None:
        self._mill, self._name = mill, name
        self._service = mill.service(
            f"cdc-{name}", __version__, description=f"capture '{name}' of a database"
        )

        def tell_status(_message: Message) -> dict[str, object]:
            return status().to_json()

        def tell_stop(_message: Message) -> dict[str, object]:
            stop.set()
            return {"name": name, "stopping": True}

        self._service.endpoint(_subject(name, "status"), name="status")(tell_status)
        self._service.endpoint(_subject(name, "stop"), name="stop")(tell_stop)

    async def _enter(self) -> None:
        # Friendlier than the fence of the writers, which is what keeps two of them apart.
        with contextlib.suppress(CaptureNotRunning, RequestTimeout):
            await ask_status(self._mill, self._name)
            raise CaptureBusy(self._name)
        await self._service.start()

    async def _leave(self, error: BaseException | None) -> None:
        await self._service.stop()


async def ask_status(mill: Mill, name: str) -> CaptureStatus:
    """What a running capture says about itself; CaptureNotRunning if none answers."""
    try:
        answer = await mill.request(_subject(name, "status"), timeout=_ASK_SECONDS)
    except NoResponders as error:
        raise CaptureNotRunning(name) from error
    return CaptureStatus.from_json(answer.json())


async def ask_stop(mill: Mill, name: str, timeout: float = 60.0) -> None:
    """Stop a running capture and return when it has stored what it had; else CaptureError."""
    deadline = Deadline(timeout)
    try:
        await mill.request(_subject(name, "stop"), timeout=_ASK_SECONDS)
    except NoResponders as error:
        raise CaptureNotRunning(name) from error
    while not deadline.passed:
        try:
            await mill.request(_subject(name, "status"), timeout=deadline.left(_ASK_SECONDS))
        except NoResponders:
            return
        except RequestTimeout:
            continue
        await asyncio.sleep(deadline.left(_STOP_POLL))
    raise CaptureError(
        f"the capture '{name}' was asked to stop and still runs after {timeout:g} s: "
        f"see 'millstream cdc status'"
    )


def _subject(name: str, endpoint: str) -> str:
    return f"_cdc.{name}.{endpoint}"
