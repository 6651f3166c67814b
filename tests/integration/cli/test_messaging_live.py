"""The real command in processes of its own: following, answering, Ctrl-C, pipes, users."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from typing import IO

import pytest

import millstream.blocking
from millstream.settings import STATE_FILE
from tests.integration.cli.conftest import MILLSTREAM, Cli, until
from tests.integration.cli.messaging_commands import Commands

PATIENT = ("--timeout", "60s")  # for an answer that is sure to come


@pytest.fixture
def run(broker: Cli) -> Commands:
    """Short commands, in this process; those that stay are processes of their own."""
    state = json.loads((broker.folder / ".millstream" / STATE_FILE).read_text())
    return Commands(state["url"])


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cli]:
    cli = Cli(tmp_path_factory.mktemp("broker"))
    cli("up", "--port", "0")
    cli("topic", "create", "orders")
    yield cli
    cli.clean_up()


def started(cli: Cli, *arguments: str) -> subprocess.Popen[str]:
    """A command that says on stderr when it is ready."""
    process = cli.start(*arguments)
    assert process.stderr is not None
    assert process.stderr.readline().startswith(("Listening", "Answering"))
    return process


def interrupted(process: subprocess.Popen[str]) -> tuple[str, str]:
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in err
    return out, err


def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


def lines_of(processes: list[subprocess.Popen[str]], count: int) -> list[str]:
    """This many lines of the processes, whichever prints them."""
    pipes = [process.stdout.fileno() for process in processes if process.stdout is not None]
    shown = dict.fromkeys(pipes, b"")
    while sum(part.count(b"\n") for part in shown.values()) < count:
        readable, _, _ = select.select(pipes, [], [], 60)
        assert readable, shown
        for pipe in readable:
            part = os.read(pipe, 65_536)
            assert part, shown
            shown[pipe] += part
    return [line for part in shown.values() for line in part.decode().splitlines()]


def test_a_subscriber_prints_what_is_published_until_ctrl_c(broker: Cli, run: Commands) -> None:
    process = started(broker, "sub", "news.>")
    assert "Published 1 message" in run("pub", "news.eu", "hi", "-H", "A: b")
    assert line_of(process) == "#1  news.eu  hi  A: b\n"
    assert interrupted(process) == ("", "")


def test_a_queue_group_shares_messages_and_a_count_ends_it(broker: Cli, run: Commands) -> None:
    pair = [started(broker, "sub", "jobs", "-q", "team", "--json") for _ in range(2)]
    alone = started(broker, "sub", "jobs", "-c", "20", "--raw")
    sent = run.json("pub", "jobs", "job {{Count}}", "-c", "20", "--template")
    assert sent == {"subject": "jobs", "messages": 20}
    bodies = [f"job {number}" for number in range(1, 21)]
    assert alone.communicate(timeout=60)[0].splitlines() == bodies
    assert alone.returncode == 0
    shared = lines_of(pair, 20)
    assert sorted(json.loads(line)["value"] for line in shared) == sorted(bodies)
    assert [interrupted(member) for member in pair] == [("", ""), ("", "")]


def test_requests_are_answered_by_a_program_and_its_failure_is_an_error(
    broker: Cli, run: Commands
) -> None:
    process = started(broker, "reply", "shout", "--command", "tr a-z A-Z")
    failing = started(broker, "reply", "fails", "--command", "false", "-c", "1")
    assert run("request", "shout", "hello", *PATIENT) == "HELLO\n"
    assert run.json("request", "shout", "x", *PATIENT)["value"] == "X"
    assert "error 500" in run.error("request", "fails", "x", *PATIENT)
    assert failing.wait(60) == 0
    interrupted(process)
    # The server may see that it is gone a moment later; a request in between has no answer.
    until(lambda: "no service or subscriber" in run.error("request", "shout", "x"))


def test_every_responder_is_asked_and_templates_are_filled_in(broker: Cli, run: Commands) -> None:
    for name in ("a", "b"):
        answer = f"{name} {{{{Request}}}} {{{{Subject}}}}"
        started(broker, "reply", "who.*", answer, "--template", "-q", name)

    def answers() -> list[str]:
        asked = run("request", "who.there", "ping", "--replies", "0", "--raw", *PATIENT)
        return sorted(asked.splitlines())

    # The answer of one that is held up comes when the question is over already: asked again.
    until(lambda: answers() == ["a ping who.there", "b ping who.there"])
    started(broker, "reply", "echo", "--echo", "-c", "1")
    assert run("request", "echo", "same", *PATIENT) == "same\n"
    assert "one of" in run.error("reply", "x")


def test_a_tail_follows_until_ctrl_c(broker: Cli, run: Commands) -> None:
    run("pub", "-t", "orders", "before")
    process = broker.start("topic", "tail", "orders", "-o", "-1", "--raw")
    assert line_of(process) == "before\n"
    run("pub", "-t", "orders", "after")
    assert line_of(process) == "after\n"
    assert interrupted(process) == ("", "")

    def consumers() -> list[object]:
        (stream,) = [one for one in broker.json("status")["streams"] if one["name"] == "orders"]
        return list(stream["consumers"])

    until(lambda: not consumers(), 30)  # far less than one that was not removed lasts


def test_a_closed_pipe_ends_the_command_quietly(broker: Cli, run: Commands) -> None:
    run("pub", "-t", "orders", "x" * 1000, "-c", "500")
    for command in ("topic tail orders -o beginning", "export orders -"):
        done = subprocess.run(
            f"{MILLSTREAM} {command} | head -1; exit ${{PIPESTATUS[0]}}",
            shell=True,
            executable="/bin/bash",
            cwd=broker.folder,
            env=broker.environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.stdout.count("\n") == 1
        assert done.stderr == ""


def test_a_waiting_tail_ends_when_its_reader_is_gone(broker: Cli, run: Commands) -> None:
    run("pub", "-t", "orders", "one")
    process = subprocess.Popen(
        [MILLSTREAM, "topic", "tail", "orders", "-o", "-1"],
        cwd=broker.folder,
        env=broker.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    with process:
        process.stdout.readline()
        process.stdout.close()
        run("pub", "-t", "orders", "one more")
        assert process.wait(60) == 1
        assert process.stderr.read() == b""


def test_an_interrupted_import_says_how_to_continue(broker: Cli, run: Commands) -> None:
    run("topic", "create", "slow")
    process = subprocess.Popen(
        [MILLSTREAM, "import", "slow", "-", "--name", "pipe"],
        cwd=broker.folder,
        env=broker.environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    with process:
        process.stdin.write("".join(f'{{"n": {n}}}\n' for n in range(1000)))
        process.stdin.flush()
        until(lambda: run.json("topic", "info", "slow")["messages"] >= 2)
        process.stdin.write("".join(f'{{"n": {n}}}\n' for n in range(500)))
        process.stdin.flush()
        # It reads on when it knows that the first thousand are stored.
        until(lambda: unread(process.stdin) == 0)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err == "Rows before 1,001 are stored. Run it again to continue\n"


def unread(pipe: IO[str] | None) -> int:
    """How many bytes wait in a pipe for its reader."""
    assert pipe is not None
    return int.from_bytes(fcntl.ioctl(pipe, termios.FIONREAD, bytes(4)), sys.byteorder)


def on_a_terminal(cli: Cli, *arguments: str, answer: bytes = b"") -> tuple[int, str]:
    """Exit code and screen of a command that has a terminal."""
    ours, theirs = os.openpty()
    process = subprocess.Popen(
        [MILLSTREAM, *arguments],
        cwd=cli.folder,
        env={**cli.environment, "TERM": "xterm"},
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
    )
    os.close(theirs)
    os.write(ours, answer)
    shown = b""
    with contextlib.suppress(OSError):  # the end of a terminal
        while part := os.read(ours, 65_536):
            shown += part
    os.close(ours)
    return process.wait(60), shown.decode()


def test_a_terminal_is_asked_before_anything_is_removed(broker: Cli, run: Commands) -> None:
    run("topic", "create", "doomed")
    run("pub", "-t", "doomed", "x")
    code, shown = on_a_terminal(broker, "topic", "purge", "doomed", answer=b"n\n")
    assert code == 1
    assert "Remove all events of topic 'doomed'?" in shown
    assert run.json("topic", "info", "doomed")["messages"] == 1
    code, shown = on_a_terminal(broker, "topic", "rm", "doomed", answer=b"y\n")
    assert code == 0
    assert "Removed topic 'doomed'" in shown


def test_a_terminal_shows_the_progress_of_import_and_export(broker: Cli, run: Commands) -> None:
    run("topic", "create", "rows")
    (broker.folder / "rows.jsonl").write_text("{}\n" * 10)
    for command in (("import", "rows", "rows.jsonl"), ("export", "rows", "out.csv")):
        code, shown = on_a_terminal(broker, *command)
        assert code == 0
        assert "100%" in shown
        assert "10 events" in shown


@pytest.mark.parametrize("key", [b"q", b"\x03"], ids=["q", "Ctrl-C"])
def test_top_shows_the_lag_among_many_topics_and_leaves_the_terminal_as_it_was(
    broker: Cli, run: Commands, key: bytes
) -> None:
    with millstream.blocking.connect(run.url) as mill:
        for number in range(20):
            mill.create_topic(f"many-{number}", storage="memory")
        mill.topic("many-0").publish(b"x")
        with mill.topic("many-0").subscribe("late"):
            pass
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    before = termios.tcgetattr(theirs)
    process = subprocess.Popen(
        [MILLSTREAM, "top", "--interval", "100ms"],
        cwd=broker.folder,
        env={**broker.environment, "TERM": "xterm"},
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )
    shown = b""
    while b"q quits" not in shown:
        shown += os.read(ours, 65_536)
    assert b"late" in shown
    assert b"behind" in shown
    os.write(ours, key)
    left = b""
    while process.poll() is None or select.select([ours], [], [], 0)[0]:
        if select.select([ours], [], [], 0.1)[0]:
            left += os.read(ours, 65_536)
    assert process.returncode == (0 if key == b"q" else 130)
    assert termios.tcgetattr(theirs) == before
    assert b"late" in left.rpartition(b"\x1b[?1049l")[2], "the lag stays"
    os.close(ours)
    os.close(theirs)


def test_an_unreachable_broker_is_exit_code_3(cli: Cli) -> None:
    assert "cannot connect" in cli.error("topic", "ls", "-s", "nats://127.0.0.1:1", code=3)


def test_a_broker_with_users_is_used_as_its_admin_from_its_own_folder(cli: Cli) -> None:
    cli("up", "--port", "0", "--auth")
    cli("topic", "create", "orders")
    cli("topic", "edit", "orders", "--max-age", "1h")  # an app may not
    assert [topic["name"] for topic in cli.json("topic", "ls")] == ["orders"]
    url = cli.json("status")["url"]
    cli.error("topic", "ls", "-s", url)
