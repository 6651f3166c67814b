"""Where connection settings come from: arguments, contexts of the nats tool, the environment."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from millstream import connect
from millstream.cli.app import app
from millstream.errors import ConfigError
from millstream.settings import STATE_FILE, ConnectionSettings, Secret, Tls, names_a_broker
from millstream.spark.options import connection_settings

VARIABLES = ("URL", "USER", "PASSWORD", "TOKEN", "NKEY", "CREDS", "CA", "CERT", "KEY", "CONTEXT")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder, which is also that of the nats tool, and an empty environment."""
    for name in (*VARIABLES, "TIMEOUT", "TLS_FIRST"):
        monkeypatch.delenv(f"NATS_{name}", raising=False)
    monkeypatch.delenv("MILLSTREAM_DATA", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(folder: Path, name: str, **fields: Any) -> None:
    file = folder / "nats" / "context" / f"{name}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({"description": "", "token": "", "nsc": "", **fields}))


def test_every_field_of_a_context_is_used(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CERTS", "/certs")
    write(
        folder,
        "east",
        url="nats://a:1,nats://b:2",
        user="ann",
        password="hush",
        ca="~/ca.pem",
        cert="$CERTS/c.pem",
        key="/k.pem",
        tls_first=True,
        jetstream_domain="hub",
        inbox_prefix="_MINE",
        color_scheme="blue",
    )
    monkeypatch.setenv("HOME", "/users/ann")
    found = ConnectionSettings.load(context="east")
    assert found.urls == ("nats://a:1", "nats://b:2")
    assert (found.user, found.password) == ("ann", Secret("hush"))
    assert found.tls == Tls("/users/ann/ca.pem", "/certs/c.pem", "/k.pem", handshake_first=True)
    assert (found.domain, found.inbox_prefix) == ("hub", "_MINE")
    assert "hush" not in repr(found)
    assert connection_settings({"context": "east"}).urls == found.urls
    connect(context="east")


def test_keys_and_creds_of_a_context_are_files(folder: Path) -> None:
    (folder / "seed.nk").write_text("SUSEED\n")
    write(folder, "key", nkey=str(folder / "seed.nk"))
    assert ConnectionSettings.load(context="key").nkey_seed == Secret("SUSEED")
    write(folder, "creds", creds="file:///ann.creds")
    assert ConnectionSettings.load(context="creds").creds == "/ann.creds"


def test_the_first_that_gives_an_address_wins(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(folder, "east", url="nats://east:1", user="ann", password="hush")
    write(folder, "west", url="nats://west:1", token="hush")
    (folder / "millstream.toml").write_text('url = "nats://project:1"')
    assert ConnectionSettings.load().urls == ("nats://project:1",)
    assert not names_a_broker()
    monkeypatch.setenv("NATS_CONTEXT", "east")
    found = ConnectionSettings.load()
    assert (found.urls, found.user) == (("nats://east:1",), "ann")
    assert names_a_broker()
    monkeypatch.setenv("NATS_URL", "nats://variable:1")
    found = ConnectionSettings.load()
    assert (found.urls, found.user) == (("nats://variable:1",), None)  # the login is not for it
    monkeypatch.setenv("NATS_USER", "bob")
    found = ConnectionSettings.load(context="west")
    assert (found.urls, found.user) == (("nats://west:1",), None)  # a login is not mixed
    found = ConnectionSettings.load("nats://given:1", context="west")
    assert (found.urls, found.token) == (("nats://given:1",), Secret("hush"))
    found = ConnectionSettings.load("nats://127.0.0.1:4222")
    assert (found.urls, found.user) == (("nats://127.0.0.1:4222",), "bob")


def test_a_selected_context_is_not_used_unless_it_is_named(folder: Path) -> None:
    write(folder, "east", url="nats://east:1")
    (folder / "nats" / "context.txt").write_text("east")
    assert ConnectionSettings.load().urls == ("nats://127.0.0.1:4222",)


def test_a_wrong_name_is_refused_with_those_that_there_are(folder: Path) -> None:
    with pytest.raises(ConfigError, match="nats context add"):
        ConnectionSettings.load(context="east")
    write(folder, "production")
    write(folder, "staging")
    with pytest.raises(ConfigError, match=r"'production'\? There are: production, staging"):
        ConnectionSettings.load(context="prodution")
    for name in ("../production", "a b", ""):
        with pytest.raises(ConfigError, match="not the name of a context"):
            ConnectionSettings.load(context=name)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("nsc", "nsc://o/a/u"),
        ("socks_proxy", "socks5://x"),
        ("jetstream_api_prefix", "JS.hub.API"),
        ("user_jwt", "ey"),
        ("password", "op://vault/item"),
        ("token", "env://TOKEN"),
        ("creds", "nsc://o/a/u"),
    ],
)
def test_a_field_that_cannot_be_honoured_is_refused(folder: Path, field: str, value: str) -> None:
    write(folder, "east", **{field: value})
    with pytest.raises(ConfigError, match=f"context 'east' .*'{field}'") as caught:
        ConnectionSettings.load(context="east")
    assert value not in str(caught.value)


def test_a_file_that_is_no_context_is_named(folder: Path) -> None:
    write(folder, "east")
    (folder / "nats" / "context" / "east.json").write_text("[]")
    with pytest.raises(ConfigError, match=r"cannot read the context 'east' in .*east.json"):
        ConnectionSettings.load(context="east")


def test_tls_of_the_running_broker_is_known_and_the_environment_adds_to_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = folder / ".millstream"
    data.mkdir()
    own: dict[str, Any] = {
        "pin": "/s.pem",
        "cert": "/s.pem",
        "key": "/s.key",
        "handshake_first": True,
    }
    state = {"url": "tls://127.0.0.1:1", "client_tls": own}
    (data / STATE_FILE).write_text(json.dumps(state))
    assert ConnectionSettings.load().tls == Tls(**own)
    monkeypatch.setenv("NATS_CA", "/ca.pem")
    assert ConnectionSettings.load().tls == Tls("/ca.pem", "/s.pem", "/s.key", True)
    assert ConnectionSettings.load("nats://other:1").tls == Tls("/ca.pem")
    monkeypatch.setenv("NATS_TLS_FIRST", "1")
    assert ConnectionSettings.load("nats://other:1").tls == Tls("/ca.pem", handshake_first=True)
    monkeypatch.setenv("NATS_TLS_FIRST", "maybe")
    with pytest.raises(ConfigError, match="NATS_TLS_FIRST"):
        ConnectionSettings.load()


def test_every_command_with_server_has_context(folder: Path) -> None:
    write(folder, "east", url="nats://127.0.0.1:1")
    for command in (["top"], ["topic", "ls"], ["pipeline", "run"], ["pub"]):
        assert "--context" in CliRunner().invoke(app, [*command, "--help"]).output
    assert "--context" not in CliRunner().invoke(app, ["logs", "--help"]).output
    done = CliRunner().invoke(app, ["topic", "ls", "--context", "eats"])
    assert "did you mean 'east'?" in str(done.exception)
    done = CliRunner().invoke(app, ["topic", "ls", "--context", "east"])
    assert "nats://127.0.0.1:1" in str(done.exception)
