"""What Spark's JVM prints and means is passed on; its greeting and its races are not."""

from __future__ import annotations

import subprocess
import sys

import pytest

from millstream.spark.jvm import GREETING, TRACEBACK_LINES, Meaningful

RACE = b"""Traceback (most recent call last):
  File "/venv/site-packages/pyspark/daemon.py", line 264, in manager
    code = worker(sock, authenticated)
           ^^^^^^^^^^^^^^^^^^^^^^^^^^^
  File "/venv/site-packages/pyspark/daemon.py", line 95, in worker
    outfile.flush()
BrokenPipeError: [Errno 32] Broken pipe
"""
OWN = RACE.replace(b"pyspark/daemon.py", b"my/code.py", 1)
OTHER = RACE.replace(b"BrokenPipeError", b"ValueError")
LONG = b"Traceback (most recent call last):\n" + b'  File "x.py", line 1, in f\n' * 50


def shown(text: bytes) -> bytes:
    filter_ = Meaningful()
    return b"".join(map(filter_.part, text.splitlines(keepends=True))) + filter_.rest()


@pytest.mark.parametrize("text", [b"", b"one\ntwo", OWN, OTHER, LONG, RACE[:200], b"a\n" + OWN])
def test_what_is_meant_is_printed_unchanged(text: bytes) -> None:
    assert shown(text) == text


def test_a_greeting_and_a_closed_connection_of_a_planner_are_left_out() -> None:
    assert shown(GREETING + b"one\n" + RACE + b"two\n" + RACE + RACE + OWN) == b"one\ntwo\n" + OWN


def test_a_traceback_is_held_for_some_lines_only() -> None:
    held = Meaningful()
    parts = list(map(held.part, LONG.splitlines(keepends=True)))
    assert not any(parts[: TRACEBACK_LINES - 1])
    assert all(parts[TRACEBACK_LINES - 1 :])


def test_a_jvm_that_does_not_start_is_one_sentence_with_what_it_printed() -> None:
    code = """
from millstream.errors import ConfigError
from millstream.spark import session
try:
    session(master="my-machine", quick=True)
except ConfigError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=True
    )
    assert done.stderr == ""
    assert done.stdout.startswith("Spark's Java does not start: ")
    assert "Master must" in done.stdout
    assert done.stdout.count("\n") == 1
    assert " at org." not in done.stdout
