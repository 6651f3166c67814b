"""One node: its keeper process, as the owner sees it."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import select
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from millstream.broker.folder import NodeFolder, read_json
from millstream.deadline import Deadline
from millstream.errors import BrokerError, NoSpace, PortTaken, StartFailed, WrongKey
from millstream.settings import LOST_METADATA

__all__ = ["LOG_BYTES", "LOG_FILES", "Launch", "ServerNode", "explain"]

logger = logging.getLogger("millstream.broker")

LOG_BYTES: Final = 8 * 1024 * 1024  # of one log file
LOG_FILES: Final = 4  # older ones kept next to it: 40 MiB in all
_KEEPER: Final = Path(__file__).with_name("keeper.py")
_MARGIN: Final = 5.0  # seconds beyond the keeper's own limits before it is killed
_LINE_BYTES: Final = 4 * 1024 * 1024  # of one report; its log tail is far smaller
_MEBIBYTE: Final = 1024 * 1024
_RESTORE_STARTS: Final = re.compile(r"Starting restore for stream '(\S+) > (\S+)'")
_RESTORE_ENDS: Final = re.compile(r"Restored \S+ messages for stream '(\S+) > (\S+)'")
_TAKEN: Final = re.compile(r"listen tcp[46]? (\S+?):? bind: address already in use")


@dataclass(frozen=True, slots=True)
class Launch:
    """How to start a node from the files in its folder."""

    binary: Path
    embedded: bool  # it ends with this process
    single: bool  # not part of a cluster
    timeout: float = 30.0  # seconds until ready
    grace: float = 10.0  # seconds between asking the server to stop and killing it
    restarts: int = 0  # restarts of a crashed server, each minute
    health: str = "/healthz"
    monitor: dict[str, Any] = field(default_factory=dict)  # see `ask_server`
    environment: dict[str, str] = field(default_factory=dict, repr=False)  # has the store key
    on_ready: dict[str, str] = field(default_factory=dict, repr=False)  # files to write
    on_stop: tuple[str, ...] = ()  # files to remove
    remove: tuple[str, ...] = ()  # folders to remove at the end
    store: str = ""  # folder of the streams, if not the node's own
    max_memory: int = 0  # bytes of the server process; 0: no limit
    guard: tuple[str, ...] = ()  # command that runs the guard of an account, its last argument
    capture: tuple[str, ...] = ()  # command that runs a capture, with its settings file at the end
    gateway: tuple[str, ...] = ()  # command that runs a gateway, with its protocol at the end


class ServerNode:
    """A server under a keeper: `spawn` it, then `await_ready`."""

    def __init__(self, folder: NodeFolder) -> None:
        self.folder = folder
        self.keeper_pid = 0
        self._server_pid = 0
        self.waiting = False  # as a standby: another process holds the lock
        self._process: subprocess.Popen[bytes] | None = None
        self._rest = b""
        self._launch: Launch | None = None

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def url(self) -> str:
        return str(read_json(self.folder.plan)["url"])

    @property
    def monitor(self) -> str:
        return str(read_json(self.folder.plan)["monitor"].get("http", ""))

    @property
    def server_pid(self) -> int:
        """Process id of the server; it changes when the keeper restarts the server."""
        facts = read_json(self.folder.state)
        mine = facts.get("pid") == self.keeper_pid
        return int(facts["server"]) if mine else self._server_pid

    @property
    def running(self) -> bool:
        """Whether the keeper is alive and not just waiting."""
        return self._process is not None and self._process.poll() is None and not self.waiting

    @property
    def report_pipe(self) -> int:
        """Readable when the keeper has something to report."""
        if self._process is None:
            raise BrokerError(f"node {self.name} was not started")
        return int(_pipe(self._process.stdout).fileno())

    def spawn(self, launch: Launch, lock: int) -> None:
        """Start the keeper, which starts the server; `lock` is held already or waited for."""
        plan = {
            "binary": str(launch.binary),
            "folder": str(self.folder.root),
            "lock": lock,
            "embedded": launch.embedded,
            "single": launch.single,
            "timeout": launch.timeout,
            "grace": launch.grace,
            "restarts": launch.restarts,
            "health": launch.health,
            "monitor": launch.monitor,
            "log": [LOG_BYTES, LOG_FILES],
            "env": launch.environment,
            "on_ready": launch.on_ready,
            "on_stop": launch.on_stop,
            "remove": launch.remove,
            "store": launch.store or str(self.folder.store),
            "guards": [launch.guard, str(self.folder.plan)],
            "captures": [launch.capture, str(self.folder.plan)],
            "gateways": [launch.gateway, str(self.folder.plan)],
            "lost_key": LOST_METADATA,
            "max_memory": launch.max_memory,
        }
        self._launch, self._rest, self.waiting = launch, b"", False
        errors = os.open(self.folder.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(_KEEPER)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                pass_fds=(lock,),
                start_new_session=True,  # Ctrl-C goes to the owner, which stops the keeper in order
                bufsize=0,
            )
        except OSError as error:
            raise StartFailed(f"the keeper process could not be started: {error}") from error
        finally:
            os.close(errors)
        with contextlib.suppress(BrokenPipeError):
            _pipe(self._process.stdin).write(json.dumps(plan).encode() + b"\n")

    def await_ready(self) -> None:
        """Return once the server is ready or waits as a standby; otherwise raise the reason.

        After an error nothing of the node is left running.
        """
        launch = self._launch
        if launch is None:
            raise BrokerError(f"node {self.name} was not started")
        try:
            event = self._event(Deadline(launch.timeout + launch.grace + _MARGIN))
            while event.get("event") not in ("ready", "waiting", "failed"):
                if not event or event["event"] == "stopped":
                    raise StartFailed(f"node {self.name} ended before it was ready{self._log()}")
                # After a crash the server is started twice, see the keeper.
                again = launch.timeout if event["event"] == "checked" else 0.0
                event = self._event(Deadline(again + launch.grace + _MARGIN))
            self.keeper_pid = int(event["pid"])
            if event["event"] == "failed":
                # First "stopped": the server is gone. Then the end of the pipe: so is the lock.
                while self._event(Deadline(launch.grace + _MARGIN)):
                    continue
                raise explain(event, self.folder)
        except BaseException:
            self.abandon()
            raise
        self.waiting = event["event"] == "waiting"
        if not self.waiting:
            self._server_pid = int(event["server"])
            logger.info("node %s is ready at %s, process %d", self.name, self.url, self.server_pid)
            self._warn(event)
        if not launch.embedded:
            self._close()

    def await_takeover(self, timeout: float) -> bool:
        """Whether this standby became the owner within the timeout; raises if that failed."""
        event = self._event(Deadline(timeout))
        if not event:
            return False
        if event["event"] != "ready":
            self.abandon()
            raise explain(event, self.folder)
        self.waiting, self._server_pid = False, int(event["server"])
        self._warn(event)
        return True

    def stop(self, grace: float) -> None:
        """Stop gracefully; after `grace` seconds, kill it."""
        self.ask_to_stop(grace)
        process = self._process
        if process is None:
            return
        try:
            process.wait(grace + _MARGIN)
        except subprocess.TimeoutExpired:
            self.kill()
        self._close()

    def ask_to_stop(self, grace: float) -> None:
        """Ask it to stop, without waiting."""
        if self._process is not None:
            with contextlib.suppress(BrokenPipeError, ValueError):
                _pipe(self._process.stdin).write(f"stop {grace:.3f}".encode())

    def kill(self) -> None:
        """Kill server and keeper, as in a crash of the machine."""
        process = self._process
        for pid in (self.server_pid, self.keeper_pid):
            if pid and process is not None and process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        if process is not None:
            process.kill()
            process.wait()
        self._close()
        deadline = Deadline(_MARGIN)
        while self._holds_the_lock() and not deadline.passed:
            time.sleep(0.002)

    def _holds_the_lock(self) -> bool:
        """Whether the lock is still ours: a standby may have taken it."""
        holder = read_json(self.folder.lock_file).get("pid")
        return holder == self.keeper_pid and self.folder.locked()

    def wait(self, timeout: float | None) -> bool:
        """Block until the node has ended; False if the timeout passed first."""
        if self._process is None:
            return True
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            return False
        return True

    def terminate(self) -> None:
        """Stop a node in the background, and wait for it."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.keeper_pid, signal.SIGTERM)
        grace = self._launch.grace if self._launch else 0.0
        deadline = Deadline(grace + _MARGIN)
        while self.folder.state.exists() and not deadline.passed:
            time.sleep(0.005)

    def abandon(self) -> None:
        """Clean up after a failed start: closing the pipe ends the keeper."""
        process, launch = self._process, self._launch
        if process is None or launch is None:
            return
        self._close(keep=process)
        try:
            process.wait(launch.grace + _MARGIN)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        self._process = None

    def _close(self, keep: subprocess.Popen[bytes] | None = None) -> None:
        process, self._process = self._process, keep
        if process is None:
            return
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        if keep is None:
            process.wait()

    def _event(self, deadline: Deadline) -> dict[str, Any]:
        """The next report of the keeper; empty if it has ended or the deadline passed."""
        if self._process is None:
            return {}
        pipe = _pipe(self._process.stdout).fileno()
        while b"\n" not in self._rest and len(self._rest) < _LINE_BYTES:
            readable, _, _ = select.select([pipe], [], [], deadline.left())
            if not readable:
                return {}
            part = os.read(pipe, 65536)
            if not part:
                return {}
            self._rest += part
        line, _, self._rest = self._rest.partition(b"\n")
        event: dict[str, Any] = json.loads(line)
        return event

    def _warn(self, event: dict[str, Any]) -> None:
        """Log what is wrong although the node works."""
        for warning in event.get("warnings", ()):
            logger.warning("%s (node %s, %s)", warning, self.name, self.folder.data)

    def _log(self) -> str:
        return f"; its log is {self.folder.log}"


