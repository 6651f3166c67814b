"""The guard processes of a node, one for each account that has guarded topics.

Standard library only: the keeper loads this file on its own. It starts a guard as soon as the
server has a guarded topic, starts one that ended again, and ends all of them with itself.
"""

# Importing pathlib and subprocess would take longer than everything else at start-up.
# ruff: noqa: PTH123
from __future__ import annotations

import contextlib
import json
import os
import signal
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from typing import Any, Final

__all__ = ["GUARDS_FILE", "GuardKeeper", "guarded_accounts"]

GUARDS_FILE: Final = "guards.json"
LOOK_POLL: Final = 1.0  # seconds between looks for guarded topics
LOOK_SHARE: Final = 50  # pause this many times as long as a look took
FIRST_PAUSE: Final = 0.5  # seconds before a guard that ended is started again; doubles each time
LONGEST_PAUSE: Final = 4.0
STEADY: Final = 60.0  # seconds that a guard runs before its pauses start from the first again
STOP_GRACE: Final = 3.0  # seconds for guards to answer what they took
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
    """One guard: its process, or the time at which it is started again."""

    def __init__(self, account: str) -> None:
        self.account = account
        self.pid = 0
        self.output = -1  # read end of what it prints
        self.started = 0.0
        self.pause = FIRST_PAUSE
        self.due = 0.0  # when to start it
        self.restarts = 0
        self.problem = ""  # the last line of one that ended


class GuardKeeper:
    """Starts, watches and ends the guards of one node.

    The plan: the command that starts a guard, whose last argument is the account (none: no guards
    are run), and the file that names the accounts with a user for it, which a reload may change.
    """

    def __init__(
        self,
        plan: tuple[list[str], str],
        log: Callable[[bytes], None],
        report: Callable[[list[dict[str, Any]]], None],
        start_child: Callable[[Callable[[], None], str], tuple[int, int]],
    ) -> None:
        self._command, self._plan_file = plan
        self._log, self._report, self._start_child = log, report, start_child
        self._processes: dict[str, _Process] = {}
        self._told: list[dict[str, Any]] = []
        self._look_at = 0.0  # when to look for guarded topics

    def outputs(self) -> list[int]:
        """What to watch for output."""
        return [one.output for one in self._processes.values() if one.output >= 0]

    def read(self, output: int) -> None:
        """Log what a guard has printed."""
        for one in self._processes.values():
            if one.output != output:
                continue
            data = os.read(output, 65536)
            if data:
                self._log(data)
                lines = data.decode("utf-8", "replace").strip().splitlines()
                one.problem = lines[-1][:500] if lines else one.problem
            else:
                os.close(output)
                one.output = -1

    def watch(self, ask: Callable[[], tuple[int, str]]) -> None:
        """Start what is due, and note what has ended; `ask` asks the server about its streams."""
        now = time.monotonic()
        if self._command and now >= self._look_at:
            self._look(ask)
            self._look_at = time.monotonic() + max(LOOK_POLL, LOOK_SHARE * (time.monotonic() - now))
        for one in self._processes.values():
            if one.pid and self._ended(one):
                steady = now - one.started > STEADY
                one.pause = FIRST_PAUSE if steady else min(2 * one.pause, LONGEST_PAUSE)
                one.due, one.restarts = now + one.pause, one.restarts + 1
                self._log(f"[keeper] the guard of {one.account} ended, restarting it\n".encode())
            if not one.pid and now >= one.due:
                self._start(one)
                one.started = now
        self._tell()

    def _look(self, ask: Callable[[], tuple[int, str]]) -> None:
        with contextlib.suppress(OSError, ValueError):
            with open(self._plan_file, encoding="utf-8") as file:
                accounts = set(json.load(file).get("guards") or ())
            if accounts <= self._processes.keys():
                return
            code, answer = ask()
            if code == 200:
                for account in sorted(guarded_accounts(json.loads(answer)) & accounts):
                    self._processes.setdefault(account, _Process(account))

    def stop(self) -> None:
        """End all guards: ask, wait a little, kill."""
        for one in self._running():
            with contextlib.suppress(ProcessLookupError):
                os.kill(one.pid, signal.SIGTERM)
        deadline = time.monotonic() + STOP_GRACE
        while any(not self._ended(one) for one in self._running()):
            if time.monotonic() > deadline:
                for one in self._running():
                    os.kill(one.pid, signal.SIGKILL)
                deadline = float("inf")
            time.sleep(0.01)
        for one in self._processes.values():
            if one.output >= 0:
                os.close(one.output)
        self._processes.clear()
        self._tell()

    def _running(self) -> Iterator[_Process]:
        return (one for one in self._processes.values() if one.pid)

    def _ended(self, one: _Process) -> bool:
        pid, _ = os.waitpid(one.pid, os.WNOHANG)
        if pid == 0:
            return False
        while one.output >= 0:
            self.read(one.output)
        one.pid = 0
        return True

    def _tell(self) -> None:
        facts = [
            {
                "account": one.account,
                "pid": one.pid,
                "restarts": one.restarts,
                "problem": "" if one.pid else one.problem,
            }
            for one in self._processes.values()
        ]
        if facts != self._told:
            self._told = facts
            self._report(facts)

    def _start(self, one: _Process) -> None:
        command = [*self._command, one.account]

        def run() -> None:
            os.closerange(3, 256)  # also the lock of the folder, which must be free without us
            os.execv(command[0], command)

        one.pid, one.output = self._start_child(run, "the guard")
