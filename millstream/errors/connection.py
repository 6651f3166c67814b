"""Errors of connections, requests and identities."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from millstream.errors.base import MillstreamError

__all__ = [
    "AuthenticationFailed",
    "ConnectError",
    "ConnectFailed",
    "ConnectionClosed",
    "IdentityLost",
    "IdentityTaken",
    "IncompleteList",
    "NoGuard",
    "NoMessage",
    "NoResponders",
    "PermissionDenied",
    "RequestTimeout",
    "ServiceError",
    "SubscriberClosed",
    "TlsFailed",
]


NAMES_SHOWN: Final = 5


class ConnectError(MillstreamError, ConnectionError):
    """Base of errors about the connection to the broker."""


class ConnectFailed(ConnectError):
    """No server could be reached within the connect deadline."""


class TlsFailed(ConnectFailed):
    """A server was reached, but not securely; the message names the setting to correct."""


class AuthenticationFailed(ConnectError):
    """The server was reached and refused the credentials."""


class ConnectionClosed(ConnectError):
    """The connection is closed: by `close()`, or because reconnecting took too long."""


class PermissionDenied(MillstreamError, PermissionError):
    """The connected user has no permission to publish or subscribe there.

    `subject` is the one that the server refused; `action` says what a message there would do, such
    as `create topic 'orders'`, if it is a call of the JetStream API.
    """

    def __init__(
        self,
        operation: str,
        subject: str,
        queue: str = "",
        user: str = "",
        asked: tuple[str, str] | None = None,  # the action, and what it needs
    ) -> None:
        self.operation, self.subject, self.queue, self.user = operation, subject, queue, user
        who = f"user '{user}'" if user else "this user"
        if asked is not None:
            self.action, needs = asked
            text = f"{who} may not {self.action}. {needs}: connect as such a user, or ask for it"
        else:
            self.action = f"{operation} '{subject}'"
            group = f" in queue group '{queue}'" if queue else ""
            advice = "Connect as a user with that permission, or have it granted"
            text = f"{who} may not {self.action}{group}. {advice}"
        super().__init__(text)


class RequestTimeout(MillstreamError, TimeoutError):
    """No answer arrived within the deadline; it is unknown whether the request was handled."""

    def __init__(self, subject: str, seconds: float, hint: str = "") -> None:
        self.subject, self.seconds = subject, seconds
        super().__init__(f"no answer on '{subject}' within {seconds:g} s{hint}")


class IncompleteList(MillstreamError, TimeoutError):
    """The broker's list lacks streams or subscriptions that its nodes could not reach.

    `missing` has their names, each with the reason if the broker gave one. Nothing was done with
    the rest of the list.
    """

    def __init__(self, what: str, missing: Mapping[str, str], when: str) -> None:
        self.what, self.missing = what, dict(missing)
        named = [f"{n} ({why})" if why else n for n, why in sorted(self.missing.items())]
        more = f" and {len(named) - NAMES_SHOWN} more" if len(named) > NAMES_SHOWN else ""
        lacks = f", without {', '.join(named[:NAMES_SHOWN])}{more}" if named else ""
        super().__init__(
            f"the broker's list of {what} was not complete {when}{lacks}: nodes are down or cannot "
            f"reach each other. Try again when all nodes are up (`millstream status`)"
        )


class NoMessage(MillstreamError, TimeoutError):
    """No message arrived within the given time; the subscriber stays open."""

    def __init__(self, subject: str, seconds: float) -> None:
        self.subject, self.seconds = subject, seconds
        super().__init__(f"no message on '{subject}' within {seconds:g} s")


class SubscriberClosed(MillstreamError):
    """The subscriber was closed or drained: it receives nothing more."""

    def __init__(self, subject: str) -> None:
        self.subject = subject
        super().__init__(f"the subscriber of '{subject}' is closed; subscribe again")


class NoResponders(MillstreamError):
    """Nothing listens on the requested subject, so the request was not handled."""

    def __init__(self, subject: str) -> None:
        self.subject = subject
        super().__init__(f"no service or subscriber listens on '{subject}'")


class NoGuard(NoResponders):
    """No guard of the topic answers, so nothing was checked and nothing is stored."""

    def __init__(self, topic: str, subject: str) -> None:
        super().__init__(subject)
        self.topic = topic
        self.args = (
            f"no guard of topic '{topic}' answers on '{subject}', so nothing was stored. The "
            f"broker starts one ('millstream status' shows it); on a server that others operate "
            f"run 'millstream guard {topic}'",
        )


class ServiceError(MillstreamError):
    """A service handled the request and answered with an error."""

    def __init__(self, subject: str, code: str, description: str) -> None:
        self.subject, self.code, self.description = subject, code, description
        super().__init__(f"'{subject}' answered with error {code}: {description}")


class IdentityTaken(MillstreamError):
    """Another client holds the id and is alive (it answered a probe). Nothing was changed."""

    def __init__(self, client_id: str, holder: str, since: str) -> None:
        self.client_id, self.holder, self.since = client_id, holder, since
        super().__init__(
            f"client id '{client_id}' has been held by {holder} since {since}, and it is alive. "
            f"Stop that client, or choose another id"
        )


class IdentityLost(MillstreamError):
    """This client did not answer a probe, and another one claimed its id."""

    def __init__(self, client_id: str, holder: str) -> None:
        self.client_id, self.holder = client_id, holder
        super().__init__(
            f"client id '{client_id}' was taken over by {holder} because this client did not "
            f"answer. If it should have the id, connect and claim it again"
        )
