"""How the command line speaks: exit codes, one-sentence errors, JSON, start-up time."""

from __future__ import annotations

import ast
import subprocess
import sys
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import pytest
from typer.testing import CliRunner

from millstream.cli import app as door_app
from millstream.cli.app import app
from millstream.cli.exits import EXIT_CODES, Exit
from millstream.cli.main import main
from millstream.cli.output import plain, print_json, print_table
from millstream.errors import ConfigError, NotRunning
from millstream.settings import Secret


def outcome(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: BaseException
) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a command that raises."""

    def fail() -> None:
        raise error

    monkeypatch.setattr(door_app, "app", fail)
    with pytest.raises(SystemExit) as left:
        main()
    out, err = capsys.readouterr()
    assert isinstance(left.value.code, int)
    return left.value.code, out, err


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (ConfigError("wrong number"), Exit.ERROR, "error: wrong number\n"),
        (NotRunning("data"), Exit.NOT_RUNNING, "error: no broker runs on data."),
        (PermissionError(13, "Permission denied", "/x"), 1, "error: Permission denied: /x\n"),
        (OSError("odd"), 1, "error: odd\n"),
    ],
)
def test_a_known_error_is_one_sentence_and_an_exit_code(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: Exception,
    code: int,
    text: str,
) -> None:
    found, out, err = outcome(monkeypatch, capsys, error)
    assert found == code
    assert out == ""
    assert err.startswith(text)
    assert err.count("\n") == 1


def test_ctrl_c_is_always_silent(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert outcome(monkeypatch, capsys, KeyboardInterrupt()) == (Exit.INTERRUPTED, "", "")


def test_an_unknown_error_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(door_app, "app", fail)
    with pytest.raises(ZeroDivisionError):
        main()


def test_the_help_documents_every_exit_code_and_command() -> None:
    shown = CliRunner().invoke(app, ["--help"])
    assert shown.exit_code == 0
    for command in door_app.COMMANDS:
        assert f" {command} " in shown.output
    assert "Exit codes" in shown.output
    for code in Exit:
        assert f"{int(code)} " in EXIT_CODES


def test_a_similar_name_is_suggested() -> None:
    assert "status" in CliRunner().invoke(app, ["statsu"]).output


@pytest.mark.parametrize("name", door_app.COMMANDS)
def test_every_command_has_a_help(name: str) -> None:
    shown = CliRunner().invoke(app, [name, "--help"])
    assert shown.exit_code == 0
    assert f"millstream {name}" in shown.output or f"root {name}" in shown.output


@pytest.mark.parametrize("arguments", [["nonsense"], ["up", "--nonsense"], ["up", "--port", "x"]])
def test_wrong_usage_is_exit_code_2(arguments: list[str]) -> None:
    assert CliRunner().invoke(app, arguments).exit_code == Exit.USAGE


def test_ctrl_c_is_exit_code_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(folder: Path, port: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("millstream.cli.commands.doctor.run_checks", interrupt)
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == Exit.INTERRUPTED
    assert "Traceback" not in result.output


def test_the_version_is_the_one_of_the_package() -> None:
    import millstream

    shown = CliRunner().invoke(app, ["--version"])
    assert shown.output == f"millstream {millstream.__version__}\n"


@dataclass(frozen=True)
class Thing:
    name: str
    parts: tuple[Path, ...]


class Colour(StrEnum):
    RED = "red"


def test_values_become_json_and_secrets_do_not(capsys: pytest.CaptureFixture[str]) -> None:
    thing = Thing("a", (Path("/x"),))
    assert plain({"t": thing, "c": Colour.RED, "n": None, "f": 1.5}) == {
        "t": {"name": "a", "parts": ["/x"]},
        "c": "red",
        "n": None,
        "f": 1.5,
    }
    with pytest.raises(TypeError, match="Secret"):
        plain([Secret("x")])
    print_json(thing, line=True)
    assert capsys.readouterr().out == '{"name": "a", "parts": ["/x"]}\n'


def test_a_table_in_a_pipe_is_not_cut_and_takes_text_as_it_is(
    capsys: pytest.CaptureFixture[str],
) -> None:
    print_table("Things", ["name", "#count"], [("x" * 120, 3), ("[bold]", None)])
    out = capsys.readouterr().out
    assert "x" * 120 in out
    assert "[bold]" in out


def test_a_command_runs_without_the_heavy_libraries_and_rooms(tmp_path: Path) -> None:
    heavy = [
        "millstream.cli.commands.up",
        "rich",
        "pydantic",
        "asyncio",
        "pyarrow",
        "millstream.wire",
        "millstream.messaging",
    ]
    code = f"""
import sys
from millstream.cli.main import main
sys.argv = ["millstream", "status"]
try:
    main()
except SystemExit as left:
    print([int(left.code), *(name for name in {heavy} if name in sys.modules)])
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    assert ast.literal_eval(done.stdout) == [Exit.NOT_RUNNING]


@pytest.mark.parametrize("arguments", [["topic", "create", "--help"], ["up", "--help"]])
def test_the_help_of_a_command_needs_declarations_but_no_client_and_no_broker(
    arguments: list[str],
) -> None:
    heavy = [
        "pyarrow",
        "millstream.wire",
        "millstream.messaging.client",
        "millstream.messaging.topic",
        "millstream.broker.background",
    ]
    code = f"""
import sys
from millstream.cli.main import main
sys.argv = ["millstream", *{arguments}]
try:
    main()
except SystemExit as left:
    print([int(left.code or 0), *(name for name in {heavy} if name in sys.modules)])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ast.literal_eval(done.stdout.splitlines()[-1]) == [0]
