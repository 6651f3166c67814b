"""The bench of guarantees runs: one cell of it, on a real broker."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from rich.console import Console

from bench import qos
from bench.harness import Result, select


@pytest.fixture
def core_only() -> Iterator[None]:
    select(["core subject"])
    yield
    select([])


@pytest.mark.usefixtures("core_only")
def test_one_guarantee_is_measured_and_shown(capsys: pytest.CaptureFixture[str]) -> None:
    results = [result for result in qos.measure(quick=True) if isinstance(result, Result)]
    title = "core subject, at most once, no storage"
    assert [result.name for result in results] == [
        f"{title}: {text}" for text, _ in qos.FIGURES.values()
    ]
    figures = {result.name.rpartition(": ")[2]: result.value for result in results}
    assert figures["on disk"] == 0
    assert figures["on the wire"] > 150  # it comes in and goes out
    assert figures["latency, p99"] >= figures["latency, p50"] > 0
    Console(width=200).print(qos.as_table("qos", results))
    out = capsys.readouterr().out
    assert title in out
    assert "CPU of the servers" in out
