"""How a client introduces itself, and what it understands of a server's words."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import msgspec
import nkeys
import pytest

from millstream.errors import AuthenticationFailed, ConfigError
from millstream.settings import ConnectionSettings, Secret, Tls
from millstream.wire.handshake import (
    ServerAddress,
    ServerInfo,
    connect_line,
    denied_subject,
    is_authentication_error,
    parse_address,
    parse_info,
    read_creds,
)
from millstream.wire.tls import open_failure, tls_context

HERE = ServerAddress("localhost", 4222)
SEED = nkeys.encode_seed(b"x" * 32, nkeys.PREFIX_BYTE_USER).decode()


def options(settings: ConnectionSettings, address: ServerAddress = HERE, **info: Any) -> Any:
    line = connect_line(ServerInfo(**info), settings, address)
    assert line.startswith(b"CONNECT ")
    assert line.endswith(b"\r\n")
    return msgspec.json.decode(line[len(b"CONNECT ") :])


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("nats://host:1234", ServerAddress("host", 1234)),
        ("host", ServerAddress("host", 4222)),
        ("host:99", ServerAddress("host", 99)),
        ("tls://host", ServerAddress("host", 4222, tls=True)),
        ("nats://[::1]:5", ServerAddress("::1", 5)),
        ("nats://u:p@host", ServerAddress("host", 4222, False, "u", "p")),
        ("nats://u%40x:p%2Fq@host", ServerAddress("host", 4222, False, "u@x", "p/q")),
        ("nats://token@host", ServerAddress("host", 4222, False, "token")),
    ],
)
def test_an_address_is_read_from_a_url(url: str, expected: ServerAddress) -> None:
    assert parse_address(url) == expected


@pytest.mark.parametrize("url", ["", "http://host", "nats://", "nats://host:x", "nats://h:99999"])
def test_an_invalid_address_is_refused(url: str) -> None:
    with pytest.raises(ConfigError):
        parse_address(url)


@pytest.mark.parametrize(
    "url", ["nats://ann:hush@host:port", "http://ann:hush@host", "ann:hush@", "ann:hush@host:port"]
)
def test_a_wrong_address_is_refused_without_showing_its_password(url: str) -> None:
    with pytest.raises(ConfigError, match="address") as refused:
        parse_address(url)
    assert "hush" not in str(refused.value)


def test_an_address_never_shows_its_password() -> None:
    address = parse_address("nats://user:hush@[::1]:5")
    assert str(address) == "nats://[::1]:5"
    assert "hush" not in repr(address)


def test_a_client_announces_its_capabilities() -> None:
    said = options(ConnectionSettings(name="me"))
    assert said["name"] == "me"
    assert said["headers"] is said["no_responders"] is True
    assert said["verbose"] is said["pedantic"] is False
    assert not {"user", "pass", "auth_token", "nkey", "jwt"} & set(said)


def test_the_url_s_credentials_win_over_the_settings() -> None:
    settings = ConnectionSettings(user="a", password=Secret("b"))
    said = options(settings, ServerAddress("h", 1, False, "c", "d"))
    assert (said["user"], said["pass"]) == ("c", "d")
    said = options(settings)
    assert (said["user"], said["pass"]) == ("a", "b")


def test_a_token_comes_from_the_settings_or_alone_in_the_url() -> None:
    assert options(ConnectionSettings(token=Secret("t")))["auth_token"] == "t"
    assert options(ConnectionSettings(), ServerAddress("h", 1, user="t"))["auth_token"] == "t"


def test_a_key_signs_the_server_s_nonce() -> None:
    said = options(ConnectionSettings(nkey_seed=Secret(SEED)), nonce="abc")
    signature = base64.urlsafe_b64decode(said["sig"] + "==")
    key = nkeys.from_seed(SEED.encode())
    assert key.verify(b"abc", signature)
    assert said["nkey"] == key.public_key.decode()
    with pytest.raises(AuthenticationFailed):
        options(ConnectionSettings(nkey_seed=Secret(SEED)))
    with pytest.raises(ConfigError, match="seed"):
        options(ConnectionSettings(nkey_seed=Secret("rubbish")), nonce="abc")


def test_a_credentials_file_has_a_jwt_and_a_seed(tmp_path: Path) -> None:
    file = tmp_path / "user.creds"
    file.write_text(
        f"-----BEGIN NATS USER JWT-----\neyJ0.abc-_1.x\n------END NATS USER JWT------\n\n"
        f"*** important ***\n-----BEGIN USER NKEY SEED-----\n{SEED}\n"
        f"------END USER NKEY SEED------\n"
    )
    assert read_creds(str(file)) == ("eyJ0.abc-_1.x", SEED)
    said = options(ConnectionSettings(creds=str(file)), nonce="abc")
    assert said["jwt"] == "eyJ0.abc-_1.x"
    file.write_text("nothing")
    with pytest.raises(ConfigError):
        read_creds(str(file))
    with pytest.raises(ConfigError, match="cannot read"):
        read_creds(str(tmp_path / "none"))


def test_info_is_read_and_unknown_fields_are_ignored() -> None:
    info = parse_info(b'{"server_id":"X","max_payload":8,"new_field":[1],"connect_urls":["a:1"]}')
    assert (info.server_id, info.max_payload, info.connect_urls) == ("X", 8, ["a:1"])


def test_a_violation_names_operation_subject_and_queue() -> None:
    denied = denied_subject('Permissions Violation for Publish to "a.b"')
    assert denied is not None
    assert (denied.operation, denied.subject, denied.queue) == ("publish to", "a.b", "")
    denied = denied_subject('Permissions Violation for Subscription to "a" using queue "q"')
    assert denied is not None
    assert (denied.operation, denied.subject, denied.queue) == ("subscribe to", "a", "q")
    assert denied_subject("Unknown Protocol Operation") is None


def test_authentication_errors_are_recognised() -> None:
    assert is_authentication_error("'Authorization Violation'")
    assert not is_authentication_error("Authentication Timeout")  # it came late, it was not wrong
    assert not is_authentication_error("'Maximum Connections Exceeded'")


def test_tls_files_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    assert tls_context(None).check_hostname
    with pytest.raises(ConfigError, match=r"none\.pem"):
        tls_context(Tls(ca=str(tmp_path / "none.pem")))


def test_where_no_broker_listens_the_error_says_how_to_start_one() -> None:
    refused = ConnectionRefusedError(111, "Connect call failed ('127.0.0.1', 4222)")
    assert str(open_failure(refused, HERE, None, ServerInfo())) == (
        "cannot connect to nats://localhost:4222: connection refused. "
        "Start a broker with 'millstream up', or check the address"
    )
