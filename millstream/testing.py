"""For users' tests: a real broker, started in a tenth of a second and removed afterwards.

    with running_broker() as broker:            # or: async with running_broker() as broker:
        print(broker.url)

Fixtures for pytest come with the package: `millstream_broker` is a fresh broker for one test,
`millstream_url` an empty account of its own on a broker that the session shares.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

from millstream.broker import Account, Broker, BrokerSettings, Cluster, Role, User
from millstream.closing import Closing
from millstream.errors import ConfigError
from millstream.nearest import check_known
from millstream.settings import Secret

__all__ = ["AccountPool", "RunningBroker", "RunningCluster", "running_broker", "running_cluster"]

_GRACE: Final = 2.0  # seconds for a graceful stop; a test must not wait for a stuck server
_ACCOUNTS_MAX: Final = 2000  # of one broker; each adds about 0.5 ms to its start
_BROKERS_MAX: Final = 50  # of one pool; a test that leaks accounts must not fill the machine


R = TypeVar("R", Broker, Cluster)


class _Running(Generic[R]):
    """A temporary data folder with a server, as a sync and async context manager."""

    def __init__(self, settings: BrokerSettings | None, changes: dict[str, Any]) -> None:
        self._temporary: Path | None = None
        if settings is not None and changes:
            raise ConfigError("give a BrokerSettings or individual settings, not both")
        check_known(changes, BrokerSettings.__dataclass_fields__)
        self._settings, self._changes = settings, changes

    def _make(self, settings: BrokerSettings) -> R:
        raise NotImplementedError

    def __enter__(self) -> R:
        try:
            self._running: R = self._make(self._prepare())
            return self._running.start()
        except BaseException:
            self._clean()
            raise

    def __exit__(self, *_: object) -> None:
        try:
            self._running.stop(grace=_GRACE)
        finally:
            self._clean()

    async def __aenter__(self) -> R:
        return await asyncio.to_thread(self.__enter__)

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.__exit__)

    def _prepare(self) -> BrokerSettings:
        if self._settings is not None:
            return self._settings
        if "data" not in self._changes:
            self._temporary = Path(tempfile.mkdtemp(prefix="millstream-test-"))
            return BrokerSettings(**{"data": self._temporary, **self._changes})
        return BrokerSettings(**self._changes)

    def _clean(self) -> None:
        if self._temporary is not None:
            shutil.rmtree(self._temporary, ignore_errors=True)
            self._temporary = None


class RunningBroker(_Running[Broker]):
    """See `running_broker`."""

    def _make(self, settings: BrokerSettings) -> Broker:
        return Broker(settings)


class RunningCluster(_Running[Cluster]):
    """See `running_cluster`."""

    def __init__(
        self, nodes: int, settings: BrokerSettings | None, changes: dict[str, Any]
    ) -> None:
        super().__init__(settings, changes)
        self._nodes = nodes

    def _make(self, settings: BrokerSettings) -> Cluster:
        return Cluster(settings, nodes=self._nodes)


def running_broker(settings: BrokerSettings | None = None, **changes: Any) -> RunningBroker:
    """A broker for the length of a `with` or `async with` block.

    Give a `BrokerSettings`, or individual settings (`durability="memory"`). Without `data` it runs
    in a temporary folder, which is always removed at the end.
    """
    return RunningBroker(settings, changes)


def running_cluster(
    nodes: int = 3, settings: BrokerSettings | None = None, **changes: Any
) -> RunningCluster:
    """A local cluster for the length of a `with` or `async with` block; see `running_broker`."""
    return RunningCluster(nodes, settings, changes)


class AccountPool(Closing):
    """One broker with many empty accounts, isolated from each other: one for each test.

    Getting an account takes no time, while starting a broker takes a tenth of a second. When all
    accounts are used, another broker is started.
    """

    def __init__(self, size: int = 200, **changes: Any) -> None:
        if not 1 <= size <= _ACCOUNTS_MAX:
            raise ConfigError(f"a pool has 1 to {_ACCOUNTS_MAX} accounts, not {size}")
        names = [f"test-{number}" for number in range(size)]
        self._changes = {
            "accounts": tuple(Account(name) for name in names),
            "users": tuple(User(name, Secret("test"), Role.ADMIN, name) for name in names),
            "guards": False,  # a test that needs one starts it: mill.guard(...)
            **changes,
        }
        self._names = names
        self._brokers: list[Broker] = []
        self._unused: Iterator[str] = iter(())
        self._running = contextlib.ExitStack()

    def _enter(self) -> None:
        self._grow()

    def _leave(self, error: BaseException | None) -> None:
        self._running.close()
        self._brokers.clear()

    def url(self) -> str:
        """The address of an unused account, with user and password."""
        if not self._brokers:
            raise ConfigError("the pool is not running; use it in a `with` block")
        name = next(self._unused, None)
        if name is None:
            self._grow()
            name = next(self._unused)
        return self._brokers[-1].url.replace("://", f"://{name}:test@", 1)

    def _grow(self) -> None:
        if len(self._brokers) == _BROKERS_MAX:
            raise ConfigError(
                f"all accounts of {_BROKERS_MAX} brokers with {len(self._names)} each are used"
            )
        self._brokers.append(self._running.enter_context(running_broker(**self._changes)))
        self._unused = iter(self._names)
