"""The processes that a node runs beside its server: guards of topics, captures, gateways.

Standard library only: the keeper loads this file on its own. It starts them when the server is
ready, starts those that ended again after growing pauses, and ends all of them with itself.
"""

# Importing pathlib and subprocess would take longer than everything else at start-up.
# ruff: noqa: PTH123
from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from typing import Any, Final

__all__ = [
    "CAPTURES_FILE",
    "GATEWAYS_FILE",
    "GUARDS_FILE",
    "KEEPERS",
    "CaptureKeeper",
    "GatewayKeeper",
    "GuardKeeper",
    "guarded_accounts",
]

GUARDS_FILE: Final = "guards.json"
CAPTURES_FILE: Final = "captures.json"
GATEWAYS_FILE: Final = "gateways.json"
LOOK_POLL: Final = 1.0  # seconds between looks for what should run
LOOK_SHARE: Final = 50  # pause this many times as long as a look took
FIRST_PAUSE: Final = 0.5  # seconds before one that ended is started again; doubles each time
STEADY: Final = 60.0  # seconds that one runs before its pauses start from the first again
STOP_GRACE: Final = 3.0  # seconds to answer, or store, what was taken
PROBLEM_LETTERS: Final = 500
# What subjects of guarded topics start with; the same as in millstream/guarded.py.
_GUARDED: Final = "_guarded."


def guarded_accounts(answer: Mapping[str, Any]) -> set[str]:
    """The accounts with guarded topics, in the server's answer about its streams."""
    found: set[str] = set()
    for account in answer.get("account_details") or ():
        for stream in account.get("stream_detail") or ():
            subjects = (stream.get("config") or {}).get("subjects") or ()
            if any(str(subject).startswith(_GUARDED) for subject in subjects):
                found.add(str(account.get("name", "")))
    return found


