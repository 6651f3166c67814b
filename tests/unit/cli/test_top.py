"""The screen of `millstream top` fits the terminal, and the lag is on it."""

from __future__ import annotations

from typing import Any

import pytest
from rich.console import Console

from millstream.cli.views.top import screen


def seen(topics: int, subscriptions: int) -> dict[str, Any]:
    """Rates of topics with long names; the last subscription has the largest lag."""
    return {
        "topics": [
            {
                "topic": f"a-topic-with-a-rather-long-name-{number}",
                "stored_per_second": float(number),
                "messages": 10**9,
                "bytes": 10**12,
                "subscriptions": 3,
            }
            for number in range(topics)
        ],
        "subscriptions": [
            {
                "topic": f"a-topic-with-a-rather-long-name-{number}",
                "subscription": f"a-subscription-of-it-{number}",
                "settled_per_second": 123456.0,
                "lag_messages": 1_000_000 + number,
                "lag_seconds": 90_000.0,
                "in_flight": 10_000,
                "paused": False,
            }
            for number in range(subscriptions)
        ],
    }


def lines_of(what: dict[str, Any], width: int, height: int) -> list[str]:
    console = Console(width=width, height=height, force_terminal=True, color_system=None)
    with console.capture() as captured:
        console.print(screen(what, "nats://user@some-host:4222", width, height, "q quits"))
    return captured.get().splitlines()


@pytest.mark.parametrize("size", [(80, 24), (200, 50), (100, 14)])
@pytest.mark.parametrize(("topics", "subscriptions"), [(100, 100), (100, 2), (2, 100)])
def test_the_largest_lag_is_on_every_screen(
    size: tuple[int, int], topics: int, subscriptions: int
) -> None:
    lines = lines_of(seen(topics, subscriptions), *size)
    assert len(lines) <= size[1]
    assert max(map(len, lines)) <= size[0]
    text = "\n".join(lines)
    assert f"{1_000_000 + subscriptions - 1:,}" in text
    assert "lag" in text
    assert "q quits" in lines[-1]
    assert ("Topics of" in text) == (size[1] > 14)
    assert ("Topics of" not in text) or "of 100, the busiest" in text


def test_few_of_both_are_shown_completely() -> None:
    text = "\n".join(lines_of(seen(3, 4), 120, 24))
    assert all(f"1,000,00{number}" in text for number in range(4))
    assert text.count("a-topic-with") == 7
    assert "busiest" not in text


def test_without_subscriptions_the_topics_fill_the_screen() -> None:
    lines = lines_of(seen(100, 0), 80, 24)
    assert len(lines) <= 24
    assert sum("a-topic-with" in line for line in lines) >= 15
