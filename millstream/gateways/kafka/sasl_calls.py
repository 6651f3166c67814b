"""The calls by which clients of Kafka log in: SaslHandshake and SaslAuthenticate."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any, Final

from millstream.deadline import Deadline
from millstream.gateways.access import (
    FAILURE_SECONDS,
    Access,
    LoginRefused,
    Logins,
    LoginUnavailable,
)
from millstream.gateways.kafka.calls import Call, Handler, KafkaSession
from millstream.gateways.kafka.protocol import Api, ErrorCode
from millstream.gateways.kafka.sasl import (
    SaslError,
    ScramExchange,
    read_client_first,
    read_plain,
)
from millstream.gateways.scram import PLAIN, Verifier

__all__ = ["SaslCalls"]

NONCE_BYTES: Final = 24
_SHOWN: Final = 64  # characters that a log shows of what a client that is not logged in sends


class _Exchange:
    """A login under way, after the handshake."""

    def __init__(self, mechanism: str) -> None:
        self.mechanism = mechanism
        self.scram: tuple[ScramExchange, Verifier] | None = None  # once the client was asked


class SaslCalls:
    """Handlers of the calls; `Logins` decides. A connection whose login failed is closed."""

    def __init__(self, logins: Logins) -> None:
        self._logins = logins

    def handlers(self) -> dict[Api, Handler]:
        """The handlers by call."""
        return {
            Api.SASL_HANDSHAKE: self._handshake,
            Api.SASL_AUTHENTICATE: self._authenticate,
        }

    async def _handshake(self, call: Call) -> Mapping[str, Any]:
        """The client names the mechanism; also for another login on an open connection."""
        session, mechanism = call.session, str(call.request.body.mechanism)
        offered = self._logins.mechanisms
        code = ErrorCode.none
        if not self._logins.required:
            code = ErrorCode.illegal_sasl_state
            self._end(session, "it wants to log in, but this gateway has no logins")
        elif session.sasl is not None:
            code = ErrorCode.illegal_sasl_state
            self._end(session, "it began a login within another one")
        elif mechanism not in offered:
            code = ErrorCode.unsupported_sasl_mechanism
            why = " without TLS" if mechanism == PLAIN else ""
            shown = mechanism[:_SHOWN]
            self._end(session, f"{shown!r} is not offered{why}; {', '.join(offered)} are")
        elif call.request.version == 0:
            # After this version come bare tokens, which are no requests.
            code = ErrorCode.unsupported_version
            self._end(session, "its SaslHandshake version 0 is too old for a login")
        else:
            session.sasl = _Exchange(mechanism)
        return {"error_code": code, "mechanisms": offered}

    async def _authenticate(self, call: Call) -> Mapping[str, Any] | None:
        """The next token of a login."""
        session, token = call.session, bytes(call.request.body.auth_bytes)
        began = Deadline(FAILURE_SECONDS)
        # Taken for as long as it is worked on: a second token at the same time finds none.
        exchange, session.sasl = session.sasl, None
        if exchange is None:
            self._end(session, "it sent a token without a handshake")
            return _answer(ErrorCode.illegal_sasl_state, "SaslHandshake must come first")
        try:
            if exchange.mechanism == PLAIN:
                challenge = await self._plain(session, token)
            elif exchange.scram is None:
                challenge = await self._first(exchange, token)
                session.sasl = exchange
            else:
                challenge = await self._final(session, exchange.scram, token)
        except (SaslError, LoginRefused) as error:
            await self._logins.hold_back(began)
            self._end(session, f"login failed: {error}")
            return _answer(ErrorCode.sasl_authentication_failed, f"login failed: {error}")
        except LoginUnavailable as error:
            # Kafka has no code for it; a client whose connection is closed tries again.
            self._end(session, f"login not possible: {error}")
            return None
        return _answer(ErrorCode.none, None, challenge)

    async def _plain(self, session: KafkaSession, token: bytes) -> bytes:
        login = read_plain(token)
        self._check_user(session, login.user)
        self._log_in(session, await self._logins.plain(login.user, login.password))
        return b""

    async def _first(self, exchange: _Exchange, token: bytes) -> bytes:
        first = read_client_first(token)
        verifier = await self._logins.scram(first.user, exchange.mechanism)
        scram = ScramExchange(first, verifier, secrets.token_urlsafe(NONCE_BYTES))
        exchange.scram = scram, verifier
        return scram.challenge

    async def _final(
        self, session: KafkaSession, asked: tuple[ScramExchange, Verifier], token: bytes
    ) -> bytes:
        scram, verifier = asked
        signature = scram.finish(token)
        self._check_user(session, scram.user)
        self._log_in(session, await self._logins.access_of(scram.user, verifier))
        return signature

    @staticmethod
    def _check_user(session: KafkaSession, user: str) -> None:
        """On a connection that is logged in, only its user may log in again."""
        if session.access is not None and session.access.user != user:
            raise SaslError(
                f"this connection is that of user '{session.access.user}': another one needs a "
                f"connection of its own"
            )

    @staticmethod
    def _log_in(session: KafkaSession, access: Access) -> None:
        if access.revoked:
            raise LoginUnavailable("the login ended at this moment")
        if session.access is not None:
            session.access.leave(session.close)
        access.join(session.close)
        session.access, session.user = access, access.user

    @staticmethod
    def _end(session: KafkaSession, reason: str) -> None:
        """Close the connection after the answer; the reason is logged."""
        session.closing = reason


def _answer(code: ErrorCode, text: str | None, token: bytes = b"") -> dict[str, Any]:
    return {"error_code": code, "error_message": text, "auth_bytes": token}
