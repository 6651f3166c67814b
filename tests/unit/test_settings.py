"""settings.py, deadline.py and the fields of errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream import errors
from millstream.deadline import Deadline, now_ns
from millstream.errors import ConfigError, NotRunning
from millstream.settings import (
    DEFAULT_URL,
    ConnectionSettings,
    Secret,
    Tls,
    child_environment,
    data_folder,
    environment,
    find_project_file,
    parse_duration,
    parse_size,
    project_table,
    project_url,
    read_project_file,
)

NATS_VARIABLES = [
    "NATS_URL", "NATS_USER", "NATS_PASSWORD", "NATS_TOKEN", "NATS_NKEY", "NATS_CREDS",
    "NATS_CA", "NATS_CERT", "NATS_KEY", "NATS_TIMEOUT", "MILLSTREAM_DATA",
]  # fmt: skip


@pytest.fixture(autouse=True)
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty folder and an environment without our variables."""
    monkeypatch.chdir(tmp_path)
    for name in NATS_VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("250ms", 0.25), ("1m30s", 90), ("7d", 604800), ("12h", 43200), ("10us", 1e-5), ("0", 0),
     ("1.5s", 1.5), (" 2 m ", 120), (3, 3), (0.5, 0.5)],
)  # fmt: skip
def test_a_duration_is_read_in_every_unit(text: str | float, seconds: float) -> None:
    assert parse_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "abc", "5x", "s", "1m30", "-5s", -1, float("nan"), "1e3s"])
def test_a_bad_duration_is_refused(text: str | float) -> None:
    with pytest.raises(ConfigError, match="not a duration"):
        parse_duration(text)


@pytest.mark.parametrize("text", ["7", " 7 ", "0.5", "86400"])
def test_a_duration_without_a_unit_is_refused_with_what_may_be_meant(text: str) -> None:
    number = text.strip()
    meant = rf"has no unit. Write {number}s for seconds or {number}d for days"
    with pytest.raises(ConfigError, match=meant):
        parse_duration(text)
    assert parse_duration(float(text)) == float(text)  # a number in code is seconds


@pytest.mark.parametrize(
    ("text", "size"),
    [("64MiB", 64 << 20), ("8MB", 8 << 20), ("1G", 1 << 30), ("1k", 1024), ("10", 10),
     ("10B", 10), ("1.5KiB", 1536), ("2 TiB", 2 << 40), (7, 7)],
)  # fmt: skip
def test_a_size_is_read_in_every_unit(text: str | int, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "MiB", "1X", "-5M", -5, "1 2"])
def test_a_bad_size_is_refused(text: str | int) -> None:
    with pytest.raises(ConfigError, match="not a size"):
        parse_size(text)


@given(st.integers(0, 10**6), st.sampled_from(["ms", "s", "m", "h"]))
def test_integer_durations_are_exact(number: int, unit: str) -> None:
    factor = {"ms": 0.001, "s": 1, "m": 60, "h": 3600}[unit]
    assert parse_duration(f"{number}{unit}") == pytest.approx(number * factor)


def test_a_secret_is_never_shown() -> None:
    secret = Secret("hunter2")
    settings = ConnectionSettings(password=secret, token=secret, nkey_seed=secret)
    for text in (str(secret), repr(secret), f"{secret}", repr(settings), str(settings)):
        assert "hunter2" not in text
    assert secret.reveal() == "hunter2"
    assert secret == Secret("hunter2")
    assert secret != Secret("other")
    assert len({secret, Secret("hunter2")}) == 1


@pytest.mark.parametrize("url", ["nats://ann:hunter2@host:4222", "ann:hunter2@host:4222"])
def test_a_password_in_an_address_is_never_shown(url: str) -> None:
    shown = repr(ConnectionSettings(urls=(url,)))
    assert "***@host:4222" in shown
    assert "hunter2" not in shown


