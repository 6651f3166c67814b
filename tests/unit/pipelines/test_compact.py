"""Merging Parquet files: same rows, fewer files, safe to interrupt."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from millstream.errors import PipelineBusy
from millstream.pipelines import compact as module
from millstream.pipelines import open_project
from millstream.pipelines.compact import compact_folder
from millstream.pipelines.state_folder import StateFolder

LARGE = 1 << 30


def write(folder: Path, number: int, listed: bool = True) -> Path:
    path = folder / f"part-{number}.parquet"
    pq.write_table(pa.table({"n": [number, number + 100], "s": ["a", None]}), path)
    log = folder / "_spark_metadata"
    if listed:
        log.mkdir(exist_ok=True)
        entry = {"path": f"file://{path}", "size": path.stat().st_size, "action": "add"}
        (log / str(number)).write_text("v1\n" + json.dumps(entry))
    return path


def rows(folder: Path) -> list[int]:
    files = [p for p in folder.rglob("*.parquet") if not p.name.startswith(".")]
    return sorted(n for p in files for n in pq.read_table(p)["n"].to_pylist())


def listed(folder: Path) -> list[str]:
    found = module._listed(folder)
    return [] if found is None else sorted(path.name for path in found)


def test_small_files_become_one_and_the_list_follows(tmp_path: Path) -> None:
    for number in range(5):
        write(tmp_path, number)
    before = rows(tmp_path)
    done = compact_folder(tmp_path, LARGE)
    assert (done.files_before, done.files_after, done.rows) == (5, 1, 10)
    assert rows(tmp_path) == before
    assert listed(tmp_path) == [p.name for p in tmp_path.glob("*.parquet")]
    names = sorted(p.name for p in (tmp_path / "_spark_metadata").iterdir())
    assert names == ["0", "1", "2", "3", "4"]  # the written batches stay written


def test_files_stay_below_the_size_asked_for(tmp_path: Path) -> None:
    size = 2 * write(tmp_path, 0).stat().st_size + 10
    for number in range(1, 6):
        write(tmp_path, number)
    assert compact_folder(tmp_path, size).files_after == 3


def test_files_that_were_never_listed_are_removed(tmp_path: Path) -> None:
    write(tmp_path, 0)
    write(tmp_path, 1, listed=False)
    compact_folder(tmp_path, LARGE)
    assert rows(tmp_path) == [0, 100]


def test_a_folder_without_a_list_is_merged_one_sub_folder_at_a_time(tmp_path: Path) -> None:
    for day in ("day=1", "day=2"):
        (tmp_path / day).mkdir()
        for number in range(3):
            write(tmp_path / day, number, listed=False)
    done = compact_folder(tmp_path, LARGE)
    assert (done.files_before, done.files_after) == (6, 2)
    assert {p.parent.name for p in tmp_path.rglob("*.parquet")} == {"day=1", "day=2"}


@pytest.mark.parametrize("step", ["new.rename", "unlink"])
def test_an_interrupted_run_is_undone_or_completed_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    for number in range(4):
        write(tmp_path, number)
    before = rows(tmp_path)

    def cut_off(self: Path, *_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        if step == "unlink":
            patch.setattr(module, "_clear", cut_off)
        else:
            rename = Path.rename
            patch.setattr(
                Path,
                "rename",
                lambda self, to: cut_off(self) if self.suffix == ".new" else rename(self, to),
            )
        with pytest.raises(KeyboardInterrupt):
            compact_folder(tmp_path, LARGE)
    done = compact_folder(tmp_path, LARGE)
    assert rows(tmp_path) == before
    assert done.rows == len(before)
    assert len(listed(tmp_path)) == len(list(tmp_path.glob("*.parquet"))) == 1
    assert not list(tmp_path.glob(".joined-*"))


def test_nothing_is_merged_while_the_pipeline_runs(tmp_path: Path) -> None:
    (tmp_path / "millstream.toml").write_text("[pipeline]\n")
    folder = tmp_path / "data"
    folder.mkdir()
    write(folder, 0)
    with StateFolder(open_project(tmp_path)).running(), pytest.raises(PipelineBusy):
        compact_folder(folder, LARGE)
