"""Options over environment over millstream.toml, and what they become."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from millstream import broker
from millstream.broker import (
    AuthCallout,
    BrokerSettings,
    ClusterSettings,
    Durability,
    Encryption,
    LeafSettings,
    Limits,
    NodeState,
    OperatorSettings,
    Role,
    ServerTls,
    State,
)
from millstream.cli.app import app
from millstream.cli.commands import up as up_module
from millstream.cli.options.broker import BROKER_OPTIONS, TABLES, LaunchOptions, settable_options
from millstream.declared import Declaration, Form, declaration_of, declared
from millstream.errors import ConfigError, MillstreamError
from millstream.settings import Secret

Up = Callable[..., BrokerSettings]


@pytest.fixture
def up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Up:
    """Runs `millstream up` with the given options and returns the settings it would start with."""
    monkeypatch.chdir(tmp_path)
    for name in ("MILLSTREAM_DATA", "MILLSTREAM_PORT", "MILLSTREAM_CLUSTER_SECRET"):
        monkeypatch.delenv(name, raising=False)
    asked: list[BrokerSettings] = []

    def record(
        settings: BrokerSettings,
        *,
        nodes: int,
        standby: bool,
        timeout: float,
        set_aside: tuple[str, ...],
    ) -> State:
        asked.append(settings)
        node = NodeState("n1", "nats://x", "http://x", 1, 2, tmp_path, tmp_path / "log", True)
        return State(
            url="nats://x", pid=1, data=settings.data, nodes=(node,) * nodes, started="now",
            durability=settings.durability, secured=settings.secured, tls=False,
            standby=(7,) * standby,
        )  # fmt: skip

    monkeypatch.setattr(broker, "up", record)

    def run(*arguments: str, env: dict[str, str] | None = None) -> BrokerSettings:
        result = CliRunner().invoke(app, ["up", *arguments], env=env)
        if isinstance(result.exception, MillstreamError):
            raise result.exception
        assert result.exit_code == 0, result.output
        return asked[-1]

    return run


def test_the_defaults_are_safe(up: Up, tmp_path: Path) -> None:
    settings = up()
    assert settings.data == (tmp_path / ".millstream").resolve()
    assert (settings.host, settings.port) == ("127.0.0.1", 4222)
    assert settings.durability is Durability.FSYNC
    assert settings.limits.max_payload == 8 << 20
    assert settings == BrokerSettings(data=settings.data, port=4222)


def test_an_option_overrides_the_environment_which_overrides_the_project_file(
    up: Up, tmp_path: Path
) -> None:
    (tmp_path / "millstream.toml").write_text("[broker]\nport = 1111\nmonitor_port = 2222\n")
    assert up().port == 1111
    assert up(env={"MILLSTREAM_PORT": "3333"}).port == 3333
    assert up("--port", "0", env={"MILLSTREAM_PORT": "3333"}).port == 0
    assert up("--port", "0").monitor_port == 2222


def test_every_option_reaches_the_settings(up: Up, tmp_path: Path) -> None:
    for name in ("key", "old", "cert", "tkey", "ca"):
        (tmp_path / name).write_text(f"{name}-0123456789abcdef\n")
    (tmp_path / "raw.conf").write_text("debug: true\n")
    settings = up(
        "--data", "d", "--host", "::1", "--name", "mine", "--durability", "periodic",
        "--sync-interval", "250ms", "--auth", "--account", "a", "--account", "b",
        "--key-file", "key", "--previous-key-file", "old",
        "--tls-cert", "cert", "--tls-key", "tkey", "--tls-ca", "ca", "--tls-verify", "--tls-first",
        "--max-payload", "1MiB", "--max-file-store", "2GiB", "--max-memory-store", "3MiB",
        "--max-connections", "7", "--domain", "hub", "--leaf-port", "0", "--config", "raw.conf",
    )  # fmt: skip
    assert settings.data == (tmp_path / "d").resolve()
    assert (settings.host, settings.name, settings.auth) == ("::1", "mine", True)
    assert (settings.durability, settings.sync_interval) == (Durability.PERIODIC, 0.25)
    assert [account.name for account in settings.accounts] == ["a", "b"]
    assert settings.encryption is not None
    assert settings.encryption.key_file == Path("key")
    assert settings.encryption.previous == Secret("old-0123456789abcdef")
    assert settings.tls is not None
    assert (settings.tls.cert, settings.tls.verify, settings.tls.handshake_first) == (
        Path("cert"), True, True,
    )  # fmt: skip
    limits = settings.limits
    assert (limits.max_payload, limits.max_file_store) == (1 << 20, 2 << 30)
    assert (limits.max_memory_store, limits.max_connections) == (3 << 20, 7)
    assert settings.domain == "hub"
    assert settings.leaf is not None
    assert settings.leaf.port == 0
    assert settings.raw == "debug: true\n"


def test_the_options_of_a_cluster_on_several_machines_are_read(up: Up, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("0123456789abcdef\n")
    joined = ["--join", "10.0.0.1:6222", "--join", "10.0.0.2:6222", "--node-name", "a"]
    cluster = up(*joined, "--cluster-secret-file", "secret", "--cluster-port", "7000").cluster
    assert cluster is not None
    assert cluster.routes == ("10.0.0.1:6222", "10.0.0.2:6222")
    assert (cluster.node, cluster.host, cluster.port) == ("a", "127.0.0.1", 7000)
    assert cluster.secret == Secret("0123456789abcdef")
    by_variable = up(*joined, env={"MILLSTREAM_CLUSTER_SECRET": "fedcba9876543210"}).cluster
    assert by_variable is not None
    assert by_variable.secret == Secret("fedcba9876543210")


def test_the_key_may_come_from_the_environment(up: Up) -> None:
    settings = up(env={"MILLSTREAM_ENCRYPTION_KEY": "0123456789abcdef"})
    assert settings.encryption is not None
    assert settings.encryption.key == Secret("0123456789abcdef")
    assert up("--encrypt").encryption is not None


PROJECT = """
[broker]
data = "store"
nodes = 1
auth = true
join = []
key_file = "secrets/key"
max_payload = 1048576
sync_interval = "2s"
[[broker.accounts]]
name = "tenant"
max_file = "1GiB"
max_streams = 5
[[broker.users]]
name = "ann"
role = "reader"
account = "tenant"
password_file = "secrets/ann"
subscriptions = ["orders/audit"]
[[broker.users]]
name = "till"
topics = ["orders", "clicks:8"]
password_file = "secrets/ann"
[[broker.leaf_remotes]]
url = "nats-leaf://hub:7422"
user = "leaf"
password_file = "secrets/ann"
"""


def test_a_project_file_has_all_settings_and_paths_relative_to_it(
    up: Up, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "millstream.toml").write_text(PROJECT)
    (tmp_path / "secrets").mkdir()
    (tmp_path / "secrets/key").write_text("0123456789abcdef")
    (tmp_path / "secrets/ann").write_text("pw\n")
    (tmp_path / "deep").mkdir()
    monkeypatch.chdir(tmp_path / "deep")
    settings = up()
    assert settings.data == (tmp_path / "store").resolve()
    assert settings.encryption is not None
    assert settings.encryption.key_file == (tmp_path / "secrets/key").resolve()
    assert settings.limits.max_payload == 1 << 20
    assert settings.sync_interval == 2.0
    (account,) = settings.accounts
    assert (account.name, account.max_file, account.max_streams) == ("tenant", 1 << 30, 5)
    user, till = settings.users
    assert (user.name, user.role, user.account) == ("ann", Role.READER, "tenant")
    assert user.subscriptions == (("orders", "audit"),)
    assert till.topics == ("orders", "clicks:8")
    assert user.password == Secret("pw")
    assert settings.leaf is not None
    assert settings.leaf.remotes[0].password == Secret("pw")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[broker]\nprot = 1\n", "no setting 'prot'"),
        ("broker = 3\n", "must be a table"),
        ("[broker]\naccounts = 'x'\n", r"\[\[broker.accounts\]\]"),
        ("[[broker.accounts]]\nname = 'a'\ncolour = 1\n", "no setting 'colour'"),
        ("[[broker.users]]\nname = 'a'\n", "password_file"),
        ("[[broker.users]]\nrole = 'app'\n", "needs a name"),
        (
            "[[broker.users]]\nname = 'a'\ntopics = 'b'\npassword_file = 'millstream.toml'\n",
            "topics is a list of texts",
        ),
        (
            "[[broker.users]]\nname = 'a'\nsubscriptions = ['b']\n"
            "password_file = 'millstream.toml'\n",
            "topic/name",
        ),
        ("[broker\n", "cannot read"),
    ],
)
def test_a_wrong_project_file_is_refused(up: Up, tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "millstream.toml").write_text(text)
    with pytest.raises(ConfigError, match=words):
        up()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--host", "0.0.0.0"], "--auth"),
        (["--durability", "hope"], "fsync, periodic, memory"),
        (["--nodes", "0"], "--nodes"),
        (["--nodes", "3", "--join", "a:1"], "--join is for one node"),
        (["--join", "a:1"], "--node-name"),
        (["--join", "a:1", "--node-name", "a"], "--cluster-secret-file"),
        (["--node-name", "a"], "--join"),
        (["--cluster-tls"], "--join"),
        (["--join", "a:1", "--node-name", "a", "--cluster-tls"], "needs --tls-cert"),
        (["--tls-cert", "nowhere"], "--tls-key"),
        (["--tls-verify"], "--tls-cert"),
        (["--tls-cert", "nowhere", "--tls-key", "nowhere"], "no file"),
        (["--previous-key-file", "nowhere"], "--encrypt"),
        (["--max-payload", "big"], "not a size"),
        (["--timeout", "soon"], "not a duration"),
        (["--timeout", "7"], "Write 7s for seconds or 7d for days"),
        (["--sync-interval", "7"], "Write 7s for seconds or 7d for days"),
        (["--config", "nowhere"], "nowhere"),
        (["--port", "70000"], "70000"),
    ],
)
def test_a_wrong_option_is_refused_with_a_reason(up: Up, arguments: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        up(*arguments)


def test_a_secret_file_must_not_be_empty(up: Up, tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("\n")
    joined = ["--join", "a:1", "--node-name", "a", "--cluster-secret-file"]
    with pytest.raises(ConfigError, match="empty"):
        up(*joined, "empty")
    with pytest.raises(ConfigError, match="cannot read the secret"):
        up(*joined, "nowhere")


# -- one declaration ----------------------------------------------------------------------

GROUP: Any = typer.main.get_command(up_module.app)
UP: dict[str, Any] = {param.name: param for param in GROUP.commands["up"].params}
CLASSES = (
    BrokerSettings,
    ClusterSettings,
    Encryption,
    LeafSettings,
    Limits,
    OperatorSettings,
    AuthCallout,
    ServerTls,
    LaunchOptions,
)
# The data folder is an option of every command; a key is given by its file or its variable; the
# others are the classes whose fields are settings themselves.
WITHOUT_DECLARATION = {
    (BrokerSettings, "data"), (BrokerSettings, "limits"), (BrokerSettings, "tls"),
    (BrokerSettings, "cluster"), (BrokerSettings, "leaf"), (Encryption, "key"),
    (BrokerSettings, "operator"), (BrokerSettings, "callout"),
    (BrokerSettings, "kafka_settings"),  # they have a table of their own
}  # fmt: skip


def faults(*classes: Any) -> Iterator[str]:
    """Settings of a broker that are missing somewhere."""
    page = (Path(__file__).parents[3] / "docs" / "OPERATIONS.md").read_text()
    section = page.partition("## Settings")[2].partition("## When")[0]
    for cls in classes:
        for item in fields(cls):
            declaration = declaration_of(item)
            if declaration is None:
                if (cls, item.name) not in WITHOUT_DECLARATION:
                    yield f"{item.name} is not declared"
                continue
            name = declaration.name or item.name
            if declaration.form is Form.TABLES:
                if name not in TABLES or f"[[broker.{name}]]" not in section:
                    yield f"{name} is no table of millstream.toml, or of the page"
                continue
            if name not in UP or not UP[name].help:
                yield f"{name} is no option of up, or has no help"
            if name in ("foreground", "set_aside"):
                continue  # of one call
            if f"| `{name}` |" not in section:
                yield f"{name} has no row in docs/OPERATIONS.md"
            if name not in settable_options():
                yield f"{name} cannot be set in millstream.toml"


def test_every_setting_has_an_option_a_key_and_a_row_in_the_documentation() -> None:
    assert list(faults(*CLASSES)) == []


def test_a_setting_that_is_missing_somewhere_is_found() -> None:
    @dataclass
    class Added:
        more: int = declared(1, Declaration("More.", Form.NUMBER))
        bare: int = 1

    assert list(faults(Added)) == [
        "more is no option of up, or has no help",
        "more has no row in docs/OPERATIONS.md",
        "more cannot be set in millstream.toml",
        "bare is not declared",
    ]


def test_an_environment_variable_sets_its_option_and_a_secret_is_no_path() -> None:
    for item in BROKER_OPTIONS:
        holds_secret = item.declaration.form in (Form.FILE, Form.SECRET)
        expected = None if holds_secret or not item.declaration.env else item.declaration.env
        assert UP[item.name].envvar == expected
        if holds_secret and item.declaration.env:
            assert f"{item.declaration.env}, the secret itself" in UP[item.name].help


def test_defaults_are_shown_as_they_would_be_written() -> None:
    shown = {item.name: item.default_text for item in BROKER_OPTIONS}
    assert (shown["max_payload"], shown["sync_interval"], shown["port"]) == ("8MiB", "5s", "4222")
    assert shown["max_memory_store"] == "a quarter of the RAM"
    assert shown["domain"] == ""
