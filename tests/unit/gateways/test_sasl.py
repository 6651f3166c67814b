"""PLAIN and SCRAM on the server's side, with the exchanges of the RFCs."""

from __future__ import annotations

import base64
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.gateways.kafka.sasl import (
    TOKEN_BYTES_MAX,
    SaslError,
    ScramExchange,
    read_client_first,
    read_plain,
)
from millstream.gateways.scram import (
    ITERATIONS,
    SCRAM_HASHES,
    WRONG_LOGIN,
    Verifier,
    fake_verifier,
    make_verifier,
    prepared,
    salt_of,
)
from millstream.settings import Secret
from tests.unit.gateways.sasl_client import ScramClient

# The example of RFC 7677.
SALT = base64.b64decode("W22ZaJ0SNY7soEsUEjb6gQ==")
CLIENT_FIRST = b"n,,n=user,r=rOprNGfwEbeRWgbNEkqO"
SERVER_NONCE = "%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0"
SERVER_FIRST = (
    b"r=rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0,s=W22ZaJ0SNY7soEsUEjb6gQ==,i=4096"
)
CLIENT_FINAL = (
    b"c=biws,r=rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0,"
    b"p=dHzbZapWIk4jUhN+Ute9ytag9zjfMHgsqmmiz7AndVQ="
)
SERVER_FINAL = b"v=6rriTRBi23WpRR/wtup+mMhUZUn/dB5nLTJRsjl95G4="

PENCIL = make_verifier("SCRAM-SHA-256", Secret("pencil"), SALT)


def exchange(first: bytes = CLIENT_FIRST, verifier: Verifier = PENCIL) -> ScramExchange:
    return ScramExchange(read_client_first(first), verifier, SERVER_NONCE)


# -- SCRAM ----------------------------------------------------------------------------------


def test_the_exchange_of_the_rfc_is_answered_as_the_rfc_says() -> None:
    server = exchange()
    assert server.challenge == SERVER_FIRST
    assert server.finish(CLIENT_FINAL) == SERVER_FINAL


@pytest.mark.parametrize("mechanism", SCRAM_HASHES)
@pytest.mark.parametrize("header", ["n,,", "y,,", "n,a=ann,"])
def test_a_client_with_the_right_password_and_the_server_trust_each_other(
    mechanism: str, header: str
) -> None:
    client = ScramClient(mechanism, "ann", "s3cret", header)
    server = exchange(client.first, make_verifier(mechanism, Secret("s3cret"), SALT))
    assert server.user == "ann"
    assert client.trusts(server.finish(client.final(server.challenge)))


@pytest.mark.parametrize("mechanism", SCRAM_HASHES)
def test_a_wrong_password_is_refused(mechanism: str) -> None:
    client = ScramClient(mechanism, "ann", "S3cret")
    server = exchange(client.first, make_verifier(mechanism, Secret("s3cret"), SALT))
    with pytest.raises(SaslError, match=WRONG_LOGIN):
        server.finish(client.final(server.challenge))


def test_a_user_that_does_not_exist_is_asked_and_refused_like_any_other() -> None:
    key = b"k" * 32
    fake = fake_verifier("SCRAM-SHA-256", "bob", key)
    again = fake_verifier("SCRAM-SHA-256", "bob", key)
    assert fake == again
    assert fake.salt == salt_of("SCRAM-SHA-256", "bob", key)
    assert fake.salt != fake_verifier("SCRAM-SHA-256", "eve", key).salt
    assert (len(fake.salt), fake.iterations) == (16, ITERATIONS)
    client = ScramClient("SCRAM-SHA-256", "bob", "x")
    server = exchange(client.first, fake)
    with pytest.raises(SaslError, match=WRONG_LOGIN):
        server.finish(client.final(server.challenge))


def test_no_proof_is_right_for_a_user_that_does_not_exist() -> None:
    client = ScramClient("SCRAM-SHA-256", "ann", "s3cret")
    keys = make_verifier("SCRAM-SHA-256", Secret("s3cret"), SALT).keys
    server = exchange(client.first, Verifier("SCRAM-SHA-256", SALT, 4096, keys, known=False))
    with pytest.raises(SaslError, match=WRONG_LOGIN):
        server.finish(client.final(server.challenge))


def test_a_password_is_accepted_with_and_without_saslprep() -> None:
    verifier = make_verifier("SCRAM-SHA-256", Secret("I\u00adX\u2168"), SALT)
    assert len(verifier.keys) == 2
    for form in ("I\u00adX\u2168", "IXIX"):
        client = ScramClient("SCRAM-SHA-256", "ann", form)
        server = exchange(client.first, verifier)
        assert client.trusts(server.finish(client.final(server.challenge)))
    client = ScramClient("SCRAM-SHA-256", "ann", "IX")
    server = exchange(client.first, verifier)
    with pytest.raises(SaslError, match=WRONG_LOGIN):
        server.finish(client.final(server.challenge))


def test_escaped_names_are_read_as_they_are_meant() -> None:
    assert read_client_first(b"n,,n=a=2Cb=3Dc,r=12345678").user == "a,b=c"
    assert read_client_first(b"n,,n=ann,r=12345678,tokenauth=true").user == "ann"


