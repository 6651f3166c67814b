"""Runs a pipeline: one query for each flow, watched, restarted and stopped cleanly."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, Literal

from millstream.deadline import Deadline
from millstream.errors import FlowsFailed, MillstreamError, PipelineInvalid
from millstream.pipelines.declare import Flow, Pipeline
from millstream.pipelines.lag import LagMeter
from millstream.pipelines.outputs import PipelineTopics
from millstream.pipelines.project import Project
from millstream.pipelines.pruning_ahead import PruningAhead
from millstream.pipelines.queries import QueryPlan, start_query
from millstream.pipelines.resolve import Resolved, Resolver
from millstream.pipelines.restarts import Restarts
from millstream.pipelines.spark_errors import failure_of, reason_of
from millstream.pipelines.state_folder import StateFolder
from millstream.pipelines.watch import Watch
from millstream.spark.options import connection_settings
from millstream.spark.worker_python import is_forking

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

__all__ = ["RunSettings", "Runner", "stopped_by_signals"]

_log = logging.getLogger("millstream.pipelines")

State = Literal["waiting", "running", "restarting", "done", "failed", "skipped", "stopped"]
ENDED: Final = ("done", "failed", "skipped", "stopped")
POLL_SECONDS: Final = 0.2
# A query starts a Python process for each source, and Spark fails if one is not ready in ten
# seconds: so queries start one after the other where these processes are no forks of a prepared
# one. A query that hangs delays the next this long.
START_SECONDS: Final = 30.0
_STARTING: Final = "Initializing"  # Spark's message starts with it until the sources are ready
STATUS_SECONDS: Final = 1.0
# How long running batches may take at the end; then they are interrupted, and run again at the
# next start with the same result.
STOP_SECONDS: Final = 60.0


@dataclass(frozen=True, slots=True)
class RunSettings:
    """How a pipeline is run."""

    once: bool = False  # catch up with what is available, then end
    stop_seconds: float = STOP_SECONDS
    options: dict[str, str] = field(default_factory=dict)  # of every Millstream source and sink


@dataclass(slots=True)
class _Run:
    """One flow while the pipeline runs."""

    flow: Flow
    restarts: Restarts
    state: State = "waiting"
    query: StreamingQuery | None = None
    wait: Deadline | None = None  # until the restart
    starting: Deadline | None = None  # how long other flows wait for it to start
    error: str | None = None  # the last one, kept when the flow runs again
    failed_at: str | None = None
    seen: int | None = None  # the last completed batch when the query was started


class Runner:
    """Runs the flows of a pipeline in one Spark session until it is stopped.

    A flow that fails is started again after a growing pause while the others continue; after
    `restarts` failures in a row it stays stopped. `stop` ends every flow between two batches.
    """

    def __init__(
        self,
        project: Project,
        pipeline: Pipeline,
        spark: SparkSession,
        settings: RunSettings | None = None,
    ) -> None:
        self.project = project
        self.pipeline = pipeline
        self.settings = settings or RunSettings()
        self.state = StateFolder(project)
        self._spark = spark
        self._stopping = threading.Event()
        self._watch = Watch(project.name)
        self._runs = {
            flow.name: _Run(flow, Restarts(project.restarts)) for flow in pipeline.flows.values()
        }
        sources = {**self.settings.options, "stopFile": str(self.state.stop_file)}
        self._resolver = Resolver(pipeline, spark, project.folder, sources)
        self._resolved: Resolved | None = None
        self._pruning = PruningAhead(spark)
        self._started = datetime.now(UTC)

    # -- running --------------------------------------------------------------------------

    def run(self, shown: Callable[[dict[str, Any]], None] | None = None) -> None:
        """Run until stopped, or with `once` until all is read; FlowsFailed names failed flows.

        The caller holds the state folder: `with StateFolder(project).running()`. `shown` is called
        with the status about once a second.
        """
        with self._pruning:
            with self._topics() as topics:
                add = self._pruning.add if self.project.prune else None
                self._resolved = self._resolver.all(topics, add)
            self._spark.streams.addListener(self._watch.listener)
            try:
                with LagMeter(self._watch, connection_settings(self.settings.options)):
                    self._loop(shown)
            finally:
                self._end()
                self._spark.streams.removeListener(self._watch.listener)
                self._report("stopped", shown)
        reasons = {
            name: run.error or "" for name, run in self._runs.items() if run.state == "failed"
        }
        if reasons:
            log = self.project.spark_log
            raise FlowsFailed(self.project.name, reasons, log if log.exists() else None)

    def stop(self) -> None:
        """Ask `run` to return as soon as every flow is between two batches."""
        self._stopping.set()

    @property
    def stopping(self) -> bool:
        """Whether `stop` was called."""
        return self._stopping.is_set()

    def _loop(self, shown: Callable[[dict[str, Any]], None] | None) -> None:
        next_report = Deadline(0)
        while not self._stopping.is_set():
            for run in self._runs.values():
                self._step(run)
            if next_report.passed:
                self._report("running", shown)
                next_report = Deadline(STATUS_SECONDS)
            if all(run.state in ENDED for run in self._runs.values()):
                return
            self._stopping.wait(POLL_SECONDS)

    def _topics(self) -> PipelineTopics:
        return PipelineTopics(self.settings.options)

    # -- one flow -------------------------------------------------------------------------

    def _step(self, run: _Run) -> None:
        if run.state == "running":
            self._look_after(run)
        elif any(_is_starting(other) for other in self._runs.values()) and not is_forking(
            self._spark.sparkContext.pythonExec
        ):
            return
        elif run.state == "waiting":
            self._start_when_ready(run)
        elif run.state == "restarting" and run.wait is not None and run.wait.passed:
            self._start(run, again=True)

    def _start_when_ready(self, run: _Run) -> None:
        if self.settings.once and self._resolved is not None:
            # It must see everything that the flows it reads from write.
            above = self._resolved.reads[run.flow.name]
            before = [
                other
                for other in self._runs.values()
                if other is not run and other.flow.target in above
            ]
            if any(other.state in ("failed", "skipped") for other in before):
                run.state = "skipped"
                run.error = "a flow that it reads from has failed permanently"
                return
            if any(other.state not in ENDED for other in before):
                return
        self._start(run, again=False)

    def _start(self, run: _Run, again: bool) -> None:
        flow = run.flow
        plan = QueryPlan(
            name=self._watch.query_name(flow.name),
            folder=self.project.folder,
            checkpoint=self.state.checkpoint(flow.name),
            trigger=self.project.trigger,
            once=self.settings.once,
            options=self.settings.options,
        )
        try:
            rows = self._rows(flow, again)
            self._watch.start(flow.name, self.state.read_so_far(flow.name))
            run.seen = self._watch.batch(flow.name)
            run.query = start_query(rows, flow, self.pipeline.outputs[flow.target], plan)
        except MillstreamError as error:
            if not again:
                raise
            self._failed(run, str(error))
            return
        except Exception as error:
            # Spark refuses it: an output mode that does not fit, a sink that does not exist.
            if not again:
                reason = reason_of(str(error))
                if "output mode" in reason.lower():
                    reason = f"{reason.rstrip('.')}. Its mode is {flow.mode!r}: choose with mode="
                raise PipelineInvalid(f"the flow '{flow.name}' cannot start: {reason}") from error
            self._failed(run, str(error))
            return
        run.state, run.starting = "running", Deadline(START_SECONDS)

    def _rows(self, flow: Flow, again: bool) -> DataFrame:
        if again or self._resolved is None:
            with self._topics() as topics:
                self._resolved = self._resolver.again(flow, topics)
        return (
            self._pruning.rows(flow.name) if self.project.prune else self._resolved.flows[flow.name]
        )

    def _look_after(self, run: _Run) -> None:
        query = run.query
        if query is None:
            return
        if run.restarts.in_row and self._watch.batch(run.flow.name) not in (None, run.seen):
            run.restarts.succeeded()
        if query.isActive:
            return
        self._watch.catch_up(query)
        error = query.exception()
        if error is not None:
            self._failed(run, str(error))
        elif self.settings.once:
            run.state = "done"
        else:
            self._failed(run, "the query was stopped from outside")

    def _failed(self, run: _Run, error: str) -> None:
        failure = failure_of(error, self.project.folder)
        run.error = str(failure)
        run.failed_at = datetime.now(UTC).isoformat(timespec="seconds")
        pause = run.restarts.failed(failure.mark)
        if pause is None:
            run.state = "failed"
            _log.error("flow '%s' failed permanently: %s", run.flow.name, run.error)
            return
        run.state, run.wait = "restarting", Deadline(pause)
        _log.warning(
            "flow '%s' failed and will be restarted in %g s (%d of %d): %s",
            run.flow.name,
            pause,
            run.restarts.in_row,
            run.restarts.limit,
            run.error,
        )

    # -- the end --------------------------------------------------------------------------

    def _end(self) -> None:
        """Stop every query between two batches: sources offer no new rows, running batches end."""
        self.state.stop_file.touch()
        deadline = Deadline(self.settings.stop_seconds)
        drains = []
        for run in self._runs.values():
            if run.query is not None and run.query.isActive:
                thread = threading.Thread(target=_drain, args=(run.query,), daemon=True)
                thread.start()
                drains.append((run, thread))
            elif run.state not in ENDED:
                run.state = "stopped"
        for run, thread in drains:
            thread.join(deadline.left())
            if thread.is_alive():
                _log.warning(
                    "flow '%s' did not end its batch within %g s; it is interrupted and runs again "
                    "at the next start",
                    run.flow.name,
                    self.settings.stop_seconds,
                )
            if run.query is not None:
                run.query.stop()
                self._watch.catch_up(run.query)
            run.state = "stopped"
        self.state.stop_file.unlink(missing_ok=True)

    # -- status ---------------------------------------------------------------------------

    def status(self, state: str) -> dict[str, Any]:
        """The state of the pipeline and the numbers of each flow, as values for JSON."""
        return {
            "pipeline": self.project.name,
            "state": state,
            "once": self.settings.once,
            "master": self._spark.sparkContext.master,
            "started": self._started.isoformat(timespec="seconds"),
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "flows": [self._flow_status(run) for run in self._runs.values()],
        }

    def _flow_status(self, run: _Run) -> dict[str, Any]:
        output = self.pipeline.outputs[run.flow.target]
        return {
            "name": run.flow.name,
            "target": output.name,
            "kind": output.kind,
            "state": run.state,
            **self._watch.numbers(run.flow.name),
            "restarts": run.restarts.total,
            "last_error": run.error,
            "failed_at": run.failed_at,
        }

    def _report(self, state: str, shown: Callable[[dict[str, Any]], None] | None) -> None:
        status = self.status(state)
        self.state.write_status(status)
        if shown is not None:
            shown(status)


def _is_starting(run: _Run) -> bool:
    if run.starting is None or run.query is None:
        return False
    message = str(run.query.status["message"])
    if run.starting.passed or not run.query.isActive or not message.startswith(_STARTING):
        run.starting = None
    return run.starting is not None


def _drain(query: StreamingQuery) -> None:
    """Return when the query has ended its batch and has no new rows, or has failed."""
    try:
        query.processAllAvailable()
    except Exception as error:
        _log.info("a query failed while it was stopped: %s", reason_of(str(error)))


@contextmanager
def stopped_by_signals(runner: Runner) -> Iterator[None]:
    """While this is open, SIGINT and SIGTERM stop the runner; a second one ends the process."""

    def handle(number: int, _: object) -> None:
        if runner.stopping:
            raise KeyboardInterrupt
        runner.stop()

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)
