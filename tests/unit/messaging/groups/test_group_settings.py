"""A group's settings are refused early, with the value and what to do."""

from __future__ import annotations

from typing import Any

import pytest

from millstream.errors import ConfigError
from millstream.events.start import Start
from millstream.messaging.groups.settings import GroupSettings


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"lease": 0.1}, "lease 0.1"),
        ({"lease": float("nan")}, "lease: not a duration: nan"),
        ({"commit_every": 0}, "commit_every 0"),
        ({"backoff": ()}, "backoff"),
        ({"backoff": (1, -1)}, "backoff"),
        ({"concurrency": 0}, "concurrency 0"),
        ({"concurrency": 10_001}, "at most 10,000"),
        ({"max_attempts": True}, "max_attempts True"),
        ({"key_buffer": 2000}, "key_buffer 2,000: at most 1,000"),
        ({"max_parked": -1}, "max_parked -1"),
        ({"dead_letter": "a.b"}, "dead-letter topic name 'a.b'"),
        ({"start": Start.LAST_PER_KEY}, "starts at ALL"),
    ],
)
def test_a_wrong_setting_is_named(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text.replace("(", r"\(")):
        GroupSettings(**changes)


def test_the_last_delay_is_repeated() -> None:
    settings = GroupSettings(backoff=(1.0, 3.0))
    assert [settings.delay_after(failures) for failures in (1, 2, 3, 9)] == [1.0, 3.0, 3.0, 3.0]
