"""The harness of bench/: fair turns, medians, ratios that are better when higher."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

import bench.__main__ as door
from bench import values
from bench.harness import (
    OURS,
    PeerAbsent,
    Result,
    Skipped,
    against,
    interleave,
    raced,
    select,
    wanted,
)
from millstream.schemas import declare
from millstream.schemas.values.fast_json import fast_dump, fast_load


def counter(log: list[str], name: str, figures: list[float]) -> Callable[[], float]:
    left = iter(figures)

    def round_() -> float:
        log.append(name)
        return next(left)

    return round_


def absent() -> float:
    raise PeerAbsent("it is not installed")


def test_contestants_take_turns_and_the_median_counts_without_the_warm_up() -> None:
    log: list[str] = []
    medians = interleave(
        {
            "a": counter(log, "a", [1000, 1, 2, 50]),
            "b": counter(log, "b", [1000, 7, 8, 9]),
        },
        rounds=3,
    )
    assert medians == {"a": 2, "b": 8}
    assert log == ["a", "b", "b", "a", "a", "b", "b", "a"]


def test_an_absent_peer_does_not_stop_the_others() -> None:
    medians = interleave({"a": lambda: 1.0, "gone": absent}, rounds=3)
    assert medians["a"] == 1.0
    assert isinstance(medians["gone"], PeerAbsent)


def test_asynchronous_contestants_share_the_loop_of_the_runner() -> None:
    loops = set()

    async def round_() -> float:
        loops.add(asyncio.get_running_loop())
        return 3.0

    with asyncio.Runner() as runner:
        assert interleave({"a": round_, "b": lambda: 4.0}, 3, runner) == {"a": 3.0, "b": 4.0}
    assert len(loops) == 1
    with pytest.raises(ValueError, match="runner"):
        interleave({"a": round_}, 1)


def test_no_rounds_are_refused() -> None:
    with pytest.raises(ValueError, match="rounds"):
        interleave({"a": lambda: 1.0}, 0)


def test_the_ratio_is_better_when_higher_for_rates_and_for_times() -> None:
    rate = list(against("r", "1/s", lambda: 200.0, {"p": lambda: 100.0}, quick=True))
    same = (200.0, 200.0), (100.0, 100.0), (2.0, 2.0)
    assert rate == [Result("r", 200.0, "1/s", "p", 100.0, 2.0, *same)]
    time = against("t", "ms", lambda: 5.0, {"p": lambda: 10.0}, quick=True, better="lower")
    same = (5.0, 5.0), (10.0, 10.0), (2.0, 2.0)
    assert list(time) == [Result("t", 5.0, "ms", "p", 10.0, 2.0, *same)]


def test_a_result_has_the_lowest_and_the_highest_of_its_rounds() -> None:
    ours, theirs = counter([], "a", [99, 4, 9, 6]), counter([], "b", [99, 2, 3, 6])
    (result,) = against("r", "1/s", ours, {"p": theirs}, quick=True)
    assert result == Result("r", 6, "1/s", "p", 3, 2.0, (4, 9), (2, 6), (1.0, 3.0))
    lower = raced("t", "ms", [4, 2], "p", [4, 8], better="lower")
    assert lower.ratio_spread == (1.0, 4.0)
    assert raced("t", "ms", [4], "p", [8]).spread is None


def test_without_a_peer_our_figure_is_still_reported() -> None:
    results = list(against("r", "1/s", lambda: 2.0, {"gone": absent}, quick=True))
    alone = Result("r", 2.0, "1/s", spread=(2.0, 2.0))
    assert results == [Skipped("r against gone", "it is not installed"), alone]


def test_a_benchmark_that_cannot_run_is_reported_as_skipped() -> None:
    results = list(against("r", "1/s", absent, {"p": lambda: 1.0}, quick=True))
    assert results == [Skipped("r", "it is not installed")]
    with pytest.raises(ValueError, match=OURS):
        list(against("r", "1/s", absent, {OURS: absent}, quick=True))


@pytest.fixture
def families(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two families: `good` measures with and without a peer, `broken` fails half-way."""
    good, broken = ModuleType("bench.good"), ModuleType("bench.broken")

    def measure_good(quick: bool) -> Iterator[Result | Skipped]:
        yield Result("plain", 1234.5, "1/s")
        yield Skipped("peer", "not here")
        yield Result("raced", 2.0, "ms", "them", 4.0, 2.0)

    def measure_broken(quick: bool) -> Iterator[Result]:
        yield Result("before", 1.0, "1/s")
        raise RuntimeError("the wheel came off")

    good.measure, broken.measure = measure_good, measure_broken  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "bench.good", good)
    monkeypatch.setitem(sys.modules, "bench.broken", broken)
    monkeypatch.setattr(door, "families", lambda: {"broken": "It breaks.", "good": "It works."})


@pytest.mark.usefixtures("families")
def test_json_is_one_object_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert door.main(["good", "--json", "--quick"]) == 0
    out, err = capsys.readouterr()
    assert [json.loads(line) for line in out.splitlines()] == [
        {"name": "plain", "value": 1234.5, "unit": "1/s"},
        {
            "name": "raced",
            "value": 2.0,
            "unit": "ms",
            "peer": "them",
            "peer_value": 4.0,
            "ratio": 2,
        },
    ]
    assert "skipped peer: not here" in err


@pytest.mark.usefixtures("families")
def test_the_table_names_the_peer(capsys: pytest.CaptureFixture[str]) -> None:
    assert door.main(["good"]) == 0
    out = capsys.readouterr().out
    assert "1,234" in out
    assert "them" in out
    assert "2.00" in out


@pytest.fixture
def everything_again() -> Iterator[None]:
    yield
    select([])


@pytest.mark.usefixtures("families", "everything_again")
def test_only_measurements_that_have_the_text_in_their_name_are_made(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert door.main(["good", "--json", "--only", "RACE"]) == 0
    out = capsys.readouterr().out
    assert [json.loads(line)["name"] for line in out.splitlines()] == ["raced"]
    assert list(against("other", "1/s", lambda: 1 / 0, {}, quick=True)) == []
    assert wanted("other", "is raced")
    assert not wanted("other")


@pytest.mark.usefixtures("families")
def test_all_benchmarks_run_after_a_broken_one_and_the_run_fails(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert door.main(["all", "--json"]) == 1
    out, err = capsys.readouterr()
    assert [json.loads(line)["name"] for line in out.splitlines()] == ["before", "plain", "raced"]
    assert "the wheel came off" in err


@pytest.mark.usefixtures("families")
def test_an_unknown_name_is_answered_with_the_list(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        door.main(["nonsense"])
    assert left.value.code == 2
    assert "no family is called 'nonsense'; there are: broken, good, all" in capsys.readouterr().err


def test_families_are_the_modules_with_a_measure(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text('"""First words.\n\nMore."""\ndef measure(quick): ...\n')
    (tmp_path / "other.py").write_text("def helper(): ...\n")
    assert door.families(tmp_path) == {"one": "First words."}


def test_json_values_are_measured_against_the_checker() -> None:
    results = [result for result in values.measure(quick=True) if isinstance(result, Result)]
    assert len(results) == 6
    assert all(result.peer == values.PEER and result.ratio for result in results)


def test_the_events_of_the_json_benchmark_take_the_fast_path() -> None:
    for event in values.orders():
        record = declare(type(event)).record
        data = fast_dump(record)(event)
        assert fast_dump(record)(fast_load(record)(data)) == data
