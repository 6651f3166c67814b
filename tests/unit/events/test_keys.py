"""Keys are text or bytes: anything else is refused with what to write instead."""

from __future__ import annotations

from typing import Any

import pytest

from millstream.errors import ConfigError
from millstream.events.encoding import TopicShape
from millstream.events.row_buffer import RowBuffer
from millstream.events.subject import key_token, partition_of, text_keys
from millstream.messaging import ReadPlan, SubscriptionSettings


@pytest.mark.parametrize(
    "use",
    [
        lambda key: TopicShape("t", ["t"]).route(key),
        lambda key: TopicShape("t", ["t.0", "t.1"]).route(key),
        lambda key: RowBuffer(None).add(b"x", key),
        lambda key: key_token(key),
        lambda key: partition_of(key, 4),
        lambda key: ReadPlan(keys=[key]),
        lambda key: SubscriptionSettings(keys=(key,)),
    ],
)
@pytest.mark.parametrize(
    ("key", "told"),
    [(42, "found int. Convert it: key=str(42)"), ([1], "found list. Convert it: key=str(...)")],
)
def test_a_number_as_key_is_refused_with_what_to_write(use: Any, key: Any, told: str) -> None:
    with pytest.raises(ConfigError) as refused:
        use(key)
    assert told in str(refused.value)


def test_keys_to_choose_by_are_a_list_of_text_or_bytes() -> None:
    assert ReadPlan(keys=["a", b"b\xff"]).keys == ("a", "b\udcff")  # type: ignore[list-item]
    assert text_keys({"a": 1}) == ("a",)
    assert text_keys("abc") == text_keys(b"abc") == ("abc",)
    with pytest.raises(ConfigError, match="found int"):
        text_keys(7)  # type: ignore[arg-type]
