"""Nodes in network namespaces of their own, so that a node can be isolated from its peers.

Each node of the cluster lives in a namespace on one bridge; clients reach all of them from outside.
A partition is a pair of blackhole routes: packets between the two nodes vanish, connections stay
open and hear nothing, clients still reach both sides. This needs root and `ip`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import IO, Any, Final

from tests.faults.supervisor import REPOSITORY

__all__ = ["NetworkNode", "can_partition", "heal", "isolate", "networked"]

PORT: Final = 4222
ROUTE_PORT: Final = 6222
START_SECONDS: Final = 120.0  # for a host to answer; it gives its server less time
CLOSE_SECONDS: Final = 60.0
USER, PASSWORD = "boss", "fault-tests"


def can_partition() -> str | None:
    """None if this machine can; otherwise why not."""
    if os.geteuid() != 0:
        return "partitions need root, for network namespaces"
    for command in ("ip", "nsenter"):
        if shutil.which(command) is None:
            return f"partitions need the '{command}' command"
    probe = subprocess.run(
        ["ip", "netns", "add", f"probe{os.getpid()}"], capture_output=True, check=False
    )
    if probe.returncode != 0:
        return f"no network namespaces here: {probe.stderr.decode().strip()}"
    _ip("netns", "del", f"probe{os.getpid()}")
    return None


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


class NetworkNode:
    """One node, run by a process inside its namespace that reads commands line by line."""

    def __init__(self, name: str, address: str, namespace: str) -> None:
        self.name, self.address, self.namespace = name, address, namespace
        self._host: subprocess.Popen[str] | None = None
        self._pid = 0

    @property
    def pid(self) -> int:
        return self._pid

    @property
    def server_name(self) -> str:
        return f"millstream-{self.name}"

    def open(self, folder: Path, routes: list[str]) -> None:
        plan = {"data": str(folder / "data"), "name": self.name, "address": self.address}
        errors = (folder / f"{self.name}.err").open("ab")
        command = [sys.executable, "-m", "tests.faults.node_host"]
        self._host = subprocess.Popen(
            # Not `ip netns exec`, which also copies all mounts: a disk that another test unmounts
            # would stay mounted in the copy.
            [
                "nsenter",
                f"--net=/run/netns/{self.namespace}",
                *command,
                json.dumps(plan | {"routes": routes}),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            cwd=REPOSITORY,
        )
        errors.close()

    def _order(self, word: str) -> dict[str, Any]:
        host = self._host
        if host is None or host.stdin is None or host.stdout is None:
            raise RuntimeError(f"{self.name} was not opened")
        host.stdin.write(word + "\n")
        host.stdin.flush()
        answer: dict[str, Any] = json.loads(_line(host.stdout) or '{"error": "it ended"}')
        if "error" in answer:
            raise RuntimeError(f"{self.name}: {word}: {answer['error']}")
        return answer

    def start(self) -> None:
        self._pid = int(self._order("start")["pid"])

    def kill(self) -> None:
        self._order("kill")

    def stop(self) -> None:
        self._order("stop")

    def dismiss(self) -> None:
        """Ask it to end, without waiting."""
        if self._host is not None and self._host.stdin is not None:
            with contextlib.suppress(OSError):  # it has already ended
                self._host.stdin.close()

    def close(self) -> None:
        """Return when it has ended."""
        if self._host is not None:
            self.dismiss()
            try:
                self._host.wait(CLOSE_SECONDS)
            except subprocess.TimeoutExpired:
                self._host.kill()  # its server ends with it
                self._host.wait()
            if self._host.stdout is not None:
                self._host.stdout.close()


def _line(stream: IO[str]) -> str:
    return stream.readline()


def isolate(node: NetworkNode, others: list[NetworkNode]) -> None:
    """Block all traffic between a node and its peers."""
    for other in others:
        _ip("-n", node.namespace, "route", "replace", "blackhole", f"{other.address}/32")
        _ip("-n", other.namespace, "route", "replace", "blackhole", f"{node.address}/32")


def heal(nodes: list[NetworkNode]) -> None:
    """Allow all traffic again."""
    for node in nodes:
        for other in nodes:
            if other is not node:
                with contextlib.suppress(subprocess.CalledProcessError):
                    _ip("-n", node.namespace, "route", "del", "blackhole", f"{other.address}/32")


@asynccontextmanager
async def networked(folder: Path, count: int = 3) -> AsyncIterator[list[NetworkNode]]:
    """A running cluster, each node in a namespace; everything is removed at the end."""
    run = os.getpid()
    # From the range for network benchmarks (RFC 2544), which no machine uses.
    bridge, net = f"mf{run}", f"198.{18 + run % 2}.{run // 2 % 250}"
    nodes = [NetworkNode(f"n{n}", f"{net}.{n}", f"mf{run}n{n}") for n in range(1, count + 1)]
    try:
        await asyncio.to_thread(_build, bridge, net, nodes)
        routes = [f"{node.address}:{ROUTE_PORT}" for node in nodes]
        for node in nodes:
            node.open(folder, routes)
        async with asyncio.timeout(START_SECONDS):
            await asyncio.gather(*(asyncio.to_thread(node.start) for node in nodes))
        yield nodes
    finally:
        await asyncio.to_thread(_remove, bridge, nodes)


def _build(bridge: str, net: str, nodes: list[NetworkNode]) -> None:
    _clear(bridge, nodes)  # left by a killed process with the same id
    _ip("link", "add", bridge, "type", "bridge")
    _ip("addr", "add", f"{net}.254/24", "dev", bridge)
    _ip("link", "set", bridge, "up")
    for number, node in enumerate(nodes, 1):
        outer, inner = f"{bridge}v{number}", f"{bridge}i{number}"
        _ip("netns", "add", node.namespace)
        _ip("link", "add", outer, "type", "veth", "peer", "name", inner)
        _ip("link", "set", outer, "master", bridge, "up")
        _ip("link", "set", inner, "netns", node.namespace)
        _ip("-n", node.namespace, "addr", "add", f"{node.address}/24", "dev", inner)
        _ip("-n", node.namespace, "link", "set", inner, "up")
        _ip("-n", node.namespace, "link", "set", "lo", "up")


def _remove(bridge: str, nodes: list[NetworkNode]) -> None:
    try:
        for node in nodes:
            node.dismiss()
        for node in nodes:
            node.close()
    finally:
        _clear(bridge, nodes)


def _clear(bridge: str, nodes: list[NetworkNode]) -> None:
    # A connection that ends in a partition keeps its namespace for minutes, but not its link.
    links = [f"{bridge}v{number}" for number, _ in enumerate(nodes, 1)]
    spaces = [("netns", "del", node.namespace) for node in nodes]
    for words in (*spaces, *(("link", "del", link) for link in (*links, bridge))):
        with contextlib.suppress(subprocess.CalledProcessError):
            _ip(*words)