def explain(event: dict[str, Any], folder: NodeFolder) -> StartFailed:
    """The error for a keeper's failure report, with the cause in one sentence."""
    log, health, stage = str(event.get("log", "")), str(event.get("health", "")), event["stage"]
    if stage == "unhealthy":
        return _explain_health(_health_text(health), log, folder)
    if stage == "removed":
        return StartFailed(_removed_text(event["streams"], log, folder))
    if taken := _TAKEN.search(log):
        return PortTaken(taken[1])
    if "no space left on device" in log:
        return NoSpace(f"no space left on the disk of {folder.data}; free some and start again")
    if stage == "memory":
        return StartFailed(_memory_text(log, int(event["limit"]), folder))
    if stage == "timeout":
        state = _health_text(health) or "it does not answer"
        if stuck := _restoring(log):
            state = f"it still restores {_streams_text(stuck)}"
        return StartFailed(
            f"the server on {folder.data} was not ready in time: {state}. Its log is {folder.log}"
        )
    if stage == "stopped":
        return StartFailed(f"the start was cancelled ({health})")
    return StartFailed(f"the server ended while starting: {_reason_in(log)}")


def _explain_health(health: str, log: str, folder: NodeFolder) -> StartFailed:
    if re.search("recover keys|encryption not enabled|decrypt", log):
        return WrongKey(
            f"{folder.data} is encrypted with another key, or no key was given "
            f"({health}). The server was stopped and nothing was changed; start it with its key"
        )
    if "resolved" in health:
        return StartFailed(
            f"{folder.data} has streams of an account that is missing in the settings "
            f"({health}). Add the account again, or move its folder away"
        )
    return StartFailed(
        f"streams in {folder.data} cannot be read ({health}); the server was stopped so that "
        f"nothing overwrites them. Its log is {folder.log}"
    )


