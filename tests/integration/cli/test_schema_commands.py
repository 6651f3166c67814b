"""`millstream schema` and `millstream guard` against a real broker."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from millstream.broker import Broker
from millstream.cli.app import app
from millstream.cli.exits import Exit
from millstream.errors import ConfigError, Incompatible, SchemaNotFound, TopicNotFound, Unfit
from millstream.testing import running_broker
from tests.integration.broker.clients import PATIENCE, client
from tests.integration.cli.conftest import Cli, until
from tests.integration.cli.messaging_commands import Commands

ORDER: dict[str, Any] = {
    "type": "record",
    "name": "Order",
    "fields": [{"name": "id", "type": "long"}, {"name": "customer", "type": "string"}],
}
NOTE = {"name": "note", "type": "string", "default": ""}
WEIGHT = {"name": "weight", "type": "double"}


@pytest.fixture
def unguarded() -> Iterator[Broker]:
    """A broker that runs no guards of its own."""
    with running_broker(guards=False) as broker:
        yield broker


def schema_file(folder: Path, name: str, *more: dict[str, Any]) -> str:
    path = folder / name
    path.write_text(json.dumps({**ORDER, "fields": [*ORDER["fields"], *more]}))
    return str(path)


def invoke(*arguments: str, url: str = "") -> Result:
    return CliRunner().invoke(app, arguments, env={"NATS_URL": url} if url else {})


@pytest.fixture
def commands(millstream_url: str) -> Commands:
    return Commands(millstream_url)


def test_a_schema_is_registered_evolved_listed_and_shown(
    commands: Commands, tmp_path: Path
) -> None:
    one, two = schema_file(tmp_path, "one.avsc"), schema_file(tmp_path, "two.avsc", NOTE)
    found = commands.json("schema", "register", "orders", one, "--create", "--wire-format", "avro")
    assert (found["version"], found["wire_format"], found["mode"]) == (1, "avro", "BACKWARD")
    assert commands.json("schema", "register", "orders", one) == found
    evolved = commands.json("schema", "evolve", "orders", two, "--mode", "full")
    assert (evolved["version"], evolved["mode"]) == (2, "FULL")
    [record] = commands.json("schema", "ls")
    assert [version["id"] for version in record["versions"]] == [found["id"], evolved["id"]]
    assert evolved["fingerprint"] in commands("schema", "ls", "orders")
    assert "orders" in commands("schema", "ls")
    assert '"name": "note"' in commands("schema", "show", "orders", "--as", "avro")
    old = commands.json("schema", "show", "orders", "--version", "1", "--as", "spark")
    assert old["schema"] == "id bigint NOT NULL, customer string NOT NULL"
    assert "message Order" in commands("schema", "show", "orders", "--as", "proto")
    assert commands("schema", "show", "orders", "--as", "origin").strip() == Path(two).read_text()
    assert "customer: string" in commands("schema", "show", "orders", "--as", "arrow")
    assert json.loads(commands("schema", "show", "orders"))["title"]
    assert "BACKWARD" in commands("schema", "mode", "orders", "backward")


def test_a_breaking_change_is_an_error_of_evolve_and_a_finding_of_check(
    millstream_url: str, commands: Commands, tmp_path: Path
) -> None:
    one, bad = schema_file(tmp_path, "one.avsc"), schema_file(tmp_path, "bad.avsc", WEIGHT)
    good = schema_file(tmp_path, "good.avsc", NOTE)
    commands("schema", "register", "orders", one, "--create")
    with pytest.raises(Incompatible, match="field 'weight'"):
        commands("schema", "evolve", "orders", bad)
    assert commands.json("schema", "check", good, "-t", "orders") == {
        "compatible": True,
        "problems": [],
    }
    result = invoke("schema", "check", bad, "--topic", "orders", "--json", url=millstream_url)
    assert result.exit_code == Exit.UNHEALTHY
    [problem] = json.loads(result.stdout)["problems"]
    assert (problem["field"], problem["rule"], problem["version"]) == ("weight", "no_default", 1)
    result = invoke("schema", "check", bad, "-t", "orders", url=millstream_url)
    assert (result.exit_code, "weight" in result.stdout) == (Exit.UNHEALTHY, True)
    assert commands("schema", "check", bad, "-t", "orders", "--mode", "forward") == "compatible\n"


def test_a_check_needs_no_broker_when_it_has_the_files(tmp_path: Path) -> None:
    one, bad = schema_file(tmp_path, "one.avsc"), schema_file(tmp_path, "bad.avsc", WEIGHT)
    assert invoke("schema", "check", one).stdout == "sound\n"
    assert invoke("schema", "check", one, "--against", one).stdout == "compatible\n"
    result = invoke("schema", "check", bad, "--against", one, "--json")
    assert result.exit_code == Exit.UNHEALTHY
    assert json.loads(result.stdout)["compatible"] is False
    result = invoke("schema", "check", bad, "--against", one, "--topic", "t")
    assert isinstance(result.exception, ConfigError)


def test_a_schema_is_a_file_of_any_format_or_a_class(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "o.proto").write_text('syntax = "proto3"; message O { int64 id = 1; }')
    (tmp_path / "o.json").write_text(
        '{"type": "object", "title": "O", "properties": {"id": {"type": "integer"}}}'
    )
    (tmp_path / "models_of_cli_test.py").write_text(
        "import dataclasses\n@dataclasses.dataclass\nclass O:\n    id: int\n"
    )
    monkeypatch.chdir(tmp_path)
    for source in ("o.proto", "o.json", "models_of_cli_test:O"):
        assert invoke("schema", "check", source).stdout == "sound\n", source
    for source in ("models_of_cli_test:P", "nothing_of_that_name:P"):
        assert isinstance(invoke("schema", "check", source).exception, ConfigError)
    assert isinstance(invoke("schema", "check", "absent.avsc").exception, FileNotFoundError)


def test_missing_files_and_topics_are_reported(commands: Commands, tmp_path: Path) -> None:
    one = schema_file(tmp_path, "one.avsc")
    with pytest.raises(TopicNotFound):
        commands("schema", "register", "orders", one)
    with pytest.raises(SchemaNotFound):
        commands("schema", "show", "orders")
    with pytest.raises(SchemaNotFound):
        commands("schema", "evolve", "orders", one)
    assert commands.json("schema", "ls") == []
    commands("schema", "register", "orders", one, "--create")
    with pytest.raises(ConfigError, match="--as 'xml'"):
        commands("schema", "show", "orders", "--as", "xml")


def test_published_json_is_checked_and_stored_in_the_topics_format(
    commands: Commands, tmp_path: Path
) -> None:
    one = schema_file(tmp_path, "one.avsc")
    commands("schema", "register", "orders", one, "--create", "--wire-format", "avro")
    commands("pub", "-t", "orders", '{"id": 1, "customer": "ada"}')
    with pytest.raises(Exception, match="field 'id'") as refused:
        commands("pub", "-t", "orders", '{"id": "one", "customer": "ada"}')
    assert isinstance(refused.value, Unfit)
    [event] = commands.lines("topic", "tail", "orders", "-o", "beginning", "-e")
    assert event["value"] == {"id": 1, "customer": "ada"}
    assert "sound" in commands("verify", "orders")


def test_the_guard_serves_until_it_is_stopped(cli: Cli, unguarded: Broker, tmp_path: Path) -> None:
    url = unguarded.url
    one = schema_file(tmp_path, "one.avsc")
    cli("schema", "register", "orders", one, "--create", "--server", url)
    assert "is not guarded" in cli.error("guard", "orders", "--server", url)
    create = ("--create", "--guarded", "--server", url)
    assert "are its own" in cli.error("schema", "register", "orders", one, *create)
    assert "add --create" in cli.error("schema", "register", "safe", one, "--guarded")
    for _ in range(2):
        cli("schema", "register", "safe", one, *create)
    guard = cli.start("guard", "safe", "--server", url, "--json")
    assert guard.stdout is not None
    assert json.loads(guard.stdout.readline()) == {"topic": "safe", "subject": "ingress.safe"}

    async def publish() -> int:
        async with client(url) as connection:
            order = b'{"id": 1, "customer": "a"}'
            ack = await connection.jetstream().publish("ingress.safe.k", order)
            answer = await connection.request("ingress.safe.k", b"{}", timeout=PATIENCE)
            assert "error" in json.loads(answer.data)
            return int(ack.seq)

    assert asyncio.run(publish()) == 1
    guard.send_signal(signal.SIGTERM)
    until(lambda: guard.poll() is not None)
    assert guard.returncode == 0
    assert json.loads(guard.stdout.readline()) == {"stored": 1, "refused": 1}
