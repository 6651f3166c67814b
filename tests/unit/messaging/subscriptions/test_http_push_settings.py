"""Settings of an HTTP push."""

from __future__ import annotations

import pytest

from millstream.errors import ConfigError
from millstream.messaging.subscriptions.http_push import HttpPushSettings
from millstream.settings import Secret


def test_headers_and_the_bearer_token_are_not_shown() -> None:
    settings = HttpPushSettings(
        "https://host/hook", bearer=Secret("hush-1"), headers={"X-Api-Key": "hush-2"}
    )
    assert "https://host/hook" in repr(settings)
    assert "hush" not in repr(settings)


@pytest.mark.parametrize("url", ["ftp://ann:hush@host", "http://ann:hush@host:port"])
def test_a_wrong_url_is_refused_without_showing_its_password(url: str) -> None:
    with pytest.raises(ConfigError) as refused:
        HttpPushSettings(url)
    assert "hush" not in str(refused.value)