class _Process:
    """One process, or the time at which it is started again."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.pid = 0
        self.output = -1  # read end of what it prints
        self.started = 0.0
        self.pause = FIRST_PAUSE
        self.due = 0.0  # when to start it
        self.restarts = 0
        self.done = False  # it ended as it was asked to, and stays so
        self.line = ""  # the last one that it printed
        self.problem = ""  # why it last ended


class _ProcessKeeper:
    """Starts, watches and ends the processes of one kind.

    The plan: the command that starts a process, whose last argument is the name of what it is for
    (none: nothing is run), and the file that says what is wanted, which a reload may change.
    """

    kind = "process"
    name_key = "name"  # of its name in reports
    longest_pause = 4.0
    may_end = False  # exit status 0 means that it is not wanted any more

    def __init__(
        self,
        file: str,
        plan: tuple[list[str], str],
        log: Callable[[bytes], None],
        report: Callable[[str, list[dict[str, Any]]], None],
        start_child: Callable[[Callable[[], None], str], tuple[int, int]],
    ) -> None:
        self._file = file  # for reports
        self._command, self._plan_file = plan
        self._log, self._report, self._start_child = log, report, start_child
        self._processes: dict[str, _Process] = {}
        self._reported: list[dict[str, Any]] = []
        self._look_at = 0.0  # when to look for what should run

    def outputs(self) -> list[int]:
        """What to watch for output."""
        return [one.output for one in self._processes.values() if one.output >= 0]

    def read(self, output: int) -> None:
        """Log what a process has printed."""
        for one in self._processes.values():
            if one.output != output:
                continue
            data = os.read(output, 65536)
            if data:
                self._log(data)
                lines = data.decode("utf-8", "replace").strip().splitlines()
                one.line = lines[-1][:PROBLEM_LETTERS] if lines else one.line
            else:
                self._close(one)

    def watch(self, ask: Callable[[], tuple[int, str]]) -> None:
        """Start what is due, and note what has ended; `ask` asks the server about its streams."""
        now = time.monotonic()
        if self._command and now >= self._look_at:
            # The plan may be incomplete while it is written; the next look reads it again.
            with contextlib.suppress(OSError, ValueError):
                self._look(ask)
            self._look_at = time.monotonic() + max(LOOK_POLL, LOOK_SHARE * (time.monotonic() - now))
        for one in self._processes.values():
            if one.pid and self._ended(one) and not one.done:
                steady = now - one.started > STEADY
                one.pause = FIRST_PAUSE if steady else min(2 * one.pause, self.longest_pause)
                one.due, one.restarts = now + one.pause, one.restarts + 1
                text = f"[keeper] the {self.kind} of {one.name} ended, restarting it\n"
                self._log(text.encode())
            if not one.pid and not one.done and now >= one.due:
                self._start(one)
                one.started = now
        self._tell()

    def _look(self, ask: Callable[[], tuple[int, str]]) -> None:
        """Add the processes that should run."""
        raise NotImplementedError

    def _planned(self, key: str) -> list[str]:
        """A list of names in the plan of the node."""
        with open(self._plan_file, encoding="utf-8") as file:
            return list(json.load(file).get(key) or ())

    def _add(self, name: str) -> None:
        self._processes.setdefault(name, _Process(name))

    def terminate(self) -> None:
        """Ask all processes to end."""
        for one in self._running():
            with contextlib.suppress(ProcessLookupError):
                os.kill(one.pid, signal.SIGTERM)

    def stop(self) -> None:
        """End all processes: ask, wait a little, kill."""
        # Those that end now, because the server does, are started again with the next server.
        done = {name: one for name, one in self._processes.items() if one.done}
        self.terminate()
        deadline = time.monotonic() + STOP_GRACE
        while any(not self._ended(one) for one in self._running()):
            if time.monotonic() > deadline:
                for one in self._running():
                    os.kill(one.pid, signal.SIGKILL)
                deadline = float("inf")
            time.sleep(0.01)
        self._processes = done
        self._tell()

    def _running(self) -> Iterator[_Process]:
        return (one for one in self._processes.values() if one.pid)

    def _ended(self, one: _Process) -> bool:
        pid, status = os.waitpid(one.pid, os.WNOHANG)
        if pid == 0:
            return False
        # Not to its end: a process that it started may still hold it open.
        while one.output >= 0 and select.select([one.output], [], [], 0)[0]:
            self.read(one.output)
        self._close(one)
        code = os.waitstatus_to_exitcode(status)
        one.pid, one.done = 0, self.may_end and code == 0
        one.problem = one.line if code >= 0 else f"it was killed by signal {-code}"
        return True

    def _close(self, one: _Process) -> None:
        if one.output >= 0:
            os.close(one.output)
            one.output = -1

    def _tell(self) -> None:
        facts = [
            {
                self.name_key: one.name,
                "pid": one.pid,
                "restarts": one.restarts,
                "problem": one.problem,
                "done": one.done,
            }
            for one in self._processes.values()
        ]
        if facts != self._reported:
            self._reported = facts
            self._report(self._file, facts)

    def _start(self, one: _Process) -> None:
        command = [*self._command, one.name]

        def run() -> None:
            os.closerange(3, 256)  # also the lock of the folder, which must be free without us
            os.execv(command[0], command)

        one.pid, one.output = self._start_child(run, f"the {self.kind}")


class GuardKeeper(_ProcessKeeper):
    """The guards of a node, one for each account that has guarded topics."""

    kind = "guard"
    name_key = "account"

    def _look(self, ask: Callable[[], tuple[int, str]]) -> None:
        accounts = set(self._planned("guards"))
        if accounts <= self._processes.keys():
            return
        code, answer = ask()
        if code == 200:
            for account in sorted(guarded_accounts(json.loads(answer)) & accounts):
                self._add(account)


class CaptureKeeper(_ProcessKeeper):
    """The captures of databases that run with a broker, one for each settings file."""

    kind = "capture"
    name_key = "file"
    longest_pause = 30.0  # a database may be away for hours
    may_end = True

    def _look(self, _ask: Callable[[], tuple[int, str]]) -> None:
        for file in self._planned("captures"):
            self._add(file)


class GatewayKeeper(_ProcessKeeper):
    """The gateways that run with a broker, one for each protocol."""

    kind = "gateway"
    name_key = "protocol"

    def _look(self, _ask: Callable[[], tuple[int, str]]) -> None:
        for protocol in self._planned("gateways"):
            self._add(protocol)


# With the file that says what runs, and the key of the plan.
KEEPERS: Final = (
    (GuardKeeper, GUARDS_FILE, "guards"),
    (CaptureKeeper, CAPTURES_FILE, "captures"),
    (GatewayKeeper, GATEWAYS_FILE, "gateways"),
)
