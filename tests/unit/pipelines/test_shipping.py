"""The archive that executors and spark-submit get."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from millstream.pipelines import Project
from millstream.pipelines.shipping import package

IMPORT = """
import sys

sys.path.insert(0, "./dist/pipeline.zip")  # relative, as on executors

import millstream
import millstream.blocking
import millstream.pipelines.submitted
import millstream.schemas
import millstream.spark.datasource

print(millstream.__file__, millstream.Mill.__name__, millstream.schemas.Schema.__name__)
"""


def test_the_package_works_from_its_archive(tmp_path: Path) -> None:
    (tmp_path / "millstream.toml").write_text("[pipeline]\n")
    package(Project(tmp_path, "p"), tmp_path / "dist")
    done = subprocess.run(
        [sys.executable, "-c", IMPORT],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["./dist/pipeline.zip/millstream/__init__.py", "Mill", "Schema"]
