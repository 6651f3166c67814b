"""The gateways that run with a broker, as others see them."""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from typing import Final

from millstream.broker.folder import NodeFolder, read_json
from millstream.broker.private_files import write_private
from millstream.deadline import Deadline

__all__ = ["GatewayProcess", "await_gateways", "gateways_of", "note_listening"]

_POLL: Final = 0.02  # seconds between looks
_TRIES: Final = 2  # that may fail before a start counts as failed: the first may come too early


@dataclass(frozen=True, slots=True)
class GatewayProcess:
    """A gateway that one node runs."""

    protocol: str
    address: str  # host:port that it listens on; "" while it does not
    advertised: str  # host:port that its clients are sent to
    pid: int  # 0: it does not run, and is started again soon
    restarts: int
    problem: str  # why it last ended: the last line that it printed


def note_listening(folder: NodeFolder, protocol: str, address: str, advertised: str) -> None:
    """Of a gateway: note that this process listens."""
    facts = {"pid": os.getpid(), "address": address, "advertised": advertised}
    write_private(str(folder.gateway(protocol)), json.dumps(facts))


def gateways_of(folder: NodeFolder) -> tuple[GatewayProcess, ...]:
    """The gateways that a node runs, or is about to run."""
    listed = read_json(folder.gateways).get("processes", ())
    running = {str(one.get("protocol", "")): one for one in listed}
    planned = read_json(folder.plan).get("gateways") or {}
    return tuple(_process(folder, name, running.get(name, {})) for name in {**planned, **running})


def _process(folder: NodeFolder, protocol: str, found: dict[str, object]) -> GatewayProcess:
    pid = int(str(found.get("pid", 0)))
    facts = read_json(folder.gateway(protocol))
    # A file left by a process that was killed does not describe the one that runs now.
    listens = pid != 0 and facts.get("pid") == pid
    return GatewayProcess(
        protocol=protocol,
        address=str(facts.get("address", "")) if listens else "",
        advertised=str(facts.get("advertised", "")) if listens else "",
        pid=pid,
        restarts=int(str(found.get("restarts", 0))),
        problem=str(found.get("problem", "")),
    )


def await_gateways(folders: tuple[NodeFolder, ...], seconds: float) -> tuple[GatewayProcess, ...]:
    """The gateways once all of them listen or have failed to start; at most that long."""
    deadline = Deadline(seconds)
    while True:
        found = tuple(one for folder in folders for one in gateways_of(folder))
        if deadline.passed or all(one.address or one.restarts >= _TRIES for one in found):
            return found
        time.sleep(_POLL)
