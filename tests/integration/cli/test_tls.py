"""A broker with TLS: its own commands connect without being told, whatever its certificate says."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

import millstream
from millstream.broker import ServerTls
from millstream.broker.certificate import trusted_file
from millstream.cli.commands.context import _certified
from millstream.cli.commands.pipeline import _broker_options
from millstream.pipelines import open_project
from millstream.pipelines.outputs import PipelineTopics
from tests.certificates import make_certificate
from tests.integration.cli.conftest import Cli


@pytest.fixture(scope="module")
def cli(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cli]:
    """A certificate as operators have it: of an authority, for a host name, not for 127.0.0.1."""
    cli = Cli(tmp_path_factory.mktemp("secured"))
    make_certificate(cli.folder, "authority", None)
    make_certificate(cli.folder, "server", "DNS:mq.example.com", "authority")
    files = ["--tls-cert", "server.pem", "--tls-key", "server.key", "--tls-ca", "authority.pem"]
    cli("up", "--port", "0", "--auth", *files, "--tls-verify", "--tls-first")
    yield cli
    cli.clean_up()


def test_commands_connect_to_their_own_broker(cli: Cli) -> None:
    cli("topic", "create", "orders")
    cli("pub", "--topic", "orders", "first")
    assert cli.json("topic", "info", "orders")["messages"] == 1
    status = cli.json("status")
    assert status["tls_names"] == ["mq.example.com"]
    assert status["client_tls"]["pin"] == str(cli.folder / "server.pem")


async def test_connect_in_that_folder_needs_only_a_user(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(cli.folder)
    for name in ("NATS_URL", "NATS_CA", "NATS_CONTEXT", "MILLSTREAM_DATA"):
        monkeypatch.delenv(name, raising=False)
    user = cli.json("env")
    async with millstream.connect(user=user["NATS_USER"], password=user["NATS_PASSWORD"]) as mill:
        await mill.flush()


def test_a_pipeline_in_that_folder_connects_too(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    file = cli.folder / "millstream.toml"
    file.write_text("[pipeline]\n")
    (cli.folder / "flows.py").write_text("")
    monkeypatch.chdir(cli.folder)
    for name in ("NATS_URL", "NATS_CONTEXT", "NATS_USER", "NATS_PASSWORD"):
        monkeypatch.setenv(name, "")  # so that it is restored afterwards
        monkeypatch.delenv(name)
    try:
        options = _broker_options(open_project(cli.folder), None)
    finally:
        file.unlink()
    assert options["tlsPin"] == str(cli.folder / "server.pem")
    assert options["tlsFirst"] == "true"
    assert "password" not in options  # Spark would show it
    with PipelineTopics(options) as topics:
        topics.check_reachable()


def test_env_and_context_say_everything_that_a_client_needs(cli: Cli) -> None:
    done = cli("env", "--json")
    assert "mq.example.com, not for 127.0.0.1" in done.stderr
    found = json.loads(done.stdout)
    pem, key = str(cli.folder / "server.pem"), str(cli.folder / "server.key")
    # The authority, which also signed the certificates of the other nodes of a cluster.
    ca = str(cli.folder / "authority.pem")
    assert (found["NATS_CA"], found["NATS_CERT"], found["NATS_KEY"]) == (ca, pem, key)
    assert found["NATS_TLS_FIRST"] == "true"
    assert cli.json("env", "--ca", pem)["NATS_CA"] == pem
    cli("context", "mine")
    content = json.loads((cli.folder / "config/nats/context/mine.json").read_text())
    assert (content["ca"], content["cert"], content["key"]) == (ca, pem, key)
    assert content["tls_first"] is True
    cli("context", "mine", "--no-tls-first", "--ca", pem)
    content = json.loads((cli.folder / "config/nats/context/mine.json").read_text())
    assert (content["ca"], content["tls_first"]) == (pem, False)


def test_an_authority_of_clients_only_is_not_trusted_for_the_server(tmp_path: Path) -> None:
    pem = make_certificate(tmp_path)
    clients = make_certificate(tmp_path, "clients", None)
    assert trusted_file(ServerTls(pem, tmp_path / "server.key", ca=clients)) == pem


def test_an_error_names_what_is_missing(cli: Cli) -> None:
    url = cli.json("status")["url"]
    cli.environment["NATS_TLS_FIRST"] = "1"
    try:
        assert "NATS_CA" in cli.error("topic", "ls", "--server", url)
    finally:
        del cli.environment["NATS_TLS_FIRST"]


def test_an_address_has_a_host_of_the_certificate_if_there_is_one() -> None:
    url = "tls://127.0.0.1:1,tls://127.0.0.1:2"
    assert _certified(url, ("127.0.0.1", "localhost")) == url
    assert _certified(url, ("localhost", "mq")) == "tls://localhost:1,tls://localhost:2"
    assert _certified(url, ("mq",)) == url
    assert _certified("tls://[::1]:1", ("localhost",)) == "tls://localhost:1"
