"""The keeper: one small process between an owner and its nats-server.

It holds the lock of the data folder, writes the server's output to a rotated file, reports to the
owner when the server is really ready, and ends the server together with itself: gracefully when
asked or when the owner has ended, through the kernel when the keeper itself is killed.

It runs as a script in an isolated interpreter and loads only modules next to it and the standard
library, so that it starts within milliseconds. The owner writes one line of JSON, the plan, to its
standard input; each line of its output is a JSON event: waiting, checked, ready, failed, stopped.
"""

# Importing pathlib, shutil and typing would take longer than everything else at start-up.
# ruff: noqa: PTH100, PTH108, PTH110, PTH118, PTH120, PTH208
from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import signal
import sys
import time
from collections import deque

TYPE_CHECKING = False
if TYPE_CHECKING or __name__ != "__main__":
    from typing import Any, Final

    from millstream.broker import kept_files, private_files
    from millstream.broker.child_process import start_child
    from millstream.broker.log_ends import ENDS_FILE, Cut, LogEnds, block_files, cut_logs
    from millstream.broker.loss_notes import CLOSED_FILE, ClosedFiles, note_losses
    from millstream.broker.monitoring import ask_server
    from millstream.broker.private_files import ports_in, sign_lock, write_private
    from millstream.broker.process_keeper import KEEPERS
    from millstream.broker.rotated_log import TAIL_LINES, RotatedLog
    from millstream.broker.server_memory import soft_limit, used_memory
else:  # as a script: only these modules, not their package, which would load everything
    sys.path.append(os.path.dirname(os.path.abspath(__file__)))
    import kept_files
    import private_files
    from child_process import start_child
    from log_ends import ENDS_FILE, LogEnds, block_files, cut_logs
    from loss_notes import CLOSED_FILE, ClosedFiles, note_losses
    from monitoring import ask_server
    from private_files import ports_in, sign_lock, write_private
    from process_keeper import KEEPERS
    from rotated_log import TAIL_LINES, RotatedLog
    from server_memory import soft_limit, used_memory

LOCK_POLL: Final = 0.05  # seconds between tries for the lock; the delay of a takeover
ORPHAN_POLL: Final = 0.25  # seconds between checks of the parent: a fork may hold the pipe open
READY_POLL: Final = 0.004  # seconds between checks for the ports file; a server needs about 10 ms
HEALTH_POLL: Final = (0.01, 0.2)  # seconds between health requests: first pause, longest pause
START_GRACE: Final = 2.0  # seconds; a server that was never ready has nothing to finish
HEAL_POLL: Final = 2.0  # seconds between checks for a stream that a full disk broke
HEAL_WAIT: Final = 0.5  # seconds for that answer; the server's output waits meanwhile
HEAL_SPACE: Final = 16 * 1024 * 1024  # bytes that must be free again: two blocks of a stream
CHECKPOINT_POLL: Final = 5.0  # seconds between checkpoints; later events are not covered yet
CHECKPOINT_SHARE: Final = 50  # pause this many times as long as a checkpoint took
CHECKPOINT_BYTES: Final = 16 * 1024 * 1024  # of one answer, about 10,000 streams; no more
CHECKPOINT_WAIT: Final = 10.0  # seconds for the first one, which shows what a start has cut
RESTART_WINDOW: Final = 60.0  # seconds in which at most `restarts` crashes lead to a restart
CATCHING_UP: Final = "is not current"  # the server's words for a replica that must catch up
RESTART_PAUSE: Final = 0.5  # seconds before a crashed server is started again
RUNNING_FILE: Final = "running"  # while a server runs; it is left after a crash