@pytest.mark.parametrize(
    ("token", "word"),
    [
        (b"", "first message"),
        (b"p=tls-unique,,n=ann,r=12345678", "channel binding"),
        (b"n,a=bob,n=ann,r=12345678", "as another one"),
        (b"n,,m=x,n=ann,r=12345678", "extension"),
        (b"n,,n=,r=12345678", "1 to 255"),
        (b"n,,n=" + b"a" * 256 + b",r=12345678", "1 to 255"),
        (b"n,,n=ann", "user and a nonce"),
        (b"n,,r=12345678,n=ann", "user and a nonce"),
        (b"n,,n=ann,r=short", "nonce"),
        (b"n,,n=ann,r=" + b"x" * 513, "nonce"),
        (b"n,,n=ann,r=1234 5678", "nonce"),
        (b"n,,n=a=n,r=12345678", "=3D"),
        (b"n,,n=ann,r=12345678,nonsense", "user and a nonce"),
        (b"n,,n=\xff,r=12345678", "UTF-8"),
        (b"n,,n=ann,r=12345678," + b"x" * TOKEN_BYTES_MAX, "at most"),
    ],
)
def test_a_bad_first_message_is_refused(token: bytes, word: str) -> None:
    with pytest.raises(SaslError, match=word):
        read_client_first(token)


@pytest.mark.parametrize(
    ("token", "word"),
    [
        (b"", "last message"),
        (CLIENT_FINAL.partition(b",p=")[0], "last message"),
        (CLIENT_FINAL.replace(b"c=biws", b"c=eSws"), "channel binding"),
        (CLIENT_FINAL.replace(b"r=rOpr", b"r=xOpr"), "nonce"),
        (CLIENT_FINAL.replace(b"$k0,", b"$k,"), "nonce"),
        (CLIENT_FINAL[:-9], "length|base64"),
        (CLIENT_FINAL.replace(b"p=dHzb", b"p=!Hzb"), "base64"),
        (CLIENT_FINAL.replace(b"p=dHzb", b"p=aHzb"), WRONG_LOGIN),
        (b"x" * (TOKEN_BYTES_MAX + 1), "at most"),
    ],
)
def test_a_bad_last_message_is_refused(token: bytes, word: str) -> None:
    with pytest.raises(SaslError, match=word):
        exchange().finish(token)


@given(st.binary(max_size=200))
def test_any_bytes_are_refused_or_read_without_another_error(token: bytes) -> None:
    for read in (read_plain, read_client_first, exchange().finish):
        with suppress(SaslError):
            read(token)


@given(st.text(st.characters(exclude_characters="\0", codec="utf-8"), min_size=1, max_size=50))
def test_any_password_has_a_verifier(password: str) -> None:
    verifier = make_verifier("SCRAM-SHA-256", Secret(password), SALT, 1)
    assert 1 <= len(verifier.keys) <= 2


# -- SASLprep: the examples of RFC 4013 -----------------------------------------------------


@pytest.mark.parametrize(
    ("text", "result"),
    [
        ("I\u00adX", "IX"),
        ("user", "user"),
        ("USER", "USER"),
        ("\u00aa", "a"),
        ("\u2168", "IX"),
        ("a\u00a0b", "a b"),
        ("\u0007", None),
        ("\u0627\u0031", None),
        ("\u0627\u0031\u0628", "\u0627\u0031\u0628"),
    ],
)
def test_text_is_prepared_as_the_rfc_says(text: str, result: str | None) -> None:
    assert prepared(text) == result


# -- PLAIN ----------------------------------------------------------------------------------


@pytest.mark.parametrize("token", [b"\0ann\0s3cret", b"ann\0ann\0s3cret"])
def test_user_and_password_are_read(token: bytes) -> None:
    login = read_plain(token)
    assert (login.user, login.password.reveal()) == ("ann", "s3cret")


def test_names_and_passwords_may_have_any_letters() -> None:
    login = read_plain("\0äöü\0пароль".encode())
    assert (login.user, login.password.reveal()) == ("äöü", "пароль")


@pytest.mark.parametrize(
    ("token", "word"),
    [
        (b"", "NUL"),
        (b"ann\0s3cret", "NUL"),
        (b"\0ann\0s3\0cret", "NUL"),
        (b"bob\0ann\0s3cret", "as another one"),
        (b"\0\0s3cret", "not empty"),
        (b"\0ann\0", "not empty"),
        (b"\0\xff\0s3cret", "UTF-8"),
        (b"\0" + b"a" * 256 + b"\0s3cret", "255"),
        (b"\0ann\0" + b"x" * 4097, "4,096"),
        (b"\0ann\0" + b"x" * TOKEN_BYTES_MAX, "8,192"),
    ],
)
def test_a_bad_plain_token_is_refused(token: bytes, word: str) -> None:
    with pytest.raises(SaslError, match=word):
        read_plain(token)


# -- secrets --------------------------------------------------------------------------------


def test_nothing_secret_is_shown() -> None:
    shown = repr([read_plain(b"\0ann\0s3cret"), PENCIL, read_client_first(CLIENT_FIRST)])
    stored, server = PENCIL.keys[0]
    for secret in ("s3cret", repr(stored), repr(server), repr(SALT), "rOprNGfwEbeRWgbNEkqO"):
        assert secret not in shown
