"""Pytest fixtures; pytest loads them automatically once the package is installed.

Nothing of Millstream is imported until a fixture is used, because this plugin is part of every
pytest run in the environment.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from millstream.broker import Broker, Cluster
    from millstream.testing import AccountPool

__all__ = ["millstream_accounts", "millstream_broker", "millstream_cluster", "millstream_url"]


@pytest.fixture
def millstream_broker() -> Iterator[Broker]:
    """A new broker for this test only; takes about a tenth of a second."""
    from millstream.testing import running_broker

    with running_broker() as broker:
        yield broker


@pytest.fixture(scope="session")
def millstream_cluster() -> Iterator[Cluster]:
    """One three-node cluster for the session; takes about a second."""
    from millstream.testing import running_cluster

    with running_cluster() as cluster:
        yield cluster


@pytest.fixture(scope="session")
def millstream_accounts() -> Iterator[AccountPool]:
    """One broker for the session, with an account for every test that asks for one."""
    from millstream.testing import AccountPool

    with AccountPool() as pool:
        yield pool


@pytest.fixture
def millstream_url(millstream_accounts: AccountPool) -> str:
    """The address of an empty account on the session's broker, for this test only."""
    return millstream_accounts.url()