class Keeper:
    """One node: lock, server, log, reports."""

    def __init__(self, plan: dict[str, Any], wake: int) -> None:
        self.plan = plan
        self.folder: str = plan["folder"]
        self.embedded: bool = plan["embedded"]
        self.parent = os.getppid()
        self.log = RotatedLog(os.path.join(self.folder, "server.log"), *plan["log"])
        self.wake = wake  # readable when a signal has arrived
        self.owner_open = True  # standard input is still connected to the owner
        self.stopping = ""  # the reason, once decided
        self.ready = False
        self.healing = False  # the server is being restarted
        self.failed = False  # it was reported that the server does not start
        self.closed = False  # the server takes no clients: it is looked at after a crash
        self.monitor: dict[str, Any] = plan["monitor"]  # see `ask_server`
        self.warnings: deque[str] = deque(maxlen=TAIL_LINES)  # of this start, for the owner
        self.server = 0  # process id; 0 when none runs
        self.status = 0  # exit status of the last one
        self.output = -1  # read end of the server's output
        self.cut: dict[str, Cut] = {}  # logs that this start cut, until they are reported
        self.ends: LogEnds | None = None  # only of a single server that stores on disk
        if plan["single"] and not plan["remove"]:
            self.ends = LogEnds.read(self.path(ENDS_FILE))
        how = (self.log.write, self.save_processes, start_child)
        self.beside = tuple(keep(file, plan[key], *how) for keep, file, key in KEEPERS)

    # -- reporting to the owner ---------------------------------------------------------

    def report(self, event: str, **facts: Any) -> None:
        line = json.dumps({"event": event, "pid": os.getpid(), **facts}) + "\n"
        with contextlib.suppress(OSError):  # the owner may be gone
            os.write(1, line.encode())

    def listen(self, seconds: float) -> None:
        """Wait for a signal, the owner, or the server's output, and handle it."""
        watched = [self.wake]
        if self.owner_open:
            watched.append(0)
        if self.output >= 0:
            watched.append(self.output)
        outputs = {output: kept for kept in self.beside for output in kept.outputs()}
        readable, _, _ = select.select([*watched, *outputs], [], [], seconds)
        if self.wake in readable:
            for number in os.read(self.wake, 64):
                self.on_signal(number)
        if 0 in readable:
            self.on_owner(os.read(0, 4096))
        if self.output in readable:
            data = os.read(self.output, 65536)
            if data:
                self.log.write(data)
            else:
                os.close(self.output)
                self.output = -1
        for output, kept in outputs.items():
            if output in readable:
                kept.read(output)
        if self.embedded and os.getppid() != self.parent:
            self.stopping = self.stopping or "its owner is gone"

    def on_owner(self, message: bytes) -> None:
        """The owner sent "stop <grace in seconds>" or closed the pipe: stop in both cases."""
        self.owner_open = False
        if self.embedded or not self.ready:
            self.stopping = self.stopping or "its owner is done"
        with contextlib.suppress(ValueError):
            self.plan["grace"] = float(message.decode("ascii", "replace").removeprefix("stop "))

    def on_signal(self, number: int) -> None:
        if number in (signal.SIGTERM, signal.SIGINT):
            self.stopping = self.stopping or f"signal {number}"
        elif self.server and number in (signal.SIGHUP, signal.SIGUSR2):
            os.kill(self.server, number)

    # -- the lock ----------------------------------------------------------------------

    def take_lock(self) -> bool:
        """Take the folder's lock; while another process holds it, wait."""
        lock: int = self.plan["lock"]
        marker = -1
        while not self.stopping:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if marker < 0:
                    self.ready = True  # as a standby: from now on the owner may end
                    marker = private_files.locked_file(self.path(f"standby.{os.getpid()}.json"))
                    self.report("waiting")
                self.listen(LOCK_POLL)
        self.ready = False
        if marker >= 0:
            self.remove(f"standby.{os.getpid()}.json")
            os.close(marker)
        if self.stopping:
            return False
        sign_lock(lock)
        return True

    # -- the server --------------------------------------------------------------------

    def start_server(self, config: str = "server.conf") -> None:
        """Start nats-server so that it cannot outlive this process."""
        write_private(self.path(RUNNING_FILE), "")
        for old in os.listdir(self.path("run")):
            os.unlink(self.path("run", old))
        environment = soft_limit(self.plan["max_memory"]) | os.environ | self.plan["env"]
        command = [self.plan["binary"], "-c", self.path(config)]

        def run() -> None:
            # The server keeps the lock too, for systems where the kernel does not kill it with us.
            os.set_inheritable(self.plan["lock"], True)
            os.umask(0o077)
            os.execve(command[0], command, environment)

        self.server, self.output = start_child(run, "the server")

    def server_gone(self) -> int | None:
        """Exit status of the server once it has ended and its output is read; None before."""
        if not self.server:
            return self.status
        pid, status = os.waitpid(self.server, os.WNOHANG)
        if pid == 0:
            return None
        while self.output >= 0:
            self.listen(0)
        self.server, self.status = 0, os.waitstatus_to_exitcode(status)
        return self.status

    def stop_server(self, spent: float = 0.0) -> int:
        """Stop the server: ask, wait for the rest of the grace period, then kill it."""
        if self.server and self.server_gone() is None:
            os.kill(self.server, signal.SIGTERM)
        usual = self.ready or self.closed
        grace: float = self.plan["grace"] if usual else min(self.plan["grace"], START_GRACE)
        deadline = time.monotonic() + grace - spent
        while (status := self.server_gone()) is None:
            if time.monotonic() > deadline:
                os.kill(self.server, signal.SIGKILL)
                deadline = float("inf")
            self.listen(0.01)
        if status == 0 and usual:
            self.remove(RUNNING_FILE)
        return status

    # -- readiness ---------------------------------------------------------------------

    def await_ready(self) -> dict[str, Any] | None:
        """The ports, once the server listens and is healthy; None after reporting a failure."""
        deadline = time.monotonic() + self.plan["timeout"]
        ports: dict[str, Any] | None = None
        health, pause, ask_at = "", HEALTH_POLL[0], 0.0
        while not self.stopping:
            status = self.server_gone()
            if status is not None:
                self.fail("exited", status=status)
                return None
            if self.over_memory():
                self.fail("memory", limit=self.plan["max_memory"])
                return None
            if time.monotonic() > deadline:
                # The node works in its cluster; stopping it would interrupt the catching up.
                if ports is not None and not self.plan["single"] and CATCHING_UP in health:
                    text = f"it is running, but some replicas are still catching up: {health}"
                    self.warn(text.strip())
                    return ports
                self.fail("timeout", health=health)
                return None
            if ports is None:
                ports = self.read_ports()
                self.listen(READY_POLL)
                continue
            # The server logs every refused request: asking again on each log line would be an
            # endless loop.
            if time.monotonic() < ask_at:
                self.listen(max(0.0, ask_at - time.monotonic()))
                continue
            ask_at, pause = time.monotonic() + pause, min(pause * 2, HEALTH_POLL[1])
            code, health = ask_server(self.monitor, self.plan["health"])
            if code == 200:
                return ports
            # A single server has read all its streams before it listens: what is missing now
            # stays missing, and a client that creates it again would destroy the stored data.
            if self.plan["single"] and ("recovered" in health or "resolved" in health):
                self.fail("unhealthy", health=health)
                return None
        self.fail("stopped", health=self.stopping)
        return None

    def fail(self, stage: str, **facts: Any) -> None:
        """Report why the server is not ready; a closed one is started again in most cases."""
        if not self.closed or stage == "memory":
            self.failed = True
            self.report("failed", stage=stage, log=self.log.text(), **facts)

    def over_memory(self) -> bool:
        """Whether the server took more memory than it may, for a damaged stream: it is killed."""
        over: bool = 0 < self.plan["max_memory"] < used_memory(self.server)
        if over:
            self.log.write(b"[keeper] the server takes too much memory, it is killed\n")
            os.kill(self.server, signal.SIGKILL)
        return over

    def read_ports(self) -> dict[str, Any] | None:
        """The ports that the server wrote when all its listeners were open."""
        ports = ports_in(self.path("run"), self.server)
        if ports is not None and self.closed:
            self.monitor = ClosedFiles.monitor(self.folder, ports["nats"][0])
        return ports

    # -- running -----------------------------------------------------------------------

    def run(self) -> int:
        """Lock, serve, and restart a crashed server as often as the plan allows."""
        if not self.take_lock():
            self.report("stopped", status=0)
            return 0
        beside = [file for _, file, _ in KEEPERS]
        for name in beside:  # left by a keeper that was killed
            self.remove(name)
        crashes: deque[float] = deque(maxlen=max(1, self.plan["restarts"]))
        while True:
            status = self.serve()
            if self.stopping or not self.ready:
                break
            if self.healing:
                self.log.write(b"[keeper] the disk has space again, restarting the server\n")
                continue
            now = time.monotonic()
            spent = len(crashes) == crashes.maxlen and now - crashes[0] < RESTART_WINDOW
            if not self.plan["restarts"] or spent:
                break
            crashes.append(now)
            self.log.write(b"[keeper] the server ended unexpectedly, restarting it\n")
            self.listen(RESTART_PAUSE)
        for name in ("node.json", *beside, *self.plan["on_stop"]):
            self.remove(name)
        if self.plan["remove"]:
            import shutil

            for folder in self.plan["remove"]:
                shutil.rmtree(folder, ignore_errors=True)
        self.report("stopped", status=status)
        return 0 if self.ready else 1

    def serve(self) -> int:
        """Run the server from start to end; returns its exit status."""
        self.remove("node.json")  # it describes a server that has ended
        crashed = os.path.exists(self.path(RUNNING_FILE))
        if self.ends is not None and (crashed or self.ends.not_noted()):
            self.look_for_losses()
        ports = None if self.failed else self.start_and_look()
        if ports is not None and self.ends is not None and self.ends.not_noted():
            self.stop_server()  # an older copy of the files, for example
            self.look_for_losses()
            ports = self.start_and_look()
        if ports is None:
            return self.stop_server()
        started = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        facts = {"pid": os.getpid(), "server": self.server, "ports": ports, "started": started}
        write_private(self.path("node.json"), json.dumps(facts))
        for path, text in self.plan["on_ready"].items():
            with contextlib.suppress(OSError):  # a full disk; the next start writes it
                write_private(path, text, durable=path.endswith("key.json"))
        self.ready = True
        self.report("ready", server=self.server, ports=ports, warnings=list(self.warnings))
        if not self.embedded:
            private_files.detach()
            self.owner_open = False
        self.healing = False
        check_at, checkpoint_at = time.monotonic() + HEAL_POLL, time.monotonic() + CHECKPOINT_POLL
        took = deque([0.0], maxlen=2)  # seconds; the lower of two: one may have been delayed
        while not self.stopping and not self.healing and self.server_gone() is None:
            self.listen(ORPHAN_POLL)
            self.over_memory()
            for kept in self.beside:
                kept.watch(self.ask_streams)
            if time.monotonic() > check_at:
                self.healing = self.needs_healing()
                check_at = time.monotonic() + HEAL_POLL
            if (begun := time.monotonic()) > checkpoint_at:
                self.save_checkpoint()
                took.append(time.monotonic() - begun)
                checkpoint_at = time.monotonic() + max(
                    CHECKPOINT_POLL, CHECKPOINT_SHARE * min(took)
                )
        begun = time.monotonic()
        for kept in self.beside:
            kept.terminate()
        for kept in self.beside:
            kept.stop()
        if self.server:
            self.save_checkpoint(self.plan["grace"] / 2)
        return self.stop_server(time.monotonic() - begun)

    def start_and_look(self, config: str = "server.conf") -> dict[str, Any] | None:
        """Start the server and find what that has cut off its logs; its ports, if it is ready."""
        store: str = self.plan["store"]
        kept_files.remove_unbegun(store)
        if self.ends is None:
            self.start_server(config)
            return self.await_ready()
        kept_files.keep_streams(store)
        blocks = block_files(store, walk=self.closed)
        self.start_server(config)
        ports = self.await_ready()
        removed = kept_files.removed_streams(store, "" if self.closed else self.path("server.log"))
        if ports is not None and blocks:
            cuts = cut_logs(blocks)
            self.cut |= {name: cut for name, cut in cuts.items() if name not in removed}
            if not removed:
                self.save_checkpoint(CHECKPOINT_WAIT)
        if removed:
            if ports is not None:
                self.fail("removed", streams=removed)
            self.stop_server()
            kept_files.put_back(store, removed)
        kept_files.forget_streams(store)
        return None if removed else ports

    def look_for_losses(self) -> None:
        """Start a crashed server without clients, and note in its streams what it has lost.

        Otherwise clients that reconnect would read on, and store new events under lost offsets.
        """
        files = ClosedFiles(self.folder, self.plan["store"])
        if self.ends is None or not files.usable:
            return
        self.closed = True
        files.write(write_private)
        try:
            ports = self.start_and_look(CLOSED_FILE)
            if ports is not None:
                how = (ports["nats"][0], files.password, self.plan["lost_key"])
                note_losses(self.ends, how, self.keep_ends, self.warn)
        finally:
            self.stop_server()
            files.remove()
            self.closed, self.monitor = False, self.plan["monitor"]
        self.report("checked")

    def keep_ends(self) -> None:
        """Store checkpoints and losses."""
        if self.ends is not None:
            with contextlib.suppress(OSError):  # a full disk; the next checkpoint writes it
                write_private(self.path(ENDS_FILE), self.ends.text(), durable=True)

    def needs_healing(self) -> bool:
        """Whether the disk was full and no longer is: only a restart fixes the stream then."""
        code, health = ask_server(self.monitor, "/healthz", wait=HEAL_WAIT)
        if code in (0, 200) or "no space left on device" not in health:
            return False
        disk = os.statvfs(self.plan["store"])
        return disk.f_bavail * disk.f_frsize > HEAL_SPACE

    def save_processes(self, file: str, processes: list[dict[str, Any]]) -> None:
        """Save which guards, captures or gateways run, for `status`."""
        with contextlib.suppress(OSError):
            write_private(self.path(file), json.dumps({"processes": processes}))

    def ask_streams(self) -> tuple[int, str]:
        """What the server says about its streams; (0, reason) if it does not answer soon."""
        path = "/jsz?accounts=true&streams=true&config=true&limit=100000"
        return ask_server(self.monitor, path, CHECKPOINT_BYTES, HEAL_WAIT)

    def save_checkpoint(self, seconds: float = 0.0) -> None:
        """Save where each log ends now, and report logs that have become shorter.

        A server that does not answer is asked again for `seconds`.
        """
        if self.ends is None:
            return
        before, end = self.ends.text(), time.monotonic() + seconds
        code, answer = self.ask_streams()
        while code == 0 and time.monotonic() < end and self.server_gone() is None:
            self.listen(HEALTH_POLL[1])
            code, answer = self.ask_streams()
        if code != 200:
            return  # keep the old checkpoint, which is safe; also when the answer is too large
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        with contextlib.suppress(ValueError):
            for loss in self.ends.see(json.loads(answer), now, self.cut, self.plan["lost_key"]):
                self.warn(loss)
            self.cut = {}
        if self.ends.text() != before:
            self.keep_ends()

    def warn(self, text: str) -> None:
        """Write it to the log, and report it to an owner that still waits for the start."""
        self.warnings.append(text)
        self.log.write(f"[keeper] {text}\n".encode())

    # -- files -------------------------------------------------------------------------

    def path(self, *names: str) -> str:
        return os.path.join(self.folder, *names)

    def remove(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path(name))


def main() -> int:
    """Read the plan, become a daemon if it asks for that, run the node."""
    plan = private_files.read_plan()
    if plan is None:
        return 1
    if not plan["embedded"]:
        if os.fork():
            os._exit(0)  # the owner waits for this process; the node has no parent
        os.setsid()
    wake, waker = os.pipe()
    os.set_blocking(waker, False)
    signal.set_wakeup_fd(waker)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR2):
        signal.signal(number, lambda *_: None)
    return Keeper(plan, wake).run()


if __name__ == "__main__":
    sys.exit(main())
