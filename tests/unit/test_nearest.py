"""A misspelled name is answered with the near one."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from millstream.errors import ConfigError
from millstream.nearest import check_known, did_you_mean, near_names, one_of, settings_from


@dataclass(frozen=True)
class Knobs:
    max_deliver: int = 1
    ack_wait: float = 30.0


def test_a_near_name_is_proposed_and_upper_case_makes_no_difference() -> None:
    assert did_you_mean("Order", ["orders", "payments"]) == "did you mean 'orders'?"
    assert did_you_mean("order", ["Orders", "orders-eu"], most=2) == (
        "did you mean 'Orders' or 'orders-eu'?"
    )
    assert did_you_mean("weather", ["orders"]) == ""
    assert near_names("a", []) == []


def test_without_a_near_name_the_known_ones_are_listed() -> None:
    assert one_of("colour", ["b", "a"], "option") == "the options are a, b"


def test_a_long_list_is_cut() -> None:
    text = one_of("colour", [f"knob{n}" for n in range(1000)])
    assert text.endswith(", ...")
    assert len(text) < 600


def test_an_unknown_setting_names_the_near_one() -> None:
    with pytest.raises(ConfigError) as caught:
        check_known(["max_delivers"], ["max_deliver", "ack_wait"])
    assert str(caught.value) == "unknown setting 'max_delivers': did you mean 'max_deliver'?"


def test_settings_come_from_one_value_or_from_keywords() -> None:
    assert settings_from(Knobs, None, {}) is None
    assert settings_from(Knobs, Knobs(2), {}) == Knobs(2)
    assert settings_from(Knobs, None, {"max_deliver": 3}) == Knobs(3)


@pytest.mark.parametrize(
    ("settings", "values", "words"),
    [
        (Knobs(), {"ack_wait": 1}, "give Knobs or keywords (ack_wait), not both"),
        (None, {"ackwait": 1}, "unknown setting 'ackwait': did you mean 'ack_wait'?"),
        (None, {"colour": 1}, "unknown setting 'colour': the settings are ack_wait, max_deliver"),
        ({"ack_wait": 1}, {}, "settings: dict is not Knobs. Give a Knobs, or its fields as"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(
    settings: Knobs | None, values: dict[str, int], words: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        settings_from(Knobs, settings, values)
    assert words in str(caught.value)
