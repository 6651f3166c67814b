"""A pipeline project: a folder with millstream.toml and Python files."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from millstream.errors import ConfigError
from millstream.nearest import one_of
from millstream.pipelines.declare import check_name
from millstream.pipelines.spec import Spec, read_spec, spec_file
from millstream.settings import PROJECT_FILE, find_project_file, parse_duration, project_table

__all__ = ["Project", "entered_project", "open_project"]

STATE: Final = ".pipeline"
_KEYS: Final = frozenset(
    {
        "name",
        "files",
        "state",
        "checkpoints",
        "trigger",
        "master",
        "restarts",
        "prune",
        "spark",
        "state_store",
    }
)


@dataclass(frozen=True, slots=True)
class Project:
    """A project's folder and the settings in `[pipeline]` of its millstream.toml."""

    folder: Path
    name: str
    files: tuple[str, ...] = ("*.py",)  # patterns of the Python files, relative to the folder
    state: Path = Path(STATE)  # status, lock and, by default, checkpoints
    checkpoints: str = ""  # folder or URL; on a cluster one that every node can reach
    trigger: float = 0.0  # seconds between batches; 0: as soon as there is new data
    master: str | None = None  # Spark master; None: all cores of this machine
    restarts: int = 5  # in a row, before a failing flow stays stopped
    prune: bool = True  # flows read only the columns that they use
    state_store: str = "memory"  # or "rocksdb", for state larger than memory and for timers
    spark: Mapping[str, str] = field(default_factory=dict)  # settings of the Spark session

    @property
    def spark_log(self) -> Path:
        """The file for the errors that Spark itself logs."""
        return self.state / "spark.log"

    @property
    def spec(self) -> Path | None:
        """The file that makes it a project of Spark Declarative Pipelines, if there is one."""
        return spec_file(self.folder)


def open_project(folder: Path | None = None) -> Project:
    """The project in a folder; by default the nearest one from the working directory upwards."""
    if folder is None:
        file = find_project_file()
        folder = Path.cwd() if file is None else file.parent
    folder = folder.resolve()
    if not folder.is_dir():
        raise ConfigError(f"there is no folder {folder}")
    file = folder / PROJECT_FILE
    spec = spec_file(folder)
    if not file.is_file() and spec is None:
        raise ConfigError(
            f"{folder} is not a pipeline project: it has no {PROJECT_FILE}. "
            f"Create one with 'millstream pipeline init'"
        )
    table = project_table("pipeline", file) if file.is_file() else {}
    project = _project(folder, table, str(file))
    return project if spec is None else _with_spec(project, read_spec(spec))


@contextmanager
def entered_project(folder: Path | None = None) -> Iterator[Project]:
    """A project whose code is run in here: a session that it starts is stopped at the end.

    Relative paths in its code are relative to its folder, which becomes the working directory.
    """
    from millstream.spark.session import check_pyspark, own_session

    project = open_project(folder)
    check_pyspark()
    os.chdir(project.folder)
    with own_session():
        yield project


def _with_spec(project: Project, spec: Spec) -> Project:
    """The project with the settings of its spec; for Spark, those of millstream.toml win."""
    return replace(
        project,
        name=check_name("pipeline", _as_name(spec.name or project.name)),
        spark={**spec.spark, **project.spark},
    )


def _project(folder: Path, table: Mapping[str, Any], file: str) -> Project:
    unknown = sorted(set(table) - _KEYS)
    if unknown:
        raise ConfigError(
            f"{file}: [pipeline] has no setting '{unknown[0]}': {one_of(unknown[0], _KEYS)}"
        )
    name = str(table.get("name") or _as_name(folder.name).strip("-"))
    state = folder / str(table.get("state", STATE))
    patterns = table.get("files", ["*.py"])
    restarts = table.get("restarts", 5)
    spark = table.get("spark", {})
    if not isinstance(patterns, list) or not all(isinstance(item, str) for item in patterns):
        raise ConfigError(f'{file}: [pipeline] files must be a list of patterns, such as ["*.py"]')
    if not isinstance(restarts, int) or isinstance(restarts, bool) or restarts < 0:
        raise ConfigError(f"{file}: [pipeline] restarts must be a whole number of 0 or more")
    if not isinstance(spark, dict):
        raise ConfigError(f"{file}: [pipeline.spark] must be a table of Spark settings")
    store = table.get("state_store", "memory")
    if store not in ("memory", "rocksdb"):
        raise ConfigError(f"{file}: [pipeline] state_store is memory or rocksdb, not {store!r}")
    prune = table.get("prune", True)
    if not isinstance(prune, bool):
        raise ConfigError(f"{file}: [pipeline] prune is true or false, not {prune!r}")
    master = table.get("master")
    return Project(
        folder=folder,
        name=check_name("pipeline", name),
        files=tuple(patterns),
        state=state,
        checkpoints=_checkpoints(folder, table.get("checkpoints"), state),
        trigger=_duration(file, "trigger", table.get("trigger", 0)),
        master=None if master is None else str(master),
        restarts=restarts,
        prune=prune,
        state_store=store,
        spark={key: _text(value) for key, value in _flat(spark)},
    )


def _duration(file: Path | str, key: str, value: object) -> float:
    """The seconds of a setting; a number needs a unit in a file, too."""
    try:
        return parse_duration(str(value))
    except ConfigError as error:
        raise ConfigError(f"{file}: [pipeline] {key}: {error}") from error


def _checkpoints(folder: Path, given: object, state: Path) -> str:
    if given is None:
        return str(state / "checkpoints")
    text = str(given).rstrip("/")
    return text if "://" in text else str(folder / text)


def _flat(table: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Join nested keys: TOML reads `spark.sql.x = 1` as nested tables."""
    found: list[tuple[str, Any]] = []
    for key, value in table.items():
        name = f"{prefix}{key}"
        found += _flat(value, f"{name}.") if isinstance(value, dict) else [(name, value)]
    return [(n if n.startswith("spark.") or prefix else f"spark.{n}", v) for n, v in found]


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _as_name(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9_-]+", "-", text)
