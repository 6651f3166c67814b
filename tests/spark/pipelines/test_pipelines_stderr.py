"""What `millstream pipeline` prints on stderr, all of it: nothing, or one sentence."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from millstream.cli.exits import Exit
from tests.spark.pipelines.project_kit import HEAD, PATIENCE_SECONDS, QUICK, alive_in, wait_for

if TYPE_CHECKING:
    from tests.spark.conftest import Account

MAIN = "from millstream.cli.main import main; main()"
WITHOUT_PYSPARK = f"import sys; sys.modules['pyspark'] = None; {MAIN}"
PROJECT = (
    HEAD
    + """
import sys

@f.udf("string")
def checked(text):
    if text == "bad":
        raise ValueError("this is bad")
    print("my own words", file=sys.stderr, flush=True)
    return text

@mp.topic
def copied():
    return mp.read("lines").select(checked(f.col("value").cast("string")).alias("word"))
"""
)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    toml = f'[pipeline]\nname = "words"\nrestarts = 0\n{QUICK}'
    (tmp_path / "millstream.toml").write_text(toml)
    (tmp_path / "pipeline.py").write_text(PROJECT)
    return tmp_path


def call(
    project: Path, *words: str, program: str = MAIN, **environment: str
) -> tuple[int, list[str], str]:
    """The exit code, the lines on stdout, and all of stderr, also what children still write."""
    done = subprocess.run(
        [sys.executable, "-c", program, "pipeline", *words],
        cwd=project, env={**os.environ, **environment}, capture_output=True, text=True,
        timeout=PATIENCE_SECONDS, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout.splitlines(), done.stderr


@pytest.mark.long
def test_a_run_prints_its_states_or_one_sentence_and_spark_logs_to_a_file(
    account: Account, project: Path
) -> None:
    account.topic("lines")
    account.publish("lines", [b"good"])
    code, lines, printed = call(project, "run", "--once", NATS_URL=account.url)
    assert (code, printed) == (Exit.OK, "my own words\n")
    assert [line.split(" ", 1)[1] for line in lines] == ["copied: running", "copied: done"]
    log = project / ".pipeline" / "spark.log"
    assert not log.exists()
    account.publish("lines", [b"bad"])
    code, lines, printed = call(project, "run", "--once", "--quiet", NATS_URL=account.url)
    assert (code, lines) == (Exit.ERROR, [])
    warned, last = printed.splitlines()
    reason = "ValueError: this is bad (in checked, pipeline.py:10)"
    assert warned.startswith(f"flow 'copied' failed permanently: {reason}")
    flows = "error: these flows of the pipeline 'words' kept failing and were stopped: 'copied': "
    assert last.startswith(flows + reason)
    assert last.endswith(f" (Spark's stack traces are in {log})")
    assert "Traceback" in log.read_text()


@pytest.mark.long
def test_the_graph_and_a_refused_project_print_nothing_else(
    account: Account, project: Path
) -> None:
    account.topic("lines")
    code, lines, printed = call(project, "graph", NATS_URL=account.url)
    assert (code, printed) == (Exit.OK, "")
    assert lines[:2] == ["[copied]", "└─ [lines]"]
    (project / "pipeline.py").write_text(PROJECT.replace('"lines"', '"linez"'))
    code, lines, printed = call(project, "run", NATS_URL=account.url)
    assert (code, lines) == (Exit.ERROR, [])
    assert printed == (
        "error: there is no 'linez': the pipeline does not declare it and the broker has no such "
        "topic; did you mean 'lines'?\n"
    )
    (project / "pipeline.py").write_text(PROJECT.replace('f.col("value")', 'f.col("valu")'))
    code, lines, printed = call(project, "graph", NATS_URL=account.url)
    assert (code, lines, printed.count("\n")) == (Exit.ERROR, [], 1)
    assert "`valu` cannot be resolved. Did you mean " in printed


@pytest.mark.parametrize("command", ["run", "ls", "graph"])
def test_without_pyspark_the_pip_line_is_printed(project: Path, command: str) -> None:
    assert call(project, command, program=WITHOUT_PYSPARK) == (
        Exit.ERROR,
        [],
        "error: this needs the module 'pyspark', which is not installed: "
        "pip install 'millstream[spark]'\n",
    )


def test_without_java_or_a_broker_that_is_said_before_anything_starts(
    account: Account, project: Path
) -> None:
    # A Java that would be started fails: only what is checked before can be printed.
    broken = {"JAVA_HOME": str(project / "no-java")}
    nowhere = "nats://127.0.0.1:1"
    (project / "pipeline.py").write_text(PROJECT.replace("@f.udf", "# @f.udf"))
    code, _, printed = call(project, "run", NATS_URL=nowhere, **broken)
    assert code == Exit.NOT_RUNNING
    assert printed.startswith(f"error: cannot connect to {nowhere}: ")
    assert printed.count("\n") == 1
    code, _, printed = call(project, "run", NATS_URL=account.url, **broken)
    assert code == Exit.ERROR
    assert printed.startswith("error: Spark needs Java 17 or newer, and ")
    assert "point JAVA_HOME at it" in printed
    assert printed.count("\n") == 1


# A shell's background job ignores SIGINT, and so do its children, unless they are told otherwise.
WITH_CTRL_C = f"import signal; signal.signal(signal.SIGINT, signal.default_int_handler); {MAIN}"


def test_ctrl_c_while_spark_starts_prints_nothing_and_leaves_no_process(
    account: Account, project: Path
) -> None:
    account.topic("lines")
    with subprocess.Popen(
        [sys.executable, "-c", WITH_CTRL_C, "pipeline", "graph"],
        cwd=project, env={**os.environ, "NATS_URL": account.url}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
    ) as process:  # fmt: skip
        try:
            wait_for(lambda: len(alive_in(process.pid)) > 1)  # Spark's script, or already Java
            os.killpg(process.pid, signal.SIGINT)
            printed = process.communicate(timeout=PATIENCE_SECONDS)
            assert (process.returncode, *printed) == (Exit.INTERRUPTED, "", "")
            wait_for(lambda: not alive_in(process.pid))
        finally:
            for left in alive_in(process.pid):
                os.kill(left, signal.SIGKILL)
