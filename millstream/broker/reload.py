"""New settings for a running server, without dropping a connection."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from typing import Final

from millstream.broker.binary import find_binary
from millstream.broker.config import BrokerSettings
from millstream.broker.credentials import generate_users
from millstream.broker.folder import read_json
from millstream.broker.keeper import write_private
from millstream.broker.launch import render_node
from millstream.broker.process import Node
from millstream.broker.render import Ports, config_text
from millstream.deadline import Deadline
from millstream.errors import BrokerError, ConfigError

__all__ = ["reload_node"]

_DONE: Final = "Reloaded server configuration"
_REFUSED: Final = "Failed to reload server configuration: "
_CHECK_SECONDS: Final = 10.0  # `nats-server -t` reads one file


def reload_node(node: Node, settings: BrokerSettings, timeout: float) -> None:
    """Apply settings: write, let the server check, signal, and read from its log what it did.

    When the server refuses, the file of before is put back, so that a later start is sound.
    """
    folder = node.folder
    if settings.data != folder.data:
        raise ConfigError(f"a reload cannot move the data from {folder.data} to {settings.data}")
    ports = Ports(**read_json(folder.plan)["ports"])
    if settings.port not in (0, ports.client):
        raise ConfigError(
            f"a reload cannot change the port from {ports.client} to {settings.port}; restart"
        )
    plan = render_node(settings, folder, generate_users(settings), {folder.name: ports})
    before = folder.conf.read_text(encoding="utf-8")
    text = config_text(plan)
    _check(node, text)
    write_private(str(folder.conf), text)
    try:
        start = folder.log.stat().st_size
        os.kill(node.server_pid, signal.SIGHUP)
        _await_answer(node, start, Deadline(timeout))
    except BaseException:
        write_private(str(folder.conf), before)
        raise


def _check(node: Node, text: str) -> None:
    """Refuse what the server cannot even read."""
    draft = node.folder.root / "server.conf.next"
    write_private(str(draft), text)
    try:
        asked = subprocess.run(
            [str(find_binary().path), "-t", "-c", str(draft)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_CHECK_SECONDS,
            check=False,
            env=node.environment(),
        )
    except subprocess.TimeoutExpired as error:
        raise BrokerError("the server did not check its new configuration in time") from error
    finally:
        draft.unlink(missing_ok=True)
    if asked.returncode != 0:
        words = (asked.stderr or asked.stdout).strip().replace(str(draft), "configuration")
        raise ConfigError(f"the server refuses the new settings, the old ones stay: {words}")


def _await_answer(node: Node, start: int, deadline: Deadline) -> None:
    while not deadline.passed:
        log = node.folder.log
        with log.open("rb") as file:
            # A log that was rotated meanwhile begins anew.
            file.seek(start if log.stat().st_size >= start else 0)
            words = file.read().decode("utf-8", "replace")
        if _REFUSED in words:
            reason = words.split(_REFUSED, 1)[1].splitlines()[0]
            raise ConfigError(f"the server refuses the new settings, the old ones stay: {reason}")
        if _DONE in words:
            return
        time.sleep(0.005)
    raise BrokerError(f"the server did not answer the reload in time; its log is {node.folder.log}")
