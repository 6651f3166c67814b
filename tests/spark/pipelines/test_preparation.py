"""`millstream pipeline prepare`: an archive of classes that later sessions start from."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from millstream.errors import ConfigError
from millstream.pipelines import preparation
from millstream.spark import class_archive
from millstream.spark.session import java_version

MILLSTREAM = "from millstream.cli.main import main; main()"
SESSION = """
import sys
from millstream.spark import session
spark = session("prepared", quick=True, conf={"spark.driver.extraJavaOptions": sys.argv[1]})
print(spark.range(3).count())
spark.stop()
"""


@pytest.mark.long
def test_a_prepared_spark_loads_its_classes_from_the_archive(tmp_path: Path) -> None:
    child = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    words = [sys.executable, "-c", MILLSTREAM, "pipeline", "prepare", "--json"]
    done = subprocess.run(words, env=child, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    archive = Path(found["file"])
    assert archive.parent == tmp_path / "cache" / "millstream" / "spark"
    assert archive.stat().st_size == found["bytes"] > 50_000_000
    assert not list(archive.parent.glob("new-*"))
    log = tmp_path / "classes.log"
    # Our options switch logging off; the last one of Java's options wins.
    options = f"-Xlog:class+load=info:file={log}"
    started = [sys.executable, "-c", SESSION, options]
    again = subprocess.run(started, env=child, capture_output=True, text=True, check=False)
    assert (again.returncode, again.stdout) == (0, "3\n"), again.stderr
    # Others are made at run time, such as those of Scala's functions.
    lines = [line for line in log.read_text().splitlines() if " org.apache.spark." in line]
    archived = sum("shared objects file (top)" in line for line in lines)
    assert sum("source: file:" in line for line in lines) < archived * 0.1


def test_one_process_at_a_time_prepares(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    # The lock of another open file counts as that of another process.
    with (class_archive.spark_cache() / "making.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match="another process is creating"):
            preparation.prepare_spark()


def test_a_run_that_takes_too_long_is_an_error_that_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(preparation, "SECONDS", 0.1)
    with pytest.raises(ConfigError, match="did not end within"):
        preparation.prepare_spark()


def test_a_run_that_fails_says_why_and_leaves_no_archive(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(preparation, "_PYTHON", "raise ValueError('no such luck')\n")
    with pytest.raises(ConfigError, match=r"could not be prepared: .*no such luck"):
        preparation.prepare_spark()
    assert not list(tmp_path.glob("**/*.jsa"))


def test_an_archive_is_replaced_by_a_newer_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    java = java_version()
    assert class_archive.adopt_archive(java) is None
    for text in ("old", "new"):
        class_archive.new_archive(java).write_text(text)
        adopted = class_archive.adopt_archive(java)
        assert adopted is not None
        assert adopted.read_text() == text
    assert class_archive.archive_option(java, quick=True) == (
        f"-XX:SharedArchiveFile={adopted} -Xshare:auto"
    )
