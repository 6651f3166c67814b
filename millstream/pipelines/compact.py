"""Merge small Parquet files: the same rows in files of a sensible size.

Spark's file sink lists what it wrote in `_spark_metadata`, and Spark reads only what is listed. So
the steps are, in this order:

1. write the merged files beside the old ones, hidden by a dot;
2. write the new list to `_spark_metadata.new`, and the plan of what follows to a journal;
3. rename the merged files to their visible names, replace the old list by the new one;
4. remove the old files, the old list and the journal.

After a crash the next run reads the journal: if the new list is in use it continues with 4, else
it removes the merged files, and the folder is as it was.
"""

from __future__ import annotations

import fcntl
import json
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote, urlparse

import pyarrow as pa
import pyarrow.parquet as pq

from millstream.errors import ConfigError, PipelineBusy
from millstream.pipelines.project import open_project
from millstream.pipelines.state_folder import StateFolder
from millstream.settings import find_project_file

__all__ = ["Compacted", "compact_folder"]

LOG: Final = "_spark_metadata"
HEADER: Final = "v1"  # first line of every list
HIDDEN: Final = ".joined-"  # prefix of merged files that are not in use yet
JOURNAL: Final = ".compact.json"
BATCH_ROWS: Final = 65_536  # held in memory together


@dataclass(frozen=True, slots=True)
class Compacted:
    """What was done to a folder."""

    files_before: int
    files_after: int
    rows: int
    bytes_before: int
    bytes_after: int


def compact_folder(folder: Path, size: int) -> Compacted:
    """Merge the Parquet files of a folder, each sub-folder on its own, up to about `size` bytes.

    Files that Spark wrote but never listed, because it was killed, are removed: readers that
    ignore the list would count their rows as part of the result.
    """
    folder = folder.resolve()
    if size < 1:
        raise ConfigError(f"--size {size}: must be at least one byte")
    _check_idle(folder)
    with _alone(folder):
        _finish(folder)
        listed = _listed(folder)
        _remove_unlisted(folder, listed)
        groups = _groups(folder, listed, size)
        merged: dict[Path, list[Path]] = {}
        for group in groups:
            name = f"part-{uuid.uuid4()}.snappy.parquet"
            _merge(group, group[0].with_name(HIDDEN + name))
            merged[group[0].with_name(name)] = group
        gone = {path for group in groups for path in group}
        before = _present(folder, listed)
        total = sum(path.stat().st_size for path in before)
        if groups:
            _swap(folder, merged, gone, listed)
        after = [*(path for path in before if path not in gone), *merged]
        return Compacted(
            files_before=len(before),
            files_after=len(after),
            rows=sum(pq.read_metadata(path).num_rows for path in after),
            bytes_before=total,
            bytes_after=sum(path.stat().st_size for path in after),
        )


def _check_idle(folder: Path) -> None:
    """Refuse while the project's pipeline runs, or if one of its flows streams the folder."""
    file = find_project_file(folder)
    if file is not None:
        project = open_project(file.parent)
        pid = StateFolder(project).pid()
        if pid is not None:
            raise PipelineBusy(project.name, f"process {pid}")
        reader = _follower(folder, Path(project.checkpoints))
        if reader is not None:
            raise ConfigError(
                f"the flow '{reader}' reads {folder} as a stream and would read the merged "
                f"files again. Let it read the topic that the files are written from"
            )


def _follower(folder: Path, checkpoints: Path) -> str | None:
    """The flow whose checkpoint says that it has read files of this folder."""
    inside = f"{folder.as_uri().removeprefix('file://')}/"
    # <flow>/sources/<number of the source>/<batch>: lines of JSON with the path of each file.
    for path in sorted(checkpoints.glob("*/sources/*/*")):
        if path.is_file() and not path.name.startswith("."):
            for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
                if '"path"' in line and inside in line:
                    return path.parts[len(checkpoints.parts)]
    return None


def _remove_unlisted(folder: Path, listed: dict[Path, dict[str, Any]] | None) -> None:
    """Remove what a batch wrote before its process was killed: the batch has been run again."""
    if listed is not None:
        for path in set(_present(folder, None)) - set(listed):
            path.unlink()


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    with (folder / ".compact.lock").open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"another process is compacting {folder}") from None
        yield


# -- the list of Spark's file sink ----------------------------------------------------------


def _list_files(log: Path) -> list[tuple[int, bool, Path]]:
    """The lists that Spark reads: the last complete one (`9.compact`) and those after it."""
    found = []
    for path in log.iterdir():
        number, _, kind = path.name.partition(".")
        if number.isdigit() and kind in ("", "compact"):
            found.append((int(number), kind == "compact", path))
    found.sort()
    complete = [n for n, is_complete, _ in found if is_complete]
    return [item for item in found if not complete or item[0] >= complete[-1]]


def _listed(folder: Path) -> dict[Path, dict[str, Any]] | None:
    """The files that Spark reads, with their entries; None when the folder has no list."""
    log = folder / LOG
    if not log.is_dir():
        return None
    entries: dict[Path, dict[str, Any]] = {}
    for _, _, path in _list_files(log):
        lines = path.read_text(encoding="utf-8").splitlines()
        if not lines or lines[0] != HEADER:
            raise ConfigError(f"{path} has another version than {HEADER}: nothing was changed")
        for line in lines[1:]:
            entry = json.loads(line)
            file = Path(unquote(urlparse(entry["path"]).path))
            if entry.get("action", "add") == "add":
                entries[file] = entry
            else:
                entries.pop(file, None)
    return entries


