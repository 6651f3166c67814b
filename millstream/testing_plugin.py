"""Fixtures for users of pytest; loaded by pytest itself once the package is installed.

Nothing of Millstream is imported until a fixture is used: the plugin is part of every pytest run
in the environment.
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
    """A fresh broker for this test alone; about a tenth of a second."""
    from millstream.testing import running_broker

    with running_broker() as broker:
        yield broker


@pytest.fixture(scope="session")
def millstream_cluster() -> Iterator[Cluster]:
    """One three-node cluster for the whole session; about a second."""
    from millstream.testing import running_cluster

    with running_cluster() as cluster:
        yield cluster


@pytest.fixture(scope="session")
def millstream_accounts() -> Iterator[AccountPool]:
    """One broker for the whole session, with an account for every test that asks for one."""
    from millstream.testing import AccountPool

    with AccountPool() as pool:
        yield pool


@pytest.fixture
def millstream_url(millstream_accounts: AccountPool) -> str:
    """The address of an own, empty account on the session's broker; costs no time."""
    return millstream_accounts.url()