def test_an_empty_variable_counts_as_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NATS_URL", "")
    assert environment("NATS_URL") is None
    assert ConnectionSettings.load().urls == (DEFAULT_URL,)


def test_a_child_inherits_the_environment_with_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NATS_USER", "ann")
    child = child_environment(NATS_URL="nats://x:1")
    assert (child["NATS_USER"], child["NATS_URL"]) == ("ann", "nats://x:1")


def test_argument_beats_environment_beats_project_file_beats_running_broker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".millstream").mkdir()
    (tmp_path / ".millstream/broker.json").write_text(json.dumps({"url": "nats://running:1"}))
    assert ConnectionSettings.load().urls == ("nats://running:1",)
    (tmp_path / "millstream.toml").write_text('url = "nats://file:1, nats://file:2"\n')
    assert ConnectionSettings.load().urls == ("nats://file:1", "nats://file:2")
    monkeypatch.setenv("NATS_URL", "nats://variable:1")
    assert ConnectionSettings.load().urls == ("nats://variable:1",)
    assert ConnectionSettings.load("nats://argument:1").urls == ("nats://argument:1",)


def test_the_address_of_a_project_is_found_from_another_folder(tmp_path: Path) -> None:
    folder = tmp_path / "project" / "inner"
    data = tmp_path / "project" / "inner" / ".millstream"
    data.mkdir(parents=True)
    with pytest.raises(NotRunning, match=r"\.millstream"):
        project_url(folder)
    (data / "broker.json").write_text('{"url": "nats://running:1"}')
    assert project_url(folder) == "nats://running:1"
    (tmp_path / "project" / "millstream.toml").write_text('url = "nats://listed:2"')
    assert project_url(folder) == "nats://listed:2"
    assert project_url(tmp_path) is None


def test_a_folder_without_a_readable_state_file_has_no_broker(tmp_path: Path) -> None:
    (tmp_path / ".millstream").mkdir()
    with pytest.raises(NotRunning):
        ConnectionSettings.load()
    (tmp_path / ".millstream/broker.json").write_text("[]")
    with pytest.raises(NotRunning):
        ConnectionSettings.load()


def test_a_named_folder_is_never_replaced_by_the_default_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ConnectionSettings.load().urls == (DEFAULT_URL,)
    (tmp_path / "millstream.toml").write_text('[broker]\ndata = "named"\n')
    with pytest.raises(NotRunning, match="named"):
        ConnectionSettings.load()
    (tmp_path / "millstream.toml").unlink()
    monkeypatch.setenv("MILLSTREAM_DATA", str(tmp_path / "variable"))
    with pytest.raises(NotRunning, match="variable"):
        ConnectionSettings.load()
    assert ConnectionSettings.load("nats://given:1").urls == ("nats://given:1",)


