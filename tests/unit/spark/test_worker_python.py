"""Spark's Python processes are forks of a prepared one, and differ in nothing else."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest

from millstream.settings import child_environment
from millstream.spark import pyspark_daemon
from millstream.spark import worker_python as module
from millstream.spark.worker_role import (
    is_committing,
    is_offering_filters,
    is_planning,
    worker_module,
)

PROBE = """
    import json, os, sys
    import probe_neighbour
    print(json.dumps({
        "argv": sys.argv[1:], "name": __name__, "spec": __spec__.name, "folder": os.getcwd(),
        "first": sys.path[0], "variable": os.environ.get("PROBE"), "parent": os.getppid(),
        "path": os.environ.get("PYTHONPATH"), "stdin": sys.stdin.read(),
        "given": sorted(os.environ), "pyspark": "pyspark.worker" in sys.modules,
    }))
    print("said to stderr", file=sys.stderr)
    sys.exit(7)
"""
SPARK_SETS = {"PYTHONHASHSEED": "0", "PYTHONUNBUFFERED": "YES"}


@pytest.fixture(scope="module")
def program() -> str:
    return module.forking_python()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "probe.py").write_text(textwrap.dedent(PROBE))
    (tmp_path / "probe_neighbour.py").touch()
    return tmp_path


def asked(
    program: str, folder: Path, *words: str, variables: Mapping[str, str] = SPARK_SETS
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [program, *words],
        cwd=folder, env=child_environment(**variables), input="given",
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


def test_a_fork_is_what_a_new_process_would_be(program: str, folder: Path) -> None:
    path = f"/nowhere{os.pathsep}{module.__file__}"
    variables = {**SPARK_SETS, "PROBE": "a=b", "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    answers = []
    for python in (program, sys.executable):
        done = asked(python, folder, "-m", "probe", "one", "two", variables=variables)
        assert (done.returncode, done.stderr) == (7, "said to stderr\n"), done.stdout
        answers.append(json.loads(done.stdout))
    forked, new = answers
    assert forked.pop("parent") == module._daemons[-1].pid
    assert new.pop("parent") == os.getpid()
    assert (forked.pop("pyspark"), new.pop("pyspark")) == (True, False)
    assert forked == new
    assert forked["argv"] == ["one", "two"]


def test_forks_draw_different_random_numbers(program: str, tmp_path: Path) -> None:
    (tmp_path / "draw.py").write_text("import numpy; print(numpy.random.rand())")
    drawn = {asked(program, tmp_path, "-m", "draw").stdout for _ in range(3)}
    assert len(drawn) == 3


@pytest.mark.filterwarnings("error")
def test_a_fork_beside_the_thread_of_an_allocator_gives_no_warning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fork() -> int:  # as Python 3.12 does
        warnings.warn("multi-threaded, use of fork()", DeprecationWarning, stacklevel=2)
        return 5

    monkeypatch.setattr(os, "fork", fork)
    assert pyspark_daemon._fork() == 5


WORKERS = """
import os, sys
import numpy.random
from millstream.spark.pyspark_daemon import _draw_own_numbers

_draw_own_numbers(forks_too=True)
numpy.random.seed(1)
for _ in range(3):
    if os.fork() == 0:  # a worker
        print(numpy.random.rand(), file=sys.stderr)
        numpy.random.seed(1)
        if os.fork() == 0:  # of the user, who chose a seed
            print(numpy.random.rand())
        else:
            os.wait()
        sys.exit()
    os.wait()
