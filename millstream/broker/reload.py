"""New settings for a running server, without dropping a connection."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from dataclasses import replace
from typing import Final

from millstream.broker.beside import reloaded_kafka_port
from millstream.broker.binary import find_binary
from millstream.broker.config import BrokerSettings
from millstream.broker.credentials import generate_users
from millstream.broker.folder import NodeFolder, read_json, state_file
from millstream.broker.folder_users import save_accounts, with_folder_users
from millstream.broker.keys import resolve_key
from millstream.broker.launch import node_facts, render_node, state_text
from millstream.broker.private_files import write_private
from millstream.broker.render import KEY_VARIABLE, PREVIOUS_KEY_VARIABLE, Ports, config_text
from millstream.deadline import Deadline
from millstream.errors import BrokerError, ConfigError, MillstreamError
from millstream.settings import child_environment

__all__ = ["apply_config", "reload_nodes"]

_DONE: Final = "Reloaded server configuration"
_REFUSED: Final = "Failed to reload server configuration: "
# The imports of an account that a reload adds work only after the next reload (server 2.15).
_ROUNDS: Final = 2
_CHECK_SECONDS: Final = 10.0  # `nats-server -t` reads one file


def reload_nodes(folders: tuple[NodeFolder, ...], settings: BrokerSettings, timeout: float) -> None:
    """Apply settings to running nodes: check all of them first, then reload one at a time.

    A server is signalled, and the result is read from its log. If it refuses, its old
    configuration file is restored, so that a later start works.
    """
    data = folders[0].data
    if settings.data != data:
        raise ConfigError(f"a reload cannot move the data from {data} to {settings.data}")
    plans = {folder.name: read_json(folder.plan) for folder in folders}
    ports = {name: Ports(**plan["ports"]) for name, plan in plans.items()}
    own = ports[folders[0].name]
    first = own.client
    if settings.port not in (0, first):
        raise ConfigError(f"a reload cannot change the port from {first} to {settings.port}")
    ports[folders[0].name] = replace(own, kafka=reloaded_kafka_port(settings, own.kafka))
    settings = with_folder_users(settings)
    users = generate_users(settings)
    environment = child_environment(**resolve_key(settings, folders).environment())
    texts: dict[NodeFolder, str] = {}
    for folder in folders:
        plan = render_node(settings, folder, users, ports)
        texts[folder] = config_text(plan)
        _check(folder, texts[folder], environment)
        plans[folder.name] = node_facts(settings, plan, len(folders))
    _apply_all(texts, timeout)
    for folder in folders:
        write_private(str(folder.plan), json.dumps(plans[folder.name]))
    save_accounts(settings, users)
    write_private(str(state_file(data)), state_text(data))


def apply_config(texts: dict[NodeFolder, str], timeout: float) -> None:
    """Give nodes new configuration files: check all of them, then reload one at a time."""
    # The running server has the keys of its store; to check the text any will do.
    environment = child_environment(**{KEY_VARIABLE: "x" * 32, PREVIOUS_KEY_VARIABLE: "x" * 32})
    for folder, text in texts.items():
        _check(folder, text, environment)
    _apply_all(texts, timeout)


def _apply_all(texts: dict[NodeFolder, str], timeout: float) -> None:
    """Reload one node after the other; if one fails, those before it get their old text back."""
    deadline = Deadline(timeout)
    done: dict[NodeFolder, str] = {}
    try:
        for folder, text in texts.items():
            before = folder.conf.read_text(encoding="utf-8")
            _apply(folder, text, deadline)
            done[folder] = before
    except BaseException:
        for folder, before in done.items():
            # The first error is the one to report; the file is restored in any case.
            with contextlib.suppress(MillstreamError, OSError):
                _apply(folder, before, Deadline(timeout), restore=False)
        raise


def _apply(folder: NodeFolder, text: str, deadline: Deadline, *, restore: bool = True) -> None:
    before = folder.conf.read_text(encoding="utf-8")
    write_private(str(folder.conf), text)
    server = _server(folder)
    if not server or not folder.locked():
        return  # a stopped node reads the new file when it starts
    try:
        for _ in range(_ROUNDS):
            start = folder.log.stat().st_size
            os.kill(server, signal.SIGHUP)
            _await_answer(folder, server, start, deadline)
    except ProcessLookupError:
        return  # it has just died: its keeper starts it again, with the new file
    except BaseException:
        if restore:
            write_private(str(folder.conf), before)
        raise


def _check(folder: NodeFolder, text: str, environment: dict[str, str]) -> None:
    """Refuse a configuration that the server cannot parse."""
    draft = folder.root / "server.conf.next"
    write_private(str(draft), text)
    try:
        asked = subprocess.run(
            [str(find_binary().path), "-t", "-c", str(draft)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_CHECK_SECONDS,
            check=False,
            env=environment,
        )
    except subprocess.TimeoutExpired as error:
        raise BrokerError("the server did not check the new configuration in time") from error
    finally:
        draft.unlink(missing_ok=True)
    if asked.returncode != 0:
        message = (asked.stderr or asked.stdout).strip().replace(str(draft), "configuration")
        raise ConfigError(f"the server refused the new settings and keeps the old ones: {message}")


def _server(folder: NodeFolder) -> int:
    """The process of a node's server; 0: none."""
    return int(read_json(folder.state).get("server", 0))


def _await_answer(folder: NodeFolder, server: int, start: int, deadline: Deadline) -> None:
    while not deadline.passed:
        log = folder.log
        with log.open("rb") as file:
            # A log that was rotated in the meantime starts again at zero.
            file.seek(start if log.stat().st_size >= start else 0)
            text = file.read().decode("utf-8", "replace")
        if _REFUSED in text:
            reason = text.split(_REFUSED, 1)[1].splitlines()[0]
            raise ConfigError(
                f"the server refused the new settings and keeps the old ones: {reason}. "
                f"Settings that cannot change while it runs take effect after a restart"
            )
        if _DONE in text or _server(folder) != server:
            return  # done, or started again, with the new file
        time.sleep(0.005)
    raise BrokerError(f"the server did not answer the reload in time; its log is {folder.log}")