def _present(folder: Path, listed: dict[Path, dict[str, Any]] | None) -> list[Path]:
    if listed is None:
        found = (p for p in folder.rglob("*.parquet") if not _is_hidden(p.relative_to(folder)))
        return sorted(found)
    return sorted(listed)


def _is_hidden(path: Path) -> bool:
    return any(part.startswith((".", "_")) for part in path.parts)


def _groups(folder: Path, listed: dict[Path, dict[str, Any]] | None, size: int) -> list[list[Path]]:
    """Files of one folder that become one file, oldest first."""
    by_folder: dict[Path, list[Path]] = {}
    for path in _present(folder, listed):
        if path.stat().st_size < size:
            by_folder.setdefault(path.parent, []).append(path)
    groups = []
    for paths in by_folder.values():
        paths.sort(key=lambda path: (path.stat().st_mtime_ns, path.name))
        group: list[Path] = []
        total = 0
        for path in paths:
            length = path.stat().st_size
            if group and total + length > size:
                groups.append(group)
                group, total = [], 0
            group.append(path)
            total += length
        groups.append(group)
    return [group for group in groups if len(group) > 1]


def _merge(inputs: list[Path], target: Path) -> None:
    schema = pa.unify_schemas([pq.read_schema(path).remove_metadata() for path in inputs])
    metadata = pq.read_schema(inputs[-1]).metadata
    with pq.ParquetWriter(target, schema.with_metadata(metadata), compression="snappy") as writer:
        for path in inputs:
            with pq.ParquetFile(path) as file:
                for batch in file.iter_batches(BATCH_ROWS):
                    writer.write_batch(_as(batch, schema, metadata))


def _as(batch: pa.RecordBatch, schema: pa.Schema, metadata: Any) -> pa.RecordBatch:
    """The batch with every column of the schema; missing ones are null."""
    columns = [
        batch.column(field.name) if field.name in batch.schema.names
        else pa.nulls(batch.num_rows, field.type)
        for field in schema
    ]  # fmt: skip
    return pa.RecordBatch.from_arrays(columns, schema=schema.with_metadata(metadata))


# -- changing the folder --------------------------------------------------------------------


def _swap(
    folder: Path,
    merged: dict[Path, list[Path]],
    gone: set[Path],
    listed: dict[Path, dict[str, Any]] | None,
) -> None:
    log, new, old = folder / LOG, folder / f"{LOG}.new", folder / f"{LOG}.old"
    if listed is not None:
        kept = [entry for path, entry in listed.items() if path not in gone]
        kept += [_entry(path, listed) for path in merged]
        shutil.copytree(log, new)
        # The first list that Spark reads has all entries, those after it are empty. They stay,
        # because their numbers are the batches that Spark considers written.
        for index, (_, _, path) in enumerate(_list_files(new)):
            lines = [HEADER, *(json.dumps(entry) for entry in kept)] if index == 0 else [HEADER]
            path.write_text("\n".join(lines), encoding="utf-8")
            path.with_name(f".{path.name}.crc").unlink(missing_ok=True)
    plan = {"joined": [str(path) for path in merged], "gone": [str(path) for path in gone]}
    (folder / JOURNAL).write_text(json.dumps(plan), encoding="utf-8")
    for path in merged:
        path.with_name(HIDDEN + path.name).replace(path)
    if listed is not None:
        log.rename(old)
        new.rename(log)
    _clear(folder, [*map(Path, plan["gone"])])


def _entry(path: Path, listed: dict[Path, dict[str, Any]]) -> dict[str, Any]:
    like = next(iter(listed.values()))
    hidden = path.with_name(HIDDEN + path.name).stat()
    parent = str(like["path"]).partition("://")[0]
    address = path.absolute().as_uri() if parent == "file" else f"file:{path.absolute()}"
    return {
        **like,
        "path": address,
        "size": hidden.st_size,
        "modificationTime": hidden.st_mtime_ns // 1_000_000,
        "action": "add",
    }


def _clear(folder: Path, files: list[Path]) -> None:
    for path in files:
        path.unlink(missing_ok=True)
    shutil.rmtree(folder / f"{LOG}.old", ignore_errors=True)
    (folder / JOURNAL).unlink(missing_ok=True)


def _finish(folder: Path) -> None:
    """Complete or undo what an interrupted run has started."""
    log, new, old = folder / LOG, folder / f"{LOG}.new", folder / f"{LOG}.old"
    if old.is_dir() and not log.is_dir():
        old.rename(log)
    if (folder / JOURNAL).exists():
        plan = json.loads((folder / JOURNAL).read_text(encoding="utf-8"))
        merged, gone = [*map(Path, plan["joined"])], [*map(Path, plan["gone"])]
        listed = _listed(folder)
        in_use = all(path.exists() for path in merged) if listed is None else merged[0] in listed
        _clear(folder, gone if in_use else merged)
    shutil.rmtree(new, ignore_errors=True)
    for path in folder.rglob(f"{HIDDEN}*"):
        path.unlink()