"""


def test_workers_draw_different_random_numbers_and_keep_the_seed_of_a_user() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WORKERS], capture_output=True, text=True, timeout=60, check=True
    )
    assert len(set(done.stderr.split())) == 3
    assert len(done.stdout.split()) == 3
    assert len(set(done.stdout.split())) == 1


@pytest.mark.parametrize(
    ("words", "variables"),
    [
        (["-c", "import os; print(os.getppid())"], SPARK_SETS),
        (["-m", "parent"], {**SPARK_SETS, "PYTHONHASHSEED": "1"}),
        (["-m", "parent"], {**SPARK_SETS, "PYTHONDEVMODE": "1"}),
        (["-m", "parent"], {**SPARK_SETS, "OMP_NUM_THREADS": "2"}),
    ],
)
def test_what_a_fork_cannot_give_is_a_new_process(
    program: str, tmp_path: Path, words: list[str], variables: dict[str, str]
) -> None:
    (tmp_path / "parent.py").write_text("import os; print(os.getppid())")
    done = asked(program, tmp_path, *words, variables=variables)
    assert done.stdout.strip() == str(os.getpid()), done.stderr


def test_ending_the_stand_in_ends_the_process(program: str, tmp_path: Path) -> None:
    (tmp_path / "sleeper.py").write_text("import os,time; print(os.getpid(), flush=True); input()")
    environment = child_environment(**SPARK_SETS)
    with subprocess.Popen(
        [program, "-m", "sleeper"], cwd=tmp_path, env=environment, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    ) as stand_in:  # fmt: skip
        assert stand_in.stdout is not None
        sleeper = int(stand_in.stdout.readline())
        stand_in.kill()
        wait_for(lambda: not alive(sleeper))


def test_the_stand_in_ends_as_the_process_did(program: str, tmp_path: Path) -> None:
    (tmp_path / "killed.py").write_text("import os; os.kill(os.getpid(), 9)")
    assert asked(program, tmp_path, "-m", "killed").returncode == -signal.SIGKILL


DRIVER = """
import sys
from millstream.spark.worker_python import _daemons, forking_python
print(forking_python(), _daemons[0].pid, flush=True)
input()
"""


@pytest.mark.parametrize("how", ["end", "kill", "terminal closed"])
def test_the_daemon_ends_with_the_driver_and_leaves_nothing(how: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", DRIVER], start_new_session=True, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    ) as driver:  # fmt: skip
        assert driver.stdout is not None
        assert driver.stdin is not None
        program, daemon = driver.stdout.readline().split()
        if how == "kill":
            driver.kill()
        elif how != "end":
            os.killpg(driver.pid, signal.SIGHUP)
        driver.stdin.close()
    wait_for(lambda: not Path(program).parent.exists() and not alive(int(daemon)))


def test_ctrl_c_while_the_daemon_imports_prints_nothing() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", DRIVER.replace("input()", "sys.stdin.close()")],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        process_group=0,
    ) as driver:  # fmt: skip
        assert driver.stdout is not None
        daemon = int(driver.stdout.readline().split()[1])
        os.kill(daemon, 0)
        assert os.getpgid(daemon) == daemon
        with contextlib.suppress(ProcessLookupError):
            os.killpg(driver.pid, signal.SIGINT)
        # The daemon holds stderr: its end is the end of the text.
        printed = driver.communicate(timeout=60)[1]
    assert "pyspark_daemon" not in printed


def test_without_the_daemon_python_is_started_as_before(tmp_path: Path) -> None:
    (tmp_path / "parent.py").write_text("import os; print(os.getppid())")
    with subprocess.Popen(
        [sys.executable, "-c", DRIVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as driver:
        assert driver.stdout is not None
        program, daemon = driver.stdout.readline().split()
        os.kill(int(daemon), signal.SIGKILL)
        done = asked(program, tmp_path, "-m", "parent")
        assert done.stdout.strip() == str(os.getpid()), done.stderr


def test_a_python_that_the_user_chose_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYSPARK_PYTHON", "/opt/python")
    assert module.worker_python(local=True) == "/opt/python"
    monkeypatch.delenv("PYSPARK_PYTHON")
    assert module.worker_python(local=False) == sys.executable
    assert module.worker_python(local=True) == module.forking_python()
    with module.told_to_spark("/tmp/stand-in"):
        assert os.environ["PYSPARK_PYTHON"] == "/tmp/stand-in"
    assert os.environ["PYSPARK_PYTHON"] == sys.executable
    assert module.worker_python(local=True) == module.forking_python()


def test_no_stand_in_where_no_socket_can_be(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    long = tmp_path / ("x" * 120)
    long.mkdir()
    monkeypatch.setattr("tempfile.mkdtemp", lambda prefix: str(long))
    monkeypatch.setattr(module, "_programs", {})
    assert module.forking_python() == sys.executable
    assert not long.exists()


@pytest.mark.parametrize(
    ("main", "argv", "found"),
    [
        ("pyspark.daemon", ["daemon.py", "pyspark.worker"], ("pyspark.worker", False, False)),
        ("pyspark.daemon", ["d", "pyspark.sql.worker.plan_data_source_read"], (None, True, False)),
        ("pyspark.daemon", ["d", "pyspark.sql.worker.data_source_pushdown_filters"],
         (None, True, True)),
        ("pyspark.sql.worker.data_source_pushdown_filters", ["x"], (None, True, True)),
        ("pyspark.sql.streaming.python_streaming_source_runner", ["x"], (None, True, False)),
        ("pyspark.daemon", ["d", "pyspark.sql.worker.python_streaming_sink_runner"],
         (None, True, False)),
        ("my.program", ["x", "pyspark.sql.worker.utils"], ("", False, False)),
    ],
)  # fmt: skip
def test_a_process_knows_what_spark_runs_in_it(
    monkeypatch: pytest.MonkeyPatch,
    main: str,
    argv: list[str],
    found: tuple[str | None, bool, bool],
) -> None:
    stand_in = SimpleNamespace(__spec__=SimpleNamespace(name=main))
    monkeypatch.setitem(sys.modules, "__main__", stand_in)
    monkeypatch.setattr(sys, "argv", argv)
    name = worker_module()
    roles, committing = (is_planning(), is_offering_filters()), is_committing()
    monkeypatch.undo()
    assert committing == (name == "pyspark.sql.worker.python_streaming_sink_runner")
    assert name == (found[0] if found[0] is not None else name)
    assert roles == found[1:]


def alive(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state != "Z"


def wait_for(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)
