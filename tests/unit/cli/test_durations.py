"""A duration without a unit is refused by every command, before it connects anywhere."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from millstream.cli.app import app
from millstream.errors import ConfigError

NUMBER = "7"
COMMANDS = (
    "up --timeout",
    "up --sync-interval",
    "down --timeout",
    "node stop n1 --timeout",
    "node start n1 --timeout",
    "subscription create t s --ack-wait",
    "subscription create t s --inactive-after",
    "subscription create t s --backoff",
    "subscription create t s --backoff 1s,10s,",
    "subscription edit t s --ack-wait",
    "subscription edit t s --backoff",
    "subscription pull t s --wait",
    "subscription pause t s --for",
    "sub a.b --wait",
    "request a.b body --timeout",
    "pub a.b body --count 2 --sleep",
    "pub -t t body --ttl",
    "pub -t t body --at",
    "top --interval",
    "trace a.b --timeout",
    "pipeline run --stop-within",
    "pipeline stop --timeout",
)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_number_is_refused_with_what_may_be_meant(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "millstream.toml").write_text('[pipeline]\nname = "p"\n')
    nowhere = {"NATS_URL": "nats://127.0.0.1:1", "MILLSTREAM_DATA": str(tmp_path / "none")}
    words = f"{command} {NUMBER}".replace(", ", ",").split()
    result = CliRunner().invoke(app, words, env=nowhere)
    assert isinstance(result.exception, ConfigError), (result.exception, result.output)
    assert "Write 7s for seconds or 7d for days" in str(result.exception)


def test_the_variable_of_the_timeout_needs_a_unit_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["topic", "ls"], env={"NATS_TIMEOUT": NUMBER})
    assert "Write 7s for seconds" in str(result.exception)


@pytest.mark.parametrize("number", ["7", "7.5", '"7"'])
def test_a_number_in_the_project_file_needs_a_unit_too(
    number: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "millstream.toml").write_text(f"[broker]\nsync_interval = {number}\n")
    result = CliRunner().invoke(app, ["up"])
    assert isinstance(result.exception, ConfigError), result.output
    assert f"Write {number.strip(chr(34))}s for seconds" in str(result.exception)
