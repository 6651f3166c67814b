"""Two packages measured by one bench: who comes when, and how their figures are put together."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import bench.__main__ as door
from bench.compare import Side, arranged, compared, turns
from bench.harness import Result, Skipped, against, select


def side(*runs: dict[str, tuple[float, str]]) -> Side:
    made = Side(Path())
    for figures in runs:
        made.note(
            json.dumps({"name": name, "value": value, "unit": unit})
            for name, (value, unit) in figures.items()
        )
    return made


def test_the_ratio_is_better_when_higher_whatever_the_unit_is() -> None:
    before = side({"rate": (10.0, "events/s"), "wait": (8.0, "ms")}, {"rate": (20.0, "events/s")})
    after = side({"rate": (30.0, "events/s"), "wait": (2.0, "ms")}, {"rate": (30.0, "events/s")})
    assert list(compared(before, after)) == [
        Result(
            *("rate", 30.0, "events/s", "before", 15.0, 2.0),
            *((30.0, 30.0), (10.0, 20.0), (1.5, 3.0)),
        ),
        Result("wait", 2.0, "ms", "before", 8.0, 4.0),
    ]


def test_what_one_of_them_cannot_do_is_skipped_with_a_word() -> None:
    results = list(compared(side({"old": (1.0, "s")}), side({"new": (1.0, "s")})))
    assert results == [
        Skipped("new", "the package before cannot do it"),
        Skipped("old", "the package after did not do it"),
    ]


def test_a_measurement_with_two_peers_counts_once_a_round() -> None:
    made = Side(Path())
    made.note([json.dumps({"name": "a", "value": 1.0, "unit": "s", "peer": p}) for p in "xy"])
    assert made.figures == {"a": [1.0]}


def test_the_other_one_begins_each_round() -> None:
    assert list(turns(["old", "new"], 3)) == ["old", "new", "new", "old", "old", "new"]


def test_the_bench_is_ours_and_the_package_is_theirs(tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    (theirs / "millstream").mkdir(parents=True)
    (theirs / "bench").mkdir()
    with pytest.raises(SystemExit, match=r"has no pyspark_millstream\.py"):
        arranged(tmp_path / "half", theirs)
    (theirs / "pyspark_millstream.py").touch()
    place = arranged(tmp_path / "place", theirs)
    assert (place / "millstream").resolve() == theirs / "millstream"
    assert (place / "bench").resolve() == Path(door.__file__).parent


def test_an_unknown_family_is_answered_with_the_list(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        door.main(["compare", "--before", ".", "nonsense"])
    assert "no family is called 'nonsense'; there are: " in capsys.readouterr().err


def test_without_peers_only_our_own_figures_are_taken() -> None:
    select([], peers=False)
    try:
        results = list(against("r", "1/s", lambda: 2.0, {"p": lambda: 1 / 0}, quick=True))
    finally:
        select([])
    assert results == [Result("r", 2.0, "1/s", spread=(2.0, 2.0))]
