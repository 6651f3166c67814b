"""A broker for an example: the one at NATS_URL, or a new one in a temporary folder."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from millstream.testing import running_broker


@contextmanager
def broker_url() -> Iterator[str]:
    """The address of a running broker."""
    given = os.environ.get("NATS_URL")
    if given:
        yield given
    else:
        with running_broker() as broker:
            yield broker.url
