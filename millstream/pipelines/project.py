"""A pipeline project: a folder with millstream.toml and Python files."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from millstream.errors import ConfigError, PipelineInvalid
from millstream.pipelines.declare import Pipeline, check_name, loading
from millstream.settings import PROJECT_FILE, find_project_file, parse_duration, project_table

__all__ = ["Project", "load", "open_project", "python_files"]

STATE: Final = ".pipeline"
FILES_MAX: Final = 1000  # of one project; more is a folder that was not meant
SPEC_FILES: Final = ("spark-pipeline.yml", "spark-pipeline.yaml")
_KEYS: Final = frozenset(
    {
        "name",
        "files",
        "state",
        "checkpoints",
        "trigger",
        "master",
        "restarts",
        "spark",
        "state_store",
    }
)


@dataclass(frozen=True, slots=True)
class Project:
    """Where a project is and what `[pipeline]` in its millstream.toml says."""

    folder: Path
    name: str
    files: tuple[str, ...] = ("*.py",)  # patterns of the Python files, relative to the folder
    state: Path = Path(STATE)  # status, lock and, unless said, checkpoints
    checkpoints: str = ""  # folder or address; on a cluster one that every node sees
    trigger: float = 0.0  # seconds between batches; 0: as soon as there is something
    master: str | None = None  # Spark's; None: the cores of this machine
    restarts: int = 5  # of a failing flow, one after the other, until it is given up
    state_store: str = "memory"  # or "rocksdb": for state larger than memory, and for timers
    spark: Mapping[str, str] = field(default_factory=dict)  # settings of the session

    @property
    def spec(self) -> Path | None:
        """The file that makes it a project of Spark Declarative Pipelines, if there is one."""
        found = [self.folder / name for name in SPEC_FILES if (self.folder / name).is_file()]
        return found[0] if found else None


def open_project(folder: Path | None = None) -> Project:
    """The project in a folder, or the nearest one above where we are."""
    if folder is None:
        file = find_project_file()
        folder = Path.cwd() if file is None else file.parent
    folder = folder.resolve()
    if not folder.is_dir():
        raise ConfigError(f"there is no folder {folder}")
    file = folder / PROJECT_FILE
    if not file.is_file() and not any((folder / name).is_file() for name in SPEC_FILES):
        raise ConfigError(
            f"{folder} is no pipeline project: it has no {PROJECT_FILE}. "
            f"Make one with 'millstream pipeline init'"
        )
    table = project_table("pipeline", file) if file.is_file() else {}
    project = _project(folder, table, str(file))
    if project.spec is None:
        return project
    from millstream.pipelines.sdp import open_spec

    return open_spec(project)


def _project(folder: Path, table: Mapping[str, Any], file: str) -> Project:
    unknown = sorted(set(table) - _KEYS)
    if unknown:
        raise ConfigError(
            f"{file}: [pipeline] has no setting '{unknown[0]}'; there are "
            f"{', '.join(sorted(_KEYS))}"
        )
    name = str(table.get("name") or re.sub(r"[^A-Za-z0-9_-]+", "-", folder.name).strip("-"))
    state = folder / str(table.get("state", STATE))
    patterns = table.get("files", ["*.py"])
    restarts = table.get("restarts", 5)
    spark = table.get("spark", {})
    if not isinstance(patterns, list) or not all(isinstance(item, str) for item in patterns):
        raise ConfigError(f'{file}: [pipeline] files is a list of patterns, like ["*.py"]')
    if not isinstance(restarts, int) or isinstance(restarts, bool) or restarts < 0:
        raise ConfigError(f"{file}: [pipeline] restarts is a whole number of 0 or more")
    if not isinstance(spark, dict):
        raise ConfigError(f"{file}: [pipeline.spark] is a table of Spark's settings")
    store = table.get("state_store", "memory")
    if store not in ("memory", "rocksdb"):
        raise ConfigError(f"{file}: [pipeline] state_store is memory or rocksdb, not {store!r}")
    master = table.get("master")
    return Project(
        folder=folder,
        name=check_name("pipeline", name),
        files=tuple(patterns),
        state=state,
        checkpoints=_checkpoints(folder, table.get("checkpoints"), state),
        trigger=parse_duration(table.get("trigger", 0)),
        master=None if master is None else str(master),
        restarts=restarts,
        state_store=store,
        spark={key: _text(value) for key, value in _flat(spark)},
    )


def _checkpoints(folder: Path, given: object, state: Path) -> str:
    if given is None:
        return str(state / "checkpoints")
    text = str(given).rstrip("/")
    return text if "://" in text else str(folder / text)


def _flat(table: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """TOML reads `spark.sql.x = 1` as nested tables; Spark's names have dots."""
    found: list[tuple[str, Any]] = []
    for key, value in table.items():
        name = f"{prefix}{key}"
        found += _flat(value, f"{name}.") if isinstance(value, dict) else [(name, value)]
    return [(n if n.startswith("spark.") or prefix else f"spark.{n}", v) for n, v in found]


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def python_files(project: Project) -> list[Path]:
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


def load(project: Project) -> Pipeline:
    """Run the project's files and return what they declare."""
    pipeline = Pipeline(project.name)
    added = str(project.folder) not in sys.path
    if added:  # so that files can import each other
        sys.path.insert(0, str(project.folder))
    try:
        with loading(pipeline):
            for path in python_files(project):
                _run(path)
    finally:
        if added:
            sys.path.remove(str(project.folder))
    pipeline.check()
    return pipeline


def _run(path: Path) -> None:
    name = f"millstream_pipeline_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise PipelineInvalid(f"cannot load {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except ConfigError:
        raise
    except Exception as error:
        raise PipelineInvalid(f"{path.name} does not load: {_told(error, path)}") from error
    finally:
        # A function of a module that nobody can import travels to Spark's workers by value.
        del sys.modules[name]


def _told(error: Exception, path: Path) -> str:
    line = 0
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == str(path):
            line = trace.tb_lineno
        trace = trace.tb_next
    if isinstance(error, SyntaxError):
        line = error.lineno or line
    return f"{type(error).__name__} at line {line}: {error}"
