"""Keeps the lag of flows up to date during batches: Spark reports progress only between them."""

from __future__ import annotations

import logging
import threading
from datetime import UTC, datetime
from typing import Final

from millstream.closing import Closing
from millstream.errors import MillstreamError
from millstream.pipelines.watch import Watch
from millstream.settings import ConnectionSettings
from millstream.spark.options import SourceOptions
from millstream.spark.source.partitions import find_partitions
from millstream.wire.sync.connection import BlockingConnection, BlockingJetStream

__all__ = ["LagMeter"]

_log = logging.getLogger("millstream.pipelines")
EVERY_SECONDS: Final = 1.0


class LagMeter(Closing):
    """Asks the broker, on its own thread, for the ends of the topics that flows read.

    While the broker cannot be reached the last known lag stays.
    """

    def __init__(self, watch: Watch, settings: ConnectionSettings) -> None:
        self._watch = watch
        self._settings = settings
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="millstream-lag", daemon=True)

    def _enter(self) -> None:
        self._thread.start()

    def _leave(self, error: BaseException | None) -> None:
        self._stop.set()

    def _run(self) -> None:
        connection = BlockingConnection(self._settings)
        jetstream = BlockingJetStream(connection)
        try:
            while not self._stop.wait(EVERY_SECONDS):
                topics = tuple(sorted(self._watch.topics()))
                if topics:
                    self._measure(jetstream, topics)
        finally:
            connection.close()

    def _measure(self, jetstream: BlockingJetStream, topics: tuple[str, ...]) -> None:
        asked = datetime.now(UTC)
        try:
            states = find_partitions(jetstream, SourceOptions(topics=topics))
        except MillstreamError as error:
            _log.debug("cannot measure the lag: %s", error)
            return
        self._watch.measure({key: state.next for key, state in states.items()}, asked)