def _removed_text(streams: list[str], log: str, folder: NodeFolder) -> str:
    """Why a server that gave up streams was stopped, and what to do."""
    found = [(name.partition("/")[0], name.partition("/")[2]) for name in streams]
    reasons = [line for line in log.splitlines() if "Error recreating stream" in line]
    names = " ".join(f"--set-aside {name}" for name in streams)
    return (
        f"the server on {folder.data} cannot read {_streams_text(found)}, and was stopped before "
        f"its files were lost ({reasons[-1].strip() if reasons else f'see {folder.log}'}). "
        f"'millstream up {names}' starts without it and keeps its files"
    )


def _memory_text(log: str, limit: int, folder: NodeFolder) -> str:
    """Why a server that took too much memory was stopped, and what to do."""
    taken = f"took more than {limit // _MEBIBYTE:,} MiB of memory (max_server_memory)"
    stuck = _restoring(log)
    if not stuck:
        return f"the server on {folder.data} {taken} and was stopped. Its log is {folder.log}"
    names = " ".join(f"--set-aside {account}/{stream}" for account, stream in stuck)
    return (
        f"the server on {folder.data} {taken} while it restored {_streams_text(stuck)}, and was "
        f"stopped: the files of that stream are damaged, or it is too large. 'millstream up "
        f"{names}' starts without it and keeps its files; if it is only large, raise the limit"
    )


def _streams_text(streams: list[tuple[str, str]]) -> str:
    return " and ".join(f"the stream '{name}' of account '{account}'" for account, name in streams)


def _restoring(log: str) -> list[tuple[str, str]]:
    """Account and name of the streams whose restore has started and not ended, by the log."""
    found: dict[tuple[str, str], None] = {}
    for line in log.splitlines():
        if "[INF] Starting nats-server" in line:
            found.clear()
        elif started := _RESTORE_STARTS.search(line):
            found[started[1], started[2]] = None
        elif ended := _RESTORE_ENDS.search(line):
            found.pop((ended[1], ended[2]), None)
    return list(found)


def _health_text(body: str) -> str:
    try:
        return str(json.loads(body).get("error", ""))
    except (ValueError, AttributeError):
        return body


def _reason_in(log: str) -> str:
    """The log line that best explains why the server ended."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    for tag in ("[FTL]", "panic:", "[ERR]", "nats-server:"):
        for line in reversed(lines):
            if tag in line:
                return line.split(tag, 1)[1].strip()
    return lines[-1] if lines else "it logged nothing"


def _pipe(pipe: Any) -> Any:
    if pipe is None:
        raise BrokerError("the keeper was started without pipes")
    return pipe
