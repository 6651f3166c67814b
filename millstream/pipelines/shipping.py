"""Ships code to where Spark runs it: to executors, or in a package for spark-submit."""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Final

from millstream.errors import ConfigError
from millstream.pipelines.project import Project

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["is_local", "package", "ship", "ship_project"]

MAIN: Final = "main.py"
ARCHIVE: Final = "pipeline.zip"
_FIXED_DATE: Final = (1980, 1, 1, 0, 0, 0)  # the same content makes the same archive
_SKIPPED: Final = frozenset({"__pycache__", ".git", ".venv", ".pipeline", ".millstream", "dist"})

_MAIN_TEXT: Final = '''\
"""Runs the pipeline '{name}': spark-submit --py-files pipeline.zip main.py [--once]"""

import sys

from millstream.pipelines.submitted import run_submitted

run_submitted({name!r}, sys.argv[1:])
'''


def is_local(master: str) -> bool:
    """Whether all of Spark runs in this machine's driver process."""
    return re.match(r"local(\[|$)", master) is not None


def ship(spark: SparkSession, project: Project) -> None:
    """Send the project's modules to executors and, on a cluster, this installed package too.

    Its dependencies (pyarrow, msgspec) must be installed where executors run.
    """
    package = None
    if not is_local(spark.sparkContext.master or ""):
        package = _add(spark, "millstream", _package_files())
    ship_project(spark, project, package)


def ship_project(spark: SparkSession, project: Project, package: Path | None = None) -> None:
    """Send the project's modules to executors that already have this package.

    `package` is the archive on the driver that they have it from.
    """
    from millstream.spark.datasource import MillstreamDataSource

    if package is not None:
        # Spark's planner processes on the driver do not get the files of the session.
        found = spark.sparkContext.environment
        found["PYTHONPATH"] = os.pathsep.join(filter(None, [str(package), found.get("PYTHONPATH")]))
    _add(spark, "project", _project_files(project))
    # A data source found by its installed name would have to be installed on executors too.
    spark.dataSource.register(MillstreamDataSource)


def _add(spark: SparkSession, name: str, files: dict[str, Path]) -> Path:
    """Put an archive of these files on the executors' path; returns its path here.

    Its name depends on its content: a session takes only one file of each name.
    """
    folder = Path(tempfile.mkdtemp(prefix="millstream-"))
    draft = _write(folder / "draft.zip", files)
    digest = hashlib.sha256(draft.read_bytes()).hexdigest()[:16]
    archive = draft.rename(folder / f"{name}-{digest}.zip")
    spark.sparkContext.addPyFile(str(archive))
    return archive


def package(project: Project, folder: Path) -> list[Path]:
    """Write what spark-submit needs: main.py, and pipeline.zip with the project and Millstream."""
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder} is a file; name a folder")
    folder.mkdir(parents=True, exist_ok=True)
    inside = {f"millstream_project/{name}": path for name, path in _all_files(project).items()}
    archive = _write(folder / ARCHIVE, {**_package_files(), **inside})
    main = folder / MAIN
    main.write_text(_MAIN_TEXT.format(name=project.name), encoding="utf-8")
    return [main, archive]


def _write(archive: Path, files: dict[str, Path]) -> Path:
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as target:
        for name, path in sorted(files.items()):
            info = zipfile.ZipInfo(name, _FIXED_DATE)
            info.compress_type = zipfile.ZIP_DEFLATED
            target.writestr(info, path.read_bytes())
    return archive


def _package_files() -> dict[str, Path]:
    import millstream

    root = Path(millstream.__file__).parent
    # The names of lazy packages are in their stubs.
    files = [*root.rglob("*.py"), *root.rglob("*.pyi")]
    found = {f"millstream/{path.relative_to(root)}": path for path in files}
    door = root.parent / "pyspark_millstream.py"
    return {**found, **({door.name: door} if door.is_file() else {})}


def _project_files(project: Project) -> dict[str, Path]:
    return {n: p for n, p in _all_files(project).items() if p.suffix == ".py"}


def _all_files(project: Project) -> dict[str, Path]:
    kinds = (".py", ".sql", ".toml", ".yml", ".yaml")
    return {
        str(path.relative_to(project.folder)): path
        for path in project.folder.rglob("*")
        if path.suffix in kinds
        and path.is_file()
        and not _SKIPPED & set(path.relative_to(project.folder).parts)
    }
