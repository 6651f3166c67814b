"""Notes what was lost in the stream itself, where every client can read it.

The keeper does this while the server is closed to clients, so nothing is read or stored before:

1. Move the end of the log past the lost offsets, so that no new event ever has one of them. The
   server has no request for that: messages are stored up to there and removed again.
2. Add the lost range to the stream's metadata. Readers stop at it until an operator accepts it.

A crash in between is harmless: the stream's configuration is kept with the loss before it is
changed, and the next start does both steps again. A mirror needs neither, because the server copies
the lost messages from the origin again. Standard library only: the keeper loads this file.
"""

# Importing pathlib would take longer than everything else at start-up.
# ruff: noqa: PTH108, PTH110, PTH112, PTH118, PTH123, PTH208
from __future__ import annotations

import contextlib
import json
import os
import socket

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, Final

    from millstream.broker.log_ends import LogEnds

__all__ = [
    "CLOSED_FILE",
    "CLOSED_TEMPLATE",
    "Admin",
    "ClosedFiles",
    "closed_config",
    "note_loss",
    "note_losses",
]

CLOSED_TEMPLATE: Final = "closed.conf"  # configuration without accounts, written by the owner
CLOSED_FILE: Final = "closed-accounts.conf"  # the same with accounts, while that server runs
CLOSED_LOGIN: Final = "closed-login.json"  # of its system account, also only then

ANSWER_SECONDS: Final = 30.0
AT_ONCE: Final = 10_000  # messages between two answers; the server drops what it cannot queue
MOVE_MAX: Final = 2_000_000  # offsets that a log is moved by, about a minute; beyond, they are used
RANGES_KEPT: Final = 50  # of one stream, the newest ones
FILLER: Final = "_millstream_lost"  # first token of the subject of messages that only take offsets
MIRROR: Final = "the broker: a mirror copies them from its origin again"  # accepts such a loss
# What would keep a filler from being stored, or store it elsewhere as well.
OPENED: Final = {
    "max_msgs": -1,
    "max_bytes": -1,
    "max_msg_size": -1,
    "discard": "old",
    "discard_new_per_subject": False,
    "subject_transform": None,
    "republish": None,
    "no_ack": False,
}


class ClosedFiles:
    """The files of a server that only the keeper can use; they exist while it runs."""

    def __init__(self, folder: str, store: str) -> None:
        self._folder, self.password = folder, os.urandom(16).hex()
        accounts = os.path.join(store, "jetstream")
        self._accounts = sorted(os.listdir(accounts)) if os.path.isdir(accounts) else []

    @property
    def usable(self) -> bool:
        """Whether there are streams, and the configuration that the owner of the folder wrote."""
        return bool(self._accounts) and os.path.exists(self._path(CLOSED_TEMPLATE))

    def write(self, write_private: Callable[[str, str], None]) -> None:
        """Write the configuration, with an administrator for each account, and its login."""
        with open(self._path(CLOSED_TEMPLATE), encoding="utf-8") as file:
            text = closed_config(file.read(), self._accounts, self.password)
        write_private(self._path(CLOSED_FILE), text)
        write_private(self._path(CLOSED_LOGIN), json.dumps({"system": self.password}))

    def remove(self) -> None:
        for name in (CLOSED_FILE, CLOSED_LOGIN):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._path(name))

    @staticmethod
    def monitor(folder: str, address: str) -> dict[str, Any]:
        """How to ask the server about itself; see `ask_server`."""
        return {"client": address, "credentials": os.path.join(folder, CLOSED_LOGIN)}

    def _path(self, name: str) -> str:
        return os.path.join(self._folder, name)


def closed_config(template: str, accounts: list[str], password: str) -> str:
    """The configuration of a server that only the administrators of its accounts can use."""
    blocks = [f'"$SYS": {{ users: [{{ user: system, password: "{password}" }}] }}']
    blocks += [
        f'"{name}": {{ jetstream: enabled, users: [{{ user: "{name}", password: "{password}" }}] }}'
        for name in accounts
        if name != "$SYS"
    ]
    return "\n".join([template, "accounts {", *blocks, "}", ""])


