"""The session's settings, and the errors if something is missing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from millstream.errors import ConfigError, MissingExtra
from millstream.spark import class_archive, session_settings
from millstream.spark import session as door
from millstream.spark.dataframes import topic_writer

MODULE = sys.modules[door.__module__]


def fake_java(folder: Path, text: str) -> Path:
    program = folder / "bin" / "java"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\necho '{text}' >&2\n")
    program.chmod(0o755)
    return folder


def option(java: str, quick: bool = False) -> str:
    return class_archive.archive_option(java, quick) or ""


def test_the_error_for_a_missing_pyspark_has_the_pip_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MODULE, "find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match=r"pip install 'millstream\[spark\]'"):
        door()


def test_the_error_for_a_missing_java_says_how_to_get_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="needs Java 17 or newer, and none was found"):
        MODULE.java_version()


def test_an_old_java_is_rejected(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("JAVA_HOME", str(fake_java(tmp_path, 'openjdk version "11.0.2" 2019')))
    with pytest.raises(ConfigError, match=r"17 or newer; .* says: openjdk version"):
        MODULE.java_version()


def test_a_java_that_does_not_start_is_reported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "nowhere"))
    with pytest.raises(
        ConfigError, match=r"needs Java 17 or newer, and .*/nowhere/bin/java does not start"
    ):
        MODULE.java_version()


@pytest.mark.parametrize(
    ("given", "made"),
    [
        (None, "local[*,4]"),
        ("local", "local[1,4]"),
        ("local[3]", "local[3,4]"),
        ("local[2,9]", "local[2,9]"),
        ("spark://a:7077", "spark://a:7077"),
    ],
)
def test_a_failed_task_is_tried_again_in_local_mode(given: str | None, made: str) -> None:
    assert MODULE._master(given) == made


def test_a_cluster_keeps_its_own_number_of_shuffle_partitions() -> None:
    assert session_settings("local[3,4]")["spark.sql.shuffle.partitions"] == "3"
    assert "spark.sql.shuffle.partitions" not in session_settings("spark://a:7077")


def test_importing_the_room_loads_no_pyspark() -> None:
    code = "import millstream.spark, sys; print('pyspark' in sys.modules, 'pyarrow' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


@pytest.mark.parametrize(
    ("java", "platform", "quickly"),
    [("17.0.15", "linux", True), ("21", "linux", True), ("25-ea", "linux", False),
     ("17.0.15", "darwin", False)],
)  # fmt: skip
def test_java_starts_programs_the_short_way_where_it_can(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, java: str, platform: str, quickly: bool
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(sys, "platform", platform)
    assert (MODULE.VFORK in MODULE._java_options(java, quick=True).split()) is quickly


def test_a_collector_that_the_user_chooses_is_the_only_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert MODULE._collector("-Dx=y") == "-XX:+UseParallelGC"
    assert MODULE._collector("-Dx=y -XX:+UseZGC") == ""
    monkeypatch.setenv("JAVA_TOOL_OPTIONS", "-XX:+UseG1GC")
    assert MODULE._collector("") == ""


def test_an_archive_of_classes_is_used_once_it_is_complete(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first = option("17")
    assert first.startswith("-XX:ArchiveClassesAtExit=")
    made = Path(first.partition("=")[2])
    made.write_bytes(b"x")
    assert option("17") == ""  # it may still be written
    os.utime(made, (1, 1))
    assert option("17").startswith("-XX:SharedArchiveFile=")
    assert "ArchiveClassesAtExit" in option("21")  # another Java, another archive


def test_an_archive_that_the_user_names_wins(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With two of these options Java does not start."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for given in ("-Dx=y -XX:SharedArchiveFile=mine.jsa", "-XX:ArchiveClassesAtExit=mine.jsa"):
        assert class_archive.archive_option("17", given=given) is None
    assert option("17").startswith("-XX:ArchiveClassesAtExit=")


def test_one_process_at_a_time_creates_an_archive_and_never_a_quick_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert option("17", quick=True) == ""
    code = (
        "from millstream.spark.class_archive import archive_option;"
        "print(archive_option('17'), flush=True); input()"
    )
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", code], **pipes) as other:
        assert other.stdout is not None
        assert other.stdout.readline().startswith("-XX:ArchiveClassesAtExit=")
        assert option("17") == ""
        other.kill()
    assert option("17").startswith("-XX:ArchiveClassesAtExit=")


def test_an_archive_of_replaced_jars_is_removed_and_created_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The JVM ignores it silently, and every start would be a slow one."""
    jars = tmp_path / "jars"
    jars.mkdir()
    (jars / "spark-core.jar").write_bytes(b"old")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(class_archive, "_jars", lambda: jars)
    made = Path(option("17").partition("=")[2])
    archive = made.with_name(made.name.replace("new-", "classes-").rpartition("-")[0] + ".jsa")
    archive.write_bytes(b"x")
    assert option("17").startswith("-XX:SharedArchiveFile=")
    (jars / "spark-core.jar").write_bytes(b"newer")
    assert option("17").startswith("-XX:ArchiveClassesAtExit=")
    assert not archive.exists()


def test_the_least_recently_used_archives_are_removed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    made = Path(option("17").partition("=")[2])
    for age in range(1, 9):
        old = made.with_name(f"classes-0000000{age}-00000000.jsa")
        old.write_bytes(b"x")
        os.utime(old, (10**9 - age, 10**9 - age))
    made.write_bytes(b"x")
    os.utime(made, (1, 1))
    assert option("17").startswith("-XX:SharedArchiveFile=")
    left = sorted(file.name for file in made.parent.glob("*.jsa"))
    others = [name for name in left if name.startswith("classes-0000000")]
    assert others == [f"classes-0000000{age}-00000000.jsa" for age in (1, 2, 3)]
    assert len(left) == class_archive.ARCHIVES_MAX


def test_rows_without_a_value_need_a_key() -> None:
    class Rows:
        columns = ("a", "b")

    rows: Any = Rows()
    with pytest.raises(ConfigError, match="no column 'value', only a, b"):
        topic_writer("t")(rows, 0)
