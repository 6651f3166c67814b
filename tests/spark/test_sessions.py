"""Other sessions find the format automatically: plain, spark-submit, Spark Connect."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pyspark
import pytest

from tests.spark.conftest import Account

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).parent / "found_automatically.py"
SUBMIT = Path(pyspark.__file__).parent / "bin" / "spark-submit"


@pytest.mark.parametrize("kind", ["plain", "submit", "connect"])
def test_the_format_is_found_without_registration(
    account: Account, tmp_path: Path, kind: str
) -> None:
    if kind == "connect":
        pytest.importorskip("grpc_status", reason="Spark Connect needs grpcio-status")
    account.topic("source")
    account.topic(f"copy-{kind}")
    account.publish("source", [b"a", b"b", b"c"])
    # Spark Connect then listens on a free port, and not on the one that another test may use.
    testing = {"SPARK_TESTING": "1"} if kind == "connect" else {}
    program = [str(SUBMIT), "--master", "local[1]"] if kind == "submit" else [sys.executable]
    done = subprocess.run(
        [*program, str(SCRIPT), account.url, kind, str(tmp_path / "checkpoint")],
        # What installing the package does: it is on the path of every Python that Spark starts.
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYSPARK_PYTHON": sys.executable,
             "SPARK_LOCAL_IP": "127.0.0.1", **testing},
        cwd=tmp_path, capture_output=True, text=True, timeout=500, check=False,
    )  # fmt: skip
    lines = [line for line in done.stdout.splitlines() if line.startswith("found ")]
    assert done.returncode == 0, done.stderr[-3000:]
    module = "pyspark.sql.connect.session" if kind == "connect" else "pyspark.sql.session"
    assert lines == [f"found {module} a b c"]
