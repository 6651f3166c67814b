"""What a connection says when it cannot be secured: both clients name the setting to correct."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import millstream
from millstream.broker import Broker, ServerTls
from millstream.broker.certificate import certificate_names
from millstream.deadline import Deadline
from millstream.errors import ConnectError, ConnectFailed, TlsFailed
from millstream.settings import ConnectionSettings, Tls
from millstream.testing import running_broker
from millstream.wire.handshake import ServerAddress, ServerInfo
from millstream.wire.sync.connection import BlockingConnection
from millstream.wire.tls import open_failure
from tests.certificates import make_certificate

Connect = Callable[..., None]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`server` is for another host and signed by `authority`; `client` is signed by it as well."""
    folder = tmp_path_factory.mktemp("files")
    make_certificate(folder, "authority", None)
    make_certificate(folder, "server", "DNS:mq.example.com,DNS:*.example.com", "authority")
    make_certificate(folder, "client", None, "authority")
    make_certificate(folder, "local")
    return folder


@pytest.fixture(scope="module")
def secured(files: Path) -> Iterator[Broker]:
    with running_broker(tls=ServerTls(files / "server.pem", files / "server.key")) as broker:
        yield broker


@pytest.fixture(scope="module")
def first(files: Path) -> Iterator[Broker]:
    """A broker that wants TLS first, and a certificate of every client."""
    tls = ServerTls(
        files / "local.pem",
        files / "local.key",
        files / "authority.pem",
        True,
        handshake_first=True,
    )
    with running_broker(tls=tls) as broker:
        yield broker


@pytest.fixture(scope="module")
def mutual(files: Path) -> Iterator[Broker]:
    tls = ServerTls(files / "local.pem", files / "local.key", files / "authority.pem", True)
    with running_broker(tls=tls) as broker:
        yield broker


@pytest.fixture(scope="module")
def plain() -> Iterator[Broker]:
    with running_broker() as broker:
        yield broker


def with_asyncio(url: str, tls: Tls | None, seconds: float) -> None:
    async def work() -> None:
        async with millstream.connect(url, tls=tls, connect_timeout=seconds) as mill:
            await mill.flush()

    asyncio.run(work())


def with_a_socket(url: str, tls: Tls | None, seconds: float) -> None:
    connection = BlockingConnection(ConnectionSettings(urls=(url,), tls=tls))
    try:
        connection.open(Deadline(seconds))
    finally:
        connection.close()


@pytest.fixture(params=[with_asyncio, with_a_socket])
def connect(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Connect:
    for name in ("NATS_CA", "NATS_CERT", "NATS_KEY", "NATS_TLS_FIRST"):
        monkeypatch.delenv(name, raising=False)

    def call(url: str, tls: Tls | None = None, seconds: float = 30.0) -> None:
        request.param(url, tls, seconds)

    return call


def refusal(connect: Connect, url: str, tls: Tls | None = None) -> str:
    with pytest.raises(TlsFailed) as caught:
        connect(url, tls)
    return str(caught.value)


def test_an_unknown_authority_is_named(connect: Connect, secured: Broker, files: Path) -> None:
    text = refusal(connect, secured.url)
    assert "unknown authority" in text
    assert "NATS_CA" in text
    assert "tlsCa" in text
    other = str(files / "local.pem")
    text = refusal(connect, secured.url, Tls(ca=other))
    assert f"not signed by an authority in {other}" in text
    assert "NATS_CA" in text


def test_a_wrong_host_is_named(connect: Connect, secured: Broker, files: Path) -> None:
    for trusted in ("authority", "server"):  # a listed certificate is trusted itself
        text = refusal(connect, secured.url, Tls(ca=str(files / f"{trusted}.pem")))
        assert "is not for '127.0.0.1'" in text


def test_a_pinned_certificate_is_accepted_under_any_name_and_no_other_one(
    connect: Connect, secured: Broker, files: Path
) -> None:
    chain = files / "chain.pem"
    chain.write_bytes((files / "server.pem").read_bytes() + (files / "authority.pem").read_bytes())
    connect(secured.url, Tls(pin=str(files / "server.pem")))
    connect(secured.url, Tls(pin=str(chain)))
    # Another certificate of the same authority is refused, also if the authority is in the file.
    chain.write_bytes((files / "client.pem").read_bytes() + (files / "authority.pem").read_bytes())
    assert f"is not the one in {chain}" in refusal(connect, secured.url, Tls(pin=str(chain)))


def test_a_server_without_tls_is_named(connect: Connect, plain: Broker, files: Path) -> None:
    assert "the address has tls://" in refusal(connect, plain.url.replace("nats:", "tls:"))
    text = refusal(connect, plain.url, Tls(ca=str(files / "local.pem")))
    assert "does not use TLS" in text
    assert "NATS_CA" in text
    first = Tls(ca=str(files / "local.pem"), handshake_first=True)
    assert "NATS_TLS_FIRST" in refusal(connect, plain.url, first)


def test_a_server_that_wants_tls_first_does_not_greet(
    connect: Connect, first: Broker, files: Path
) -> None:
    with pytest.raises(ConnectFailed, match="NATS_TLS_FIRST") as caught:
        connect(first.url, Tls(ca=str(files / "local.pem")), seconds=0.3)
    assert not isinstance(caught.value, TlsFailed)  # it may also be slow: trying again may help


def test_a_missing_or_strange_certificate_of_a_client_is_named(
    connect: Connect, mutual: Broker, first: Broker, files: Path
) -> None:
    ca = str(files / "local.pem")
    text = refusal(connect, mutual.url, Tls(ca=ca))
    assert "NATS_CERT and NATS_KEY" in text
    with pytest.raises(ConnectError, match="certificate"):
        connect(first.url, Tls(ca=ca, handshake_first=True))
    # Its refusal can get lost when the server closes the connection.
    with pytest.raises(ConnectFailed, match=r"local\.pem"):
        connect(mutual.url, Tls(ca=ca, cert=ca, key=str(files / "local.key")))
    own = (str(files / "client.pem"), str(files / "client.key"))
    connect(mutual.url, Tls(ca, *own))
    connect(first.url, Tls(ca, *own, handshake_first=True))


@pytest.mark.parametrize(("code", "words"), [(10, "expired"), (9, "clocks")])
def test_a_certificate_out_of_its_time_is_named(code: int, words: str) -> None:
    error = ssl.SSLCertVerificationError("verify failed")
    error.verify_code, error.verify_message = code, "as OpenSSL says"
    failure = open_failure(error, ServerAddress("mq", 4222, tls=True), None, ServerInfo())
    assert isinstance(failure, TlsFailed)
    assert "tls://mq:4222" in str(failure)
    assert words in str(failure)


def test_the_names_of_a_certificate_are_known(files: Path) -> None:
    server = ServerTls(files / "server.pem", files / "server.key")
    assert certificate_names(server) == ("mq.example.com", "*.example.com")
    local = ServerTls(files / "local.pem", files / "local.key")
    assert certificate_names(local) == ("127.0.0.1",)
    assert certificate_names(ServerTls(files / "local.pem", files / "server.key")) == ()
