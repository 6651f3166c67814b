"""The data folder: its owner, its files, its ports.

data/
  broker.json         address of the running broker, for clients on this machine
  credentials.json    generated users (0600)
  encryption.key      key for encryption at rest (0600), unless stored elsewhere
  layout.json         the nodes this folder was created for
  set-aside/          files of streams that the broker was started without
  nodes/n1/
    lock              held by the owner of the node; names the owner
    server.conf       the server's configuration (0600)
    closed.conf       that of a server without clients, for repairs after a crash
    plan.json         how to start it again as it was
    key.json          fingerprint of the encryption key, or that there is none
    node.json         process ids and ports while it runs
    guards.json       guards of guarded topics that it runs
    captures.json     captures of databases that it runs
    gateways.json     gateways that it runs; gateway-kafka.json: where one listens
    running           while its server runs; left after a crash
    log-ends.json     checkpoints of where the logs end, and losses that were found
    server.log        its output, rotated
    store/  run/      streams, with second names of their files (store/kept) while it starts; ports
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import random
import shutil
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from millstream.broker.config import Durability
from millstream.broker.log_ends import ENDS_FILE
from millstream.broker.loss_notes import CLOSED_TEMPLATE
from millstream.broker.private_files import sign_lock, write_private
from millstream.broker.process_keeper import CAPTURES_FILE, GATEWAYS_FILE, GUARDS_FILE
from millstream.deadline import Deadline
from millstream.errors import ConfigError, FolderLocked, NoSpace
from millstream.settings import STATE_FILE

__all__ = [
    "NodeFolder",
    "can_listen",
    "check_layout",
    "free_port",
    "node_folders",
    "read_json",
    "store_limit",
]

_LAYOUT_FILE: Final = "layout.json"
_LOCK_PATIENCE: Final = 0.1  # seconds to wait for an owner that is about to end
_READ_PATIENCE: Final = 10.0  # seconds to wait for readers (`status`), which take microseconds
_PORT_TRIES: Final = 200  # random ports are nearly always free
_LOWEST_PORT: Final = 12_000
_RESERVE: Final = 256 * 1024 * 1024  # bytes of disk left for logs and other programs
_LEAST_SPACE: Final = 4 * 1024 * 1024  # bytes; with less a store cannot write its own files
_SHARED_MEMORY: Final = Path("/dev/shm")


@dataclass(frozen=True, slots=True)
class NodeFolder:
    """The part of a data folder that belongs to one node."""

    data: Path
    name: str

    @property
    def root(self) -> Path:
        return self.data / "nodes" / self.name

    @property
    def lock_file(self) -> Path:
        return self.root / "lock"

    @property
    def conf(self) -> Path:
        return self.root / "server.conf"

    @property
    def closed(self) -> Path:
        return self.root / CLOSED_TEMPLATE

    @property
    def plan(self) -> Path:
        return self.root / "plan.json"

    @property
    def key(self) -> Path:
        return self.root / "key.json"

    @property
    def state(self) -> Path:
        return self.root / "node.json"

    @property
    def ends(self) -> Path:
        return self.root / ENDS_FILE

    @property
    def guards(self) -> Path:
        return self.root / GUARDS_FILE

    @property
    def captures(self) -> Path:
        return self.root / CAPTURES_FILE

    @property
    def gateways(self) -> Path:
        return self.root / GATEWAYS_FILE

    def gateway(self, protocol: str) -> Path:
        """The file in which a gateway notes where it listens."""
        return self.root / f"gateway-{protocol}.json"

    @property
    def log(self) -> Path:
        return self.root / "server.log"

    @property
    def run(self) -> Path:
        return self.root / "run"

    @property
    def store(self) -> Path:
        return self.root / "store"

    def create(self) -> None:
        """Create the folders, readable by their owner only."""
        try:
            self.data.mkdir(parents=True, exist_ok=True)
            for folder in (self.root.parent, self.root, self.run, self.store):
                folder.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            if error.errno == 28:
                raise NoSpace(f"no space left on the disk of {self.data}") from error
            raise ConfigError(f"the data folder {self.data} cannot be used: {error}") from error

    def lock(self) -> int:
        """Become the owner of this node, until the last copy of the file descriptor is closed."""
        handle = self.open_lock()
        owned, read = Deadline(_LOCK_PATIENCE), Deadline(_READ_PATIENCE)
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if not (owned if self.locked() else read).passed:
                    time.sleep(0.005)
                    continue
                os.close(handle)
                raise FolderLocked(str(self.data), self.holder()) from None
            sign_lock(handle)
            return handle

    def open_lock(self) -> int:
        return os.open(self.lock_file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def locked(self) -> bool:
        """Whether a process runs this node now."""
        return _is_locked(self.lock_file)

    def holder(self) -> str:
        """The holder of the lock, in words."""
        facts = read_json(self.lock_file)
        if "pid" not in facts:
            return "another process"
        here = facts.get("host") == socket.gethostname()
        where = "" if here else f" on {facts.get('host')}"
        return f"process {facts['pid']}{where} since {facts.get('since')}"

    def standbys(self) -> Iterator[int]:
        """Process ids of keepers that wait for this node."""
        for path in self.root.glob("standby.*.json"):
            if _is_locked(path):
                with contextlib.suppress(ValueError, KeyError, TypeError):
                    yield int(read_json(path)["pid"])

    def memory_store(self) -> Path:
        """An empty folder in memory, for events that need not survive; if impossible, on disk."""
        digest = hashlib.sha256(str(self.root).encode()).hexdigest()[:16]
        folder = _SHARED_MEMORY / f"millstream-{os.getuid()}-{digest}"
        with contextlib.suppress(OSError):
            shutil.rmtree(folder, ignore_errors=True)
            # Without exist_ok: a folder that another user created must not be used.
            folder.mkdir(mode=0o700)
            return folder
        fallback = self.root / "memory"
        shutil.rmtree(fallback, ignore_errors=True)
        fallback.mkdir(mode=0o700)
        return fallback

    def holds_streams(self) -> bool:
        """Whether a server has stored streams in this folder."""
        return next(self.store.glob("jetstream/*/streams/*"), None) is not None


def read_json(path: Path) -> dict[str, Any]:
    """The object in one of our files; empty if the file is missing or torn."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def node_folders(data: Path) -> tuple[NodeFolder, ...]:
    """The nodes this data folder was created for; none if it was never used."""
    names = read_json(data / _LAYOUT_FILE).get("nodes", [])
    return tuple(NodeFolder(data, str(name)) for name in names)


