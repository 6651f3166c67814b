"""Listens to Spark's reports about queries and keeps the numbers of each flow."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from pyspark.sql.streaming.listener import StreamingQueryListener

from millstream.pipelines.progress import Numbers, note_checkpoint, note_latest, note_progress

if TYPE_CHECKING:
    from pyspark.sql.streaming.query import StreamingQuery

__all__ = ["Watch"]


class Watch:
    """The numbers of a pipeline's flows, by name. Spark reports on threads of its own."""

    def __init__(self, pipeline: str) -> None:
        self._prefix = f"{pipeline}."
        self._lock = threading.Lock()
        self._numbers: dict[str, Numbers] = {}
        self._seen: dict[str, tuple[str, str]] = {}  # flow: run and time of the last report
        self.listener = _Listener(self)

    def query_name(self, flow: str) -> str:
        """The name of a flow's query."""
        return self._prefix + flow

    def numbers(self, flow: str) -> dict[str, Any]:
        """The numbers of a flow now."""
        with self._lock:
            found = asdict(self._numbers.get(flow, Numbers()))
        del found["messages_in"], found["ends"]
        return found

    def batch(self, flow: str) -> int | None:
        """The last batch that a flow completed in this process."""
        with self._lock:
            return self._numbers.get(flow, Numbers()).batch

    def topics(self) -> set[str]:
        """The topics that flows have read from so far."""
        with self._lock:
            return {topic for n in self._numbers.values() for end in n.ends for topic in end}

    def measure(self, latest: Mapping[tuple[str, int], int], asked: datetime) -> None:
        """Measure every flow's lag against the ends of the partitions at the time `asked`."""
        with self._lock:
            for numbers in self._numbers.values():
                if numbers.ends:
                    note_latest(numbers, latest, datetime.now(UTC))
                    numbers.lag_time = asked.isoformat(timespec="milliseconds")

    def start(self, flow: str, offsets: Sequence[str]) -> None:
        """Take over how far a flow had read when this process started it."""
        with self._lock:
            numbers = self._numbers.setdefault(flow, Numbers())
            if not numbers.ends:
                note_checkpoint(numbers, offsets)

    def note(self, query: str | None, report: dict[str, Any]) -> None:
        """Take a report about a query; queries of others are ignored."""
        if query is None or not query.startswith(self._prefix):
            return
        flow = query.removeprefix(self._prefix)
        moment = (str(report.get("runId")), str(report.get("timestamp")))
        with self._lock:
            before = self._seen.get(flow, ("", ""))
            if before[0] == moment[0] and before[1] >= moment[1]:
                return
            self._seen[flow] = moment
            numbers = self._numbers.setdefault(flow, Numbers())
            note_progress(numbers, report, datetime.now(UTC))

    def catch_up(self, query: StreamingQuery) -> None:
        """Take the reports of a query that has ended: the listener may have missed the last."""
        try:
            reports = query.recentProgress
        except TypeError:
            return  # PySpark raises it for a query that failed before its first report
        for progress in reports:
            self.note(progress.name, json.loads(progress.json))

    def idle(self, query: str | None) -> None:
        """A query found nothing new."""
        if query is not None:
            with self._lock:
                numbers = self._numbers.get(query.removeprefix(self._prefix))
                if numbers is not None:
                    numbers.rows_in_per_second = numbers.rows_out_per_second = 0.0


class _Listener(StreamingQueryListener):
    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._names: dict[str, str | None] = {}  # by id of the query

    def onQueryStarted(self, event: Any) -> None:  # noqa: N802
        self._names[str(event.id)] = event.name

    def onQueryProgress(self, event: Any) -> None:  # noqa: N802
        self._watch.note(event.progress.name, json.loads(event.progress.json))

    def onQueryIdle(self, event: Any) -> None:  # noqa: N802
        self._watch.idle(self._names.get(str(event.id)))

    def onQueryTerminated(self, event: Any) -> None:  # noqa: N802
        self._watch.idle(self._names.pop(str(event.id), None))