def test_credentials_come_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "seed").write_text("SUABC\n")
    for name, value in {
        "NATS_USER": "ann", "NATS_PASSWORD": "pw", "NATS_TOKEN": "tok", "NATS_NKEY": "seed",
        "NATS_CREDS": "a.creds", "NATS_CA": "ca.pem", "NATS_TIMEOUT": "2s",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    settings = ConnectionSettings.load()
    assert settings.user == "ann"
    assert settings.password == Secret("pw")
    assert settings.token == Secret("tok")
    assert settings.nkey_seed == Secret("SUABC")
    assert settings.creds == "a.creds"
    assert settings.tls == Tls(ca="ca.pem")
    assert settings.request_timeout == 2.0
    assert ConnectionSettings.load(password="mine").password == Secret("mine")


def test_a_seed_can_be_given_directly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NATS_NKEY", "SUXYZ")
    assert ConnectionSettings.load().nkey_seed == Secret("SUXYZ")
    monkeypatch.setenv("NATS_NKEY", "no-such-file")
    with pytest.raises(ConfigError, match="no-such-file"):
        ConnectionSettings.load()


def test_wrong_connection_settings_are_refused() -> None:
    with pytest.raises(ConfigError, match="colour"):
        ConnectionSettings.load(colour="red")
    with pytest.raises(ConfigError, match="no server address"):
        ConnectionSettings.load(" , ")


def test_the_nearest_project_file_is_found(tmp_path: Path) -> None:
    deep = tmp_path / "a/b"
    deep.mkdir(parents=True)
    (tmp_path / "millstream.toml").write_text("[broker]\nport = 1\n")
    assert find_project_file(deep) == tmp_path / "millstream.toml"
    assert project_table("broker")["port"] == 1
    assert project_table("nothing") == {}


@pytest.mark.parametrize("text", ["broker = 1\n", "[broker\n", 'url = ["x"]\n'])
def test_a_wrong_project_file_is_refused_by_name(tmp_path: Path, text: str) -> None:
    (tmp_path / "millstream.toml").write_text(text)
    with pytest.raises(ConfigError, match=r"millstream\.toml"):
        project_table("broker"), ConnectionSettings.load()


def test_no_project_file_is_fine() -> None:
    assert read_project_file() == {}


def test_the_data_folder_is_argument_then_environment_then_file_then_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path.resolve()
    assert data_folder() == here / ".millstream"
    (tmp_path / "millstream.toml").write_text('[broker]\ndata = "store"\n')
    (tmp_path / "sub").mkdir()
    monkeypatch.chdir(tmp_path / "sub")
    assert data_folder() == here / "store"
    monkeypatch.setenv("MILLSTREAM_DATA", "elsewhere")
    assert data_folder() == here / "sub/elsewhere"
    assert data_folder("mine") == here / "sub/mine"


def test_a_deadline_counts_down_on_its_clock_and_never_below_zero() -> None:
    moment = [100.0]
    deadline = Deadline(2.0, clock=lambda: moment[0])
    assert (deadline.left(), deadline.left(0.5), deadline.passed) == (2.0, 0.5, False)
    moment[0] = 101.5
    assert (deadline.left(), deadline.left(5)) == (0.5, 0.5)
    moment[0] = 103.0
    assert (deadline.left(), deadline.passed) == (0.0, True)
    assert "of 2" in repr(deadline)


@pytest.mark.parametrize("seconds", [-0.1, float("nan")])
def test_a_deadline_needs_zero_seconds_or_more(seconds: float) -> None:
    with pytest.raises(ValueError, match="deadline"):
        Deadline(seconds)


def test_now_is_in_nanoseconds() -> None:
    assert 1_700_000_000 * 10**9 < now_ns() < 5_000_000_000 * 10**9


@pytest.mark.parametrize(
    ("error", "builtin", "words"),
    [
        (errors.MissingExtra("spark", "pyspark"), ImportError, "pip install 'millstream[spark]'"),
        (errors.ServerTooOld("/x/nats-server", "2.9", "2.15"), RuntimeError, "NATS_SERVER_BIN"),
        (errors.PortTaken("127.0.0.1:4222"), RuntimeError, "--port"),
        (errors.FolderLocked("d", "process 7"), RuntimeError, "process 7"),
        (errors.NotRunning("d"), RuntimeError, "millstream up"),
        (errors.PermissionDenied("publish to", "a.b"), PermissionError, "a.b"),
        (errors.RequestTimeout("a", 1.5), TimeoutError, "1.5 s"),
        (errors.PayloadTooLarge(10, 5), ValueError, "max_payload"),
        (errors.Unfit("age", "int", "str"), ValueError, "age"),
        (errors.TopicNotFound(404, 10059, "stream not found", "Declare it"), LookupError, "10059"),
    ],
)
def test_an_error_is_also_its_builtin_and_says_what_to_do(
    error: errors.MillstreamError, builtin: type[Exception], words: str
) -> None:
    assert isinstance(error, builtin)
    assert isinstance(error, errors.MillstreamError)
    assert words in str(error)
