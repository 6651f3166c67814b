"""The guards of all guarded topics of an account, as the broker runs them."""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from millstream.closing import AsyncClosing
from millstream.errors import MillstreamError, TopicNotFound
from millstream.guarded import GUARDED_TOKEN
from millstream.messaging import Client
from millstream.messaging.topics.lookup import open_topic
from millstream.messaging.topics.stream_config import identity_of
from millstream.schemas.registry.guard import Guard

__all__ = ["Guards"]

_log = logging.getLogger("millstream.schemas")

LOOK_SECONDS: Final = 0.5  # between looks for new and deleted topics
# A guard that cannot be opened is tried at every look, and reported once in this many.
REPORT_EACH: Final = 120


class _Running:
    """A guard, and the creation time of its topic: one of the same name may follow."""

    def __init__(self, guard: Guard, created: object) -> None:
        self.guard, self.created = guard, created
        self.run = asyncio.create_task(guard.run())


class Guards(AsyncClosing):
    """Runs a guard for every guarded topic, also for those that are created later."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._running: dict[str, _Running] = {}
        self._failed: dict[str, int] = {}  # topics that cannot be guarded, and how often

    async def _leave(self, error: BaseException | None) -> None:
        for name in list(self._running):
            await self._close(name)

    async def run(self) -> None:
        """Follow the topics of the account until cancelled."""
        while True:
            try:
                await self._look()
            except MillstreamError as error:
                self._report("", f"the guarded topics are not known now: {error}")
            else:
                self._failed.pop("", None)
            await asyncio.sleep(LOOK_SECONDS)

    async def _look(self) -> None:
        configs = await self._client.jetstream.stream_configs(f"{GUARDED_TOKEN}.>")
        named = [identity_of(config) for config in configs if config.get("subjects")]
        wanted = {identity.topic for identity in named if identity.managed}
        for name in wanted | self._running.keys():
            try:
                await self._keep(name)
            except TopicNotFound:
                await self._close(name)
            except MillstreamError as error:
                self._report(name, f"topic '{name}' is not guarded now: {error}")
            else:
                self._failed.pop(name, None)

    async def _keep(self, name: str) -> None:
        """Have a guard of the topic running; TopicNotFound if it has been deleted."""
        info = await open_topic(self._client.jetstream, name)
        known = self._running.get(name)
        if known is not None and (known.run.done() or known.created != info.created):
            await self._close(name)
            known = None
        if known is None:
            guard = await Guard(self._client, name).open()
            self._running[name] = _Running(guard, info.created)
            _log.info("guarding topic '%s'", name)

    async def _close(self, name: str) -> None:
        known = self._running.pop(name, None)
        if known is None:
            return
        known.run.cancel()
        ended = await asyncio.gather(known.run, return_exceptions=True)
        if isinstance(ended[0], Exception):
            _log.warning("the guard of topic '%s' ended: %s", name, ended[0])
        await known.guard.close()

    def _report(self, name: str, text: str) -> None:
        count = self._failed.get(name, 0)
        self._failed[name] = count + 1
        if count % REPORT_EACH == 0:
            _log.warning("%s", text)