def check_layout(data: Path, names: tuple[str, ...], *, clustered: bool) -> None:
    """Refuse a folder that was created for other nodes; record these nodes in a new one.

    A single server that opened the store of a cluster's node, or the other way round, would find
    orphaned streams.
    """
    found = read_json(data / _LAYOUT_FILE)
    wanted = {"nodes": list(names), "clustered": clustered}
    if not found:
        write_private(str(data / _LAYOUT_FILE), json.dumps(wanted), durable=True)
        return
    if found != wanted:
        kind = "a cluster of" if found.get("clustered") else "a single server,"
        raise ConfigError(
            f"{data} has the data of {kind} {', '.join(found.get('nodes', []))}, not of "
            f"{', '.join(names)}. Start it as it was created, or use another folder (--data DIR)"
        )


def free_port(host: str, preferred: int, taken: set[int]) -> int:
    """A free port: the preferred one if possible, else a random one.

    It is below the range that the system uses for outgoing connections: otherwise a client that
    tries to reconnect to a stopped broker could be given that very port, and keep it.
    """
    candidates = [preferred] if preferred else []
    highest = _first_outgoing_port() - 1
    dice = random.SystemRandom()
    candidates += [dice.randint(_LOWEST_PORT, highest) for _ in range(_PORT_TRIES)]
    for port in candidates:
        if port not in taken and can_listen(host, port):
            taken.add(port)
            return port
    raise ConfigError(f"no free port was found on {host} after {_PORT_TRIES} tries")


def _is_locked(path: Path) -> bool:
    try:
        handle = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(handle)
    return False


def _first_outgoing_port() -> int:
    try:
        text = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="ascii")
        first = int(text.split()[0])
    except (OSError, ValueError, IndexError):
        return 32_768
    return first if first > _LOWEST_PORT + 1000 else 65_536


def can_listen(host: str, port: int) -> bool:
    """Whether no other process listens there."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen(1)
        except OSError:
            return False
    return True


def store_limit(store: Path, nodes: int) -> int:
    """How many bytes the streams of one node may use: less than the disk has.

    At this limit the server refuses publishes cleanly, while a full disk breaks a stream until
    the next start. Several nodes on one disk share it. It is rounded down by up to 3 %: the server
    puts a new stream on the node with the most free space, so nodes of a cluster that differ by
    some bytes would not share the streams.
    """
    used = sum(file.stat().st_size for file in store.rglob("*") if file.is_file())
    free = shutil.disk_usage(store).free
    if free < _LEAST_SPACE and used == 0:
        raise NoSpace(
            f"the disk of {store} has {free:,} bytes free; at least {_LEAST_SPACE:,} are needed. "
            f"Free some space or use another folder (--data DIR)"
        )
    reserve = min(_RESERVE, free // 4)
    share = max(1024 * 1024, (free - reserve) // nodes)
    step = 1 << (share.bit_length() - 6)
    return used + share // step * step


def state_file(data: Path) -> Path:
    """The file where clients on this machine find the address of the broker."""
    return data / STATE_FILE


def store_of(folder: NodeFolder, durability: Durability) -> Path:
    """The folder of the node's streams."""
    return folder.memory_store() if durability is Durability.MEMORY else folder.store