class Admin:
    """A connection of an administrator of one account, with blocking requests."""

    def __init__(self, address: str, user: str, password: str) -> None:
        host, _, port = address.rpartition("//")[2].rpartition(":")
        self._socket = socket.create_connection((host, int(port)), timeout=ANSWER_SECONDS)
        self._file = self._socket.makefile("rb")
        self._file.readline()  # the server's greeting
        login = {"user": user, "pass": password, "verbose": False, "pedantic": False}
        self._inbox = f"_INBOX.{os.urandom(8).hex()}"
        hello = f"CONNECT {json.dumps(login)}\r\nSUB {self._inbox} 1\r\n"
        self._socket.sendall(hello.encode())

    def close(self) -> None:
        self._file.close()
        self._socket.close()

    def api(self, verb: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """One request of the JetStream API; ValueError if it is refused."""
        text = json.dumps(body).encode() if body is not None else b""
        answer: dict[str, Any] = json.loads(self.request(f"$JS.API.{verb}", text))
        if "error" in answer:
            raise ValueError(f"{verb}: {answer['error'].get('description')}")
        return answer

    def request(self, subject: str, body: bytes = b"") -> bytes:
        """Send a request and wait for its answer; OSError if there is none in time."""
        head = f"PUB {subject} {self._inbox} {len(body)}\r\n".encode()
        self._socket.sendall(head + body + b"\r\n")
        while line := self._file.readline():
            if line.startswith(b"MSG"):
                return self._file.read(int(line.split()[-1]) + 2)[:-2]
            if line.startswith(b"PING"):
                self._socket.sendall(b"PONG\r\n")
            elif line.startswith(b"-ERR"):
                raise OSError(line.decode("utf-8", "replace").strip())
        raise OSError("the server closed the connection")

    def send(self, subject: str, count: int) -> None:
        """Publish `count` empty messages without waiting."""
        self._socket.sendall(f"PUB {subject} 0\r\n\r\n".encode() * count)


def note_losses(
    ends: LogEnds,
    how: tuple[str, str, str],
    keep: Callable[[], None],
    warn: Callable[[str], None],
) -> None:
    """Note all losses that are not noted yet; one that fails is tried again at the next start.

    `how`: address of the server, password of the administrators, key of the metadata.
    """
    address, password, key = how
    for loss in ends.not_noted():
        try:
            admin = Admin(address, loss["stream"].partition("/")[0], password)
            try:
                end = note_loss(admin, loss, key, keep)
            finally:
                admin.close()
        except (OSError, ValueError, KeyError) as error:
            warn(f"readers of {loss['stream']} do not know of its loss: {error}")
            continue
        loss["noted"] = True
        ends.moved(loss, end)
        keep()


def note_loss(admin: Admin, loss: dict[str, Any], key: str, keep: Callable[[], None]) -> int:
    """Note one loss in its stream, under the metadata `key`; returns where its log now ends.

    `keep` stores the losses, with what is added to this one.
    """
    stream = loss["stream"].partition("/")[2]
    info = admin.api(f"STREAM.INFO.{stream}")
    config = loss.get("config") or info["config"]
    if config.get("mirror"):
        loss["accepted"] = {"at": loss["found"], "by": MIRROR}
        return int(info["state"]["last_seq"])
    first, last = loss["lost"]
    reached = int(info["state"]["last_seq"])
    if reached < last or "config" in loss:
        loss["config"] = config
        keep()
        reached = _move(admin, stream, config, reached, last)
    entry: dict[str, Any] = {"first": first, "last": last, "found": loss["found"]}
    if reached < last:
        entry["used"] = True  # new events have these offsets
    metadata = dict(config.get("metadata") or {})
    metadata[key] = json.dumps([*_known(metadata, key), entry][-RANGES_KEPT:])
    admin.api(f"STREAM.UPDATE.{stream}", {**config, "metadata": metadata})
    loss.pop("config", None)
    return reached


def _known(metadata: dict[str, str], key: str) -> list[Any]:
    try:
        known = json.loads(metadata.get(key, "[]"))
    except ValueError:
        return []
    return known if isinstance(known, list) else []


def _move(admin: Admin, stream: str, config: dict[str, Any], reached: int, last: int) -> int:
    """Move the end of a log to `last`; returns where it ends, which is earlier if that failed."""
    if last - reached > MOVE_MAX or config.get("deny_purge") or config.get("sealed"):
        return reached
    filler = f"{FILLER}.{stream}"
    subjects = [*(config.get("subjects") or ()), filler]
    try:
        admin.api(f"STREAM.UPDATE.{stream}", {**config, **OPENED, "subjects": subjects})
        while reached < last:
            count = min(AT_ONCE, last - reached)
            admin.send(filler, count - 1)
            answer = json.loads(admin.request(filler))
            if "error" in answer:
                raise ValueError(answer["error"].get("description"))
            reached = int(admin.api(f"STREAM.INFO.{stream}")["state"]["last_seq"])
    except ValueError:
        return reached
    finally:
        admin.api(f"STREAM.PURGE.{stream}", {"filter": filler})
    return reached
