"""Loads a project: runs its files and collects what they declare."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from millstream.errors import MillstreamError, PipelineInvalid
from millstream.pipelines.declare import Pipeline, loading
from millstream.pipelines.project import Project
from millstream.pipelines.sdp import ActiveSession, declare_sql, declaring, spec_files

__all__ = ["load"]

FILES_MAX: Final = 1000  # of one project; more is a folder that was not meant
# How Spark reports that a session is missing, besides the plain assertions of `col` and its like.
_NO_SESSION: Final = ("SESSION_OR_CONTEXT_NOT_EXISTS", "NO_ACTIVE_OR_DEFAULT_SESSION")


class _SessionNeeded(Exception):
    """A file uses Spark at its top level, and there is no session yet."""


def load(project: Project, session: Callable[[], object] | None = None) -> Pipeline:
    """Run the project's files and return what they declare.

    Most projects load without Spark. Columns and functions of Spark at the top of a file need a
    session, SQL files need Spark's parser. `session` starts the session that runs the pipeline;
    without it, for a command that only lists the project, the least that is enough is started.
    """
    pipeline = Pipeline(project.name)
    if project.spec is not None:
        for path in spec_files(project.folder, project.spec):
            if path.suffix == ".sql":
                if session is not None:
                    session()  # its settings apply to the parser too
                declare_sql(pipeline, path.read_text(encoding="utf-8"), path, project.spark)
            else:
                names = {"spark": ActiveSession()}
                _add(pipeline, project.folder, path, session, declaring, names)
    else:
        with _importable(project.folder):
            for path in _python_files(project):
                _add(pipeline, project.folder, path, session, loading, {})
    pipeline.check()
    return pipeline


def _python_files(project: Project) -> list[Path]:
    """The files that declare the pipeline, in the order of their names."""
    found = {path for pattern in project.files for path in project.folder.glob(pattern)}
    listed = sorted(path for path in found if path.is_file() and path.suffix == ".py")
    if not listed:
        raise PipelineInvalid(
            f"the project {project.folder} has no Python files ({', '.join(project.files)})"
        )
    if len(listed) > FILES_MAX:
        raise PipelineInvalid(f"{len(listed):,} files match {', '.join(project.files)}")
    return listed


@contextmanager
def _importable(folder: Path) -> Iterator[None]:
    """While this is open, the files of a folder can import each other."""
    added = str(folder) not in sys.path
    if added:
        sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        if added:
            sys.path.remove(str(folder))


def _add(
    pipeline: Pipeline,
    folder: Path,
    path: Path,
    session: Callable[[], object] | None,
    declaring: Callable[[Pipeline], Any],
    names: Mapping[str, object],
) -> None:
    """Add what a file declares; a file that needs a session is run again once there is one."""
    before, imported = pipeline.declarations(), set(sys.modules)
    try:
        with declaring(pipeline):
            _run(path, names)
    except _SessionNeeded:
        pipeline.restore(before)
        _forget(sys.modules.keys() - imported, folder)
        (session or _small_session)()
        with declaring(pipeline):
            _run(path, names, again=True)


def _forget(modules: Iterable[str], folder: Path) -> None:
    """Let the project's own modules be imported again, because they may declare something too."""
    for name in list(modules):
        file = Path(getattr(sys.modules[name], "__file__", None) or "/")
        # A project may hold its own virtual environment, whose packages must not be loaded twice.
        if file.is_relative_to(folder) and "site-packages" not in file.parts:
            del sys.modules[name]


def _small_session() -> None:
    from millstream.spark import session

    session(master="local[1]", quick=True)


def _run(path: Path, names: Mapping[str, object], *, again: bool = False) -> None:
    name = f"millstream_pipeline_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise PipelineInvalid(f"cannot load {path}")
    module = importlib.util.module_from_spec(spec)
    module.__dict__.update(names)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except MillstreamError:
        raise
    except Exception as error:
        if not again and _is_missing_session(error):
            raise _SessionNeeded from error
        raise PipelineInvalid(f"{path.name} does not load: {_described(error, path)}") from error
    except SystemExit as error:
        raise PipelineInvalid(
            f"{path.name} does not load: it ends the process at line {_line_in(path, error)}"
        ) from error
    finally:
        # A function of a module that cannot be imported is pickled by value for Spark's workers.
        del sys.modules[name]


def _is_missing_session(error: Exception) -> bool:
    if "pyspark" not in sys.modules:
        return False
    from pyspark.errors import PySparkRuntimeError
    from pyspark.sql import SparkSession

    if SparkSession.getActiveSession() is not None:
        return False
    if isinstance(error, PySparkRuntimeError):
        return error.getCondition() in _NO_SESSION
    return isinstance(error, AssertionError) and _raised_in(error).startswith("pyspark.")


def _raised_in(error: Exception) -> str:
    """The name of the module that raised an error."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return "" if trace is None else str(trace.tb_frame.f_globals.get("__name__", ""))


def _described(error: Exception, path: Path) -> str:
    line = _line_in(path, error)
    if isinstance(error, SyntaxError):
        line = error.lineno or line
    return f"{type(error).__name__} at line {line}: {error}"


def _line_in(path: Path, error: BaseException) -> int:
    """The last line of this file on the way to an error; 0 if there is none."""
    line = 0
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == str(path):
            line = trace.tb_lineno
        trace = trace.tb_next
    return line
