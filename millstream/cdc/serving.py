"""A capture as a service: it runs, and answers for itself on the broker."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from millstream.cdc.capture import Capture
from millstream.cdc.control import Control
from millstream.cdc.model import CaptureLag, Finding, TableShape
from millstream.cdc.settings import CaptureSettings
from millstream.cdc.settings_file import check_capture
from millstream.cdc.sources import open_source
from millstream.cdc.status import CaptureStatus
from millstream.cdc.topic_names import topic_findings
from millstream.errors import ConfigError

if TYPE_CHECKING:
    from millstream.mill import Mill

__all__ = ["check_source", "list_tables", "serve_capture", "source_lag"]

_LOOK_SECONDS: Final = 0.5  # between two looks of a watcher


async def serve_capture(
    mill: Mill,
    settings: CaptureSettings,
    stop: asyncio.Event,
    watch: Callable[[CaptureStatus], None] | None = None,
    *,
    once: bool = False,
) -> CaptureStatus:
    """Run a capture until the event is set, also by `ask_stop`; `watch` sees it twice a second.

    With `once` until it has caught up. Returns its last status. CaptureBusy if one of its name
    answers already.
    """
    capture = Capture(mill, open_source(settings), settings)
    async with Control(mill, settings.name, capture.status, stop):
        watching = asyncio.create_task(_watch(capture, watch))
        try:
            await capture.run(stop, once=once)
        finally:
            watching.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watching
    status = capture.status()
    if watch is not None:
        watch(status)
    return status


async def _watch(capture: Capture, watch: Callable[[CaptureStatus], None] | None) -> None:
    while watch is not None:
        watch(capture.status())
        await asyncio.sleep(_LOOK_SECONDS)


async def check_source(settings: CaptureSettings) -> tuple[list[Finding], list[TableShape]]:
    """What is missing for a capture, and the tables it would have; nothing is changed."""
    check_capture(settings)
    source = open_source(settings)
    try:
        await source.open()
        findings = await source.check()
        try:
            tables = await source.tables()
        except ConfigError as error:  # settings that do not fit a table
            if any(not found.ok and found.fatal for found in findings):
                return findings, []  # it is there already, or follows from what is
            return [*findings, Finding("settings", ok=False, text=str(error))], []
        return [*findings, *topic_findings(settings, tables)], tables
    finally:
        await source.close()


async def list_tables(settings: CaptureSettings) -> list[TableShape]:
    """The tables of a source that the settings choose."""
    found: Any = await _asked(settings, "tables")
    return list(found)


async def source_lag(settings: CaptureSettings) -> CaptureLag:
    """How far a capture is behind, as its source sees it; none need be running."""
    found: CaptureLag = await _asked(settings, "lag")
    return found


async def _asked(settings: CaptureSettings, question: str) -> Any:
    source = open_source(settings)
    try:
        await source.open()
        return await getattr(source, question)()
    finally:
        await source.close()
