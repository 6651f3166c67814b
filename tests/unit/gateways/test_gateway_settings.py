"""Where the settings of a gateway come from, and how values are read and refused."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from millstream.declared import Declaration, Form, declared, declared_fields
from millstream.errors import ConfigError
from millstream.gateways.protocols import PROTOCOLS, ProtocolEntry, find_protocol
from millstream.gateways.settings import GatewaySettings
from millstream.gateways.settings_file import chosen_values, make_settings, variable_of


@dataclass(frozen=True, slots=True, kw_only=True)
class ToySettings(GatewaySettings):
    name: str = declared("toy", Declaration("Name."))
    words: tuple[str, ...] = declared((), Declaration("Words.", Form.TEXTS))
    files: tuple[Path, ...] = declared((), Declaration("Files.", Form.FILES))
    renamed: int = declared(1, Declaration("A number.", Form.NUMBER, name="count"))


def _no_gateway() -> Any:
    raise AssertionError("no gateway is made here")


TOY = ProtocolEntry("toy", "Toys", lambda: ToySettings, _no_gateway)
KAFKA = find_protocol("kafka")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def chosen(**given: Any) -> ToySettings:
    settings = make_settings(TOY, chosen_values(TOY, given))
    assert isinstance(settings, ToySettings)
    return settings


def test_defaults_are_those_of_the_class() -> None:
    assert chosen() == ToySettings()


def test_an_option_comes_before_a_variable_and_that_before_the_file(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "millstream.toml").write_text("[gateway.toy]\nport = 1\ncount = 11\nhost = '::1'\n")
    monkeypatch.setenv("MILLSTREAM_TOY_PORT", "2")
    monkeypatch.setenv("MILLSTREAM_TOY_COUNT", "12")
    found = chosen(port=3, host=None)
    assert (found.port, found.renamed, found.host) == (3, 12, "::1")


def test_the_table_is_that_of_the_gateway_s_name(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "millstream.toml").write_text("[gateway.toy]\nport = 1\n[gateway.other]\nport = 2\n")
    assert chosen().port == 1
    assert chosen(name="other").port == 2
    assert chosen(name="third").port == 0
    monkeypatch.setenv("MILLSTREAM_TOY_NAME", "other")
    assert chosen().port == 2


def test_values_are_read_as_they_are_written(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("one", "two", "cert", "key"):
        (folder / name).touch()
    (folder / "sub").mkdir()
    (folder / "millstream.toml").write_text(
        "[gateway.toy]\nmax_frame = '1MiB'\nmax_bytes = 8388608\nidle_timeout = '2m'\n"
        "words = ['a', 'b']\nfiles = ['one', 'two']\nauth = true\n"
        "tls_cert = 'cert'\ntls_key = 'key'\n"
    )
    monkeypatch.chdir(folder / "sub")  # paths are relative to the file
    found = chosen()
    assert (found.max_frame, found.max_bytes, found.idle_timeout) == (1 << 20, 8 << 20, 120.0)
    assert (found.words, found.files) == (("a", "b"), (folder / "one", folder / "two"))
    assert (found.auth, found.tls_cert) == (True, folder / "cert")


def test_variables_are_read_as_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in {
        "AUTH": "No", "MAX_FRAME": "64KiB", "FRAME_TIMEOUT": "3s", "WORDS": "a, b", "PORT": "7",
    }.items():  # fmt: skip
        monkeypatch.setenv(f"MILLSTREAM_TOY_{name}", text)
    found = chosen()
    assert (found.auth, found.max_frame, found.frame_timeout) == (False, 65536, 3.0)
    assert (found.words, found.port) == (("a", "b"), 7)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[gateway.toy]\nprot = 1", r"\[gateway.toy\] has no setting 'prot': did you mean 'port'"),
        ("[gateway.toy]\nname = 'a'", r"\[gateway.toy\] has no setting 'name'"),
        ("[gateway]\nport = 1", r"in a table of its name, \[gateway.toy\]; 'port' is none"),
        ("gateway = 1", "'gateway' must be a table"),
        ("[gateway.toy]\nport = '1'", "port: '1' is no number"),
        ("[gateway.toy]\nport = true", "port: True is no number"),
        ("[gateway.toy]\nauth = 1", "auth: 1 is no switch"),
        ("[gateway.toy]\nhost = 1", "host: 1 is no text"),
        ("[gateway.toy]\nwords = 'a'", "words: 'a' is no texts"),
        ("[gateway.toy]\nmax_frame = 'big'", "not a size"),
        ("[gateway.toy]\nidle_timeout = 'soon'", "not a duration"),
        ("[gateway.toy]\nhost = '0.0.0.0'", "Require a login"),
    ],
)
def test_what_is_wrong_in_the_file_is_named(folder: Path, text: str, words: str) -> None:
    (folder / "millstream.toml").write_text(text)
    with pytest.raises(ConfigError, match=words):
        chosen()


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("PORT", "many", "MILLSTREAM_TOY_PORT is 'many'; write a number"),
        ("AUTH", "perhaps", "MILLSTREAM_TOY_AUTH is 'perhaps'; write true or false"),
    ],
)
def test_a_wrong_variable_is_named(
    monkeypatch: pytest.MonkeyPatch, name: str, text: str, words: str
) -> None:
    monkeypatch.setenv(f"MILLSTREAM_TOY_{name}", text)
    with pytest.raises(ConfigError, match=words):
        chosen()


def test_settings_of_a_plan_are_complete_without_file_and_environment(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "millstream.toml").write_text("[gateway.toy]\nport = 1\n")
    monkeypatch.setenv("MILLSTREAM_TOY_COUNT", "12")
    assert make_settings(TOY, {"port": 5}) == replace(ToySettings(), port=5)
    with pytest.raises(ConfigError, match="the gateway has no setting 'ports'"):
        make_settings(TOY, {"ports": 5})


@pytest.mark.parametrize("name", PROTOCOLS)
def test_every_protocol_has_a_name_of_its_own_and_settings_that_work(name: str) -> None:
    entry = find_protocol(name)
    assert entry.name == name
    settings = make_settings(entry, chosen_values(entry, {}))
    assert (settings.name, settings.host) == (name, "127.0.0.1")
    assert settings.port > 0
    for _, declaration in declared_fields(entry.settings()):
        assert declaration.help.endswith(".")


def test_the_variables_of_kafka() -> None:
    assert variable_of(KAFKA, "port") == "MILLSTREAM_KAFKA_PORT"
    assert variable_of(KAFKA, "auto_create") == "MILLSTREAM_KAFKA_AUTO_CREATE"
