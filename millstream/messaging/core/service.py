"""Services: handlers that answer requests, discovered and monitored the standard NATS way (ADR-32).

Instances of one service share the requests (a queue group for each endpoint). Every instance
answers `$SRV.PING`, `$SRV.INFO` and `$SRV.STATS`, so `nats service ls` and other clients see it.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import re
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final, Self, TypeVar

import msgspec

from millstream.closing import AsyncClosing
from millstream.deadline import now_ns
from millstream.errors import ConfigError, ServiceError
from millstream.events.subject import check_name, check_subject
from millstream.failure_log import FailureLog
from millstream.messaging.core.message import Message, Payload
from millstream.messaging.core.overload import SubscriberSettings
from millstream.messaging.core.subscriber import Subscriber
from millstream.nearest import settings_from
from millstream.wire.aio.connection import Connection, Interest
from millstream.wire.protocol import unique_token

__all__ = [
    "Endpoint",
    "EndpointGroup",
    "EndpointSettings",
    "EndpointStats",
    "Service",
    "ServiceHandler",
]

_log = logging.getLogger("millstream.messaging")

DISCOVERY_PREFIX: Final = "$SRV"
DEFAULT_QUEUE: Final = "q"  # the standard's own
BAD_ANSWER: Final = 500
OVERLOADED: Final = 503
# The expression that semver.org itself proposes.
_SEMVER = re.compile(
    r"(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)"
    r"(?:-((?:0|[1-9]\d*|\d*[a-zA-Z-][0-9a-zA-Z-]*)"
    r"(?:\.(?:0|[1-9]\d*|\d*[a-zA-Z-][0-9a-zA-Z-]*))*))?"
    r"(?:\+([0-9a-zA-Z-]+(?:\.[0-9a-zA-Z-]+)*))?"
)

Answer = Payload | None
ServiceHandler = Callable[[Message], Awaitable[Answer] | Answer]
H = TypeVar("H", bound=ServiceHandler)


@dataclass(frozen=True, slots=True)
class EndpointSettings:
    """Name and limits of an endpoint."""

    name: str | None = None  # in discovery; None: the subject, dots as dashes
    queue: str | None = None  # shares the requests; None: the service's, "": each gets all
    metadata: Mapping[str, str] | None = None  # shown by INFO
    concurrency: int = 16  # requests handled at the same time
    pending_max: int = 1024  # requests that wait; more are answered immediately with error 503
    data: Callable[[], Any] | None = None  # any JSON value, shown by STATS


class EndpointStats(msgspec.Struct, kw_only=True):
    """What an endpoint has done so far; times are nanoseconds."""

    name: str
    subject: str
    queue_group: str = ""
    num_requests: int = 0
    num_errors: int = 0
    last_error: str = ""
    processing_time: int = 0
    average_processing_time: int = 0
    data: Any = None  # always present: some clients cannot read a report without it


class Endpoint:
    """One subject a service answers on."""

    def __init__(
        self, connection: Connection, subject: str, handler: ServiceHandler, settings: _Resolved
    ) -> None:
        self.subject = subject
        self.name = settings.name
        self.queue = settings.queue
        self.metadata = settings.metadata
        self._handler = handler
        self._data = settings.data
        self._requests = self._errors = self._nanoseconds = 0
        self._last_error = ""
        self._failures = FailureLog(_log)
        self._subscriber = Subscriber(
            connection,
            subject,
            SubscriberSettings(
                queue=settings.queue,
                messages_max=settings.pending_max,
                concurrency=settings.concurrency,
                on_drop=self._overloaded,
            ),
            self._handle,
        )

    @property
    def stats(self) -> EndpointStats:
        """Its statistics so far, as STATS shows them."""
        return EndpointStats(
            name=self.name,
            subject=self.subject,
            queue_group=self.queue,
            num_requests=self._requests,
            num_errors=self._errors,
            last_error=self._last_error,
            processing_time=self._nanoseconds,
            average_processing_time=self._nanoseconds // self._requests if self._requests else 0,
            data=None if self._data is None else self._data(),
        )

    @property
    def info(self) -> dict[str, Any]:
        """Its description, as INFO shows it."""
        return {
            "name": self.name,
            "subject": self.subject,
            "queue_group": self.queue,
            "metadata": self.metadata,
        }

    def reset(self) -> None:
        """Reset the statistics to zero."""
        self._requests = self._errors = self._nanoseconds = 0
        self._last_error = ""

    async def _handle(self, request: Message) -> None:
        begun = time.perf_counter_ns()
        self._requests += 1
        try:
            answer = self._handler(request)
            if inspect.isawaitable(answer):
                answer = await answer
            if answer is not None and request.reply:
                request.respond(answer)
        except ServiceError as error:
            code = int(error.code) if error.code.isdigit() else BAD_ANSWER
            self._failed(request, code, error.description)
        except Exception as error:
            self._failures.warn(error, "endpoint '%s' failed", self.subject)
            # The caller gets the kind of failure; the details may be confidential.
            kind = type(error).__name__
            self._failed(request, BAD_ANSWER, f"the service failed on this request ({kind})")
        finally:
            self._nanoseconds += time.perf_counter_ns() - begun

    def _overloaded(self, request: Message) -> None:
        self._requests += 1
        waiting = self._subscriber.settings.messages_max
        self._failed(request, OVERLOADED, f"overloaded: {waiting} requests wait. Try again later")

    def _failed(self, request: Message, code: int, description: str) -> None:
        self._errors += 1
        self._last_error = f"{code}:{description}"
        if request.reply:
            request.respond_error(code, description)

    def start(self) -> None:
        self._subscriber.start()

    async def confirm(self) -> None:
        """Return when the server has accepted it, or raise the reason why not."""
        await self._subscriber.flush()
        if self._subscriber.error is not None:
            raise self._subscriber.error

    async def stop(self, timeout: float | None) -> None:
        try:
            await self._subscriber.drain(timeout)
        finally:
            await self._subscriber.close()


@dataclass(frozen=True, slots=True)
class _Resolved:
    """Endpoint settings with every default filled in."""

    name: str
    queue: str
    metadata: dict[str, str]
    concurrency: int
    pending_max: int
    data: Callable[[], Any] | None


class EndpointGroup:
    """Endpoints whose subjects start with the same tokens, and that may share a queue group."""

    def __init__(self, service: Service, prefix: str, queue: str) -> None:
        self._service = service
        self.prefix = prefix
        self.queue = queue

    def group(self, prefix: str, queue: str | None = None) -> EndpointGroup:
        """A group of endpoints with a common subject prefix."""
        inner = check_subject(f"{self.prefix}.{prefix}" if self.prefix else prefix, wildcards=False)
        return EndpointGroup(self._service, inner, self.queue if queue is None else queue)

    def endpoint(
        self, subject: str, settings: EndpointSettings | None = None, **values: Any
    ) -> Callable[[H], H]:
        """Let the decorated function answer requests to this subject, even on a running service.

        It may be `async` or plain. Its result (bytes or text) is the answer; None means that the
        function has answered with `message.respond`, or will. A raised ServiceError is the answer
        with its code and description; any other exception is answered with code 500 and logged.
        `endpoint("sums.add", concurrency=4)`: see EndpointSettings.
        """
        wanted = settings_from(EndpointSettings, settings, values) or EndpointSettings()

        def register(handler: H) -> H:
            self._service._add(self, subject, handler, wanted)
            return handler

        return register


class Service(EndpointGroup, AsyncClosing):
    """A named, versioned set of endpoints; start as many instances as the load needs.

    At most once: a request is handled by one instance, or by none when that one dies; the sender
    sees RequestTimeout and decides. Leaving `async with` answers what has arrived, then stops.

    >>> service = Service(connection, "sums", "1.0.0")    # doctest: +SKIP
    >>> @service.endpoint("sums.add")                     # doctest: +SKIP
    ... async def add(message):
    ...     return str(sum(map(int, message.text.split())))
    >>> async with service:                               # doctest: +SKIP
    ...     await service.stopped()
    """

    def __init__(
        self,
        connection: Connection,
        name: str,
        version: str,
        *,
        description: str = "",
        metadata: Mapping[str, str] | None = None,
        queue: str = DEFAULT_QUEUE,
        prefix: str = DISCOVERY_PREFIX,
    ) -> None:
        super().__init__(self, "", queue)
        self.name = check_name("service", name)
        if not _SEMVER.fullmatch(version):
            raise ConfigError(f"service version {version!r}: write it like 1.4.0 (semver.org)")
        self.version = version
        self.id = unique_token()
        self.description = description
        self.metadata = _texts("service metadata", metadata)
        self.endpoints: list[Endpoint] = []
        self._connection = connection
        self._discovery_prefix = check_subject(prefix, wildcards=False)
        self._discovery: list[Interest] = []
        self._started_ns = now_ns()
        self._stopped: asyncio.Event | None = None  # set while it runs

    def _add(
        self,
        group: EndpointGroup,
        subject: str,
        handler: ServiceHandler,
        settings: EndpointSettings,
    ) -> None:
        name = settings.name or subject.replace(".", "-").replace("*", "any").replace(">", "all")
        full = check_subject(f"{group.prefix}.{subject}" if group.prefix else subject, True)
        resolved = _Resolved(
            check_name("endpoint", name),
            group.queue if settings.queue is None else settings.queue,
            _texts("endpoint metadata", settings.metadata),
            settings.concurrency,
            settings.pending_max,
            settings.data,
        )
        endpoint = Endpoint(self._connection, full, handler, resolved)
        self.endpoints.append(endpoint)
        if self._stopped is not None and not self._stopped.is_set():
            endpoint.start()

    # -- life -----------------------------------------------------------------------------

    async def start(self) -> Self:
        """Start answering; when this returns the server knows every endpoint."""
        if self._stopped is not None:
            raise ConfigError(f"service '{self.name}' was started before; create another instance")
        self._stopped = asyncio.Event()
        self._started_ns = now_ns()
        self._connection.on_closed.append(self._stopped.set)
        try:
            for endpoint in self.endpoints:
                endpoint.start()
            self._discovery = [
                self._connection.subscribe(subject, answer)
                for subject, answer in self._discovery_handlers()
            ]
            await self._connection.flush()
            for endpoint in self.endpoints:
                await endpoint.confirm()
        except BaseException:
            await self.stop(0)
            raise
        return self

    async def stop(self, timeout: float | None = None) -> None:
        """Accept no more requests, answer those that have arrived, then stop."""
        if self._stopped is None or self._stopped.is_set():
            return
        self._stopped.set()
        self._connection.on_closed.remove(self._stopped.set)
        for interest in self._discovery:
            self._connection.unsubscribe(interest)
        results = await asyncio.gather(
            *(endpoint.stop(timeout) for endpoint in self.endpoints), return_exceptions=True
        )
        for result in results:
            if isinstance(result, BaseException):
                _log.warning("service '%s' did not stop cleanly: %s", self.name, result)

    async def stopped(self) -> None:
        """Return when the service was stopped or its connection was closed."""
        if self._stopped is not None:
            await self._stopped.wait()

    async def _enter(self) -> None:
        await self.start()

    async def _leave(self, error: BaseException | None) -> None:
        await self.stop()

    # -- discovery ------------------------------------------------------------------------

    def _discovery_handlers(self) -> list[tuple[str, Callable[[bytes, bytes, bytes, bytes], None]]]:
        verbs = {"PING": lambda: self.ping, "INFO": lambda: self.info, "STATS": lambda: self.stats}
        handlers = []
        for verb, report in verbs.items():
            every_service = f"{self._discovery_prefix}.{verb}"
            answer = self._discovery_answer(report)
            for subject in (
                every_service,
                f"{every_service}.{self.name}",
                f"{every_service}.{self.name}.{self.id}",
            ):
                handlers.append((subject, answer))
        return handlers

    def _discovery_answer(
        self, report: Callable[[], dict[str, Any]]
    ) -> Callable[[bytes, bytes, bytes, bytes], None]:
        def answer(_subject: bytes, reply: bytes, _headers: bytes, _data: bytes) -> None:
            if not reply:
                return
            try:
                self._connection.publish(reply, msgspec.json.encode(report()))
            except Exception:  # the application's own `data` may not be JSON
                _log.exception("service '%s' cannot report about itself", self.name)

        return answer

    def _report(self, kind: str) -> dict[str, Any]:
        return {
            "type": f"io.nats.micro.v1.{kind}_response",
            "name": self.name,
            "id": self.id,
            "version": self.version,
            "metadata": self.metadata,
        }

    @property
    def ping(self) -> dict[str, Any]:
        """Its identity, as PING shows it."""
        return self._report("ping")

    @property
    def info(self) -> dict[str, Any]:
        """Its endpoints, as INFO shows them."""
        endpoints = [endpoint.info for endpoint in self.endpoints]
        return {**self._report("info"), "description": self.description, "endpoints": endpoints}

    @property
    def stats(self) -> dict[str, Any]:
        """Its statistics since start or reset, as STATS shows them."""
        started = datetime.fromtimestamp(self._started_ns / 1e9, UTC)
        return {
            **self._report("stats"),
            "started": started.strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
            "endpoints": [endpoint.stats for endpoint in self.endpoints],
        }

    def reset(self) -> None:
        """Reset the statistics to zero."""
        for endpoint in self.endpoints:
            endpoint.reset()


def _texts(what: str, pairs: Mapping[str, str] | None) -> dict[str, str]:
    found = dict(pairs or {})
    for name, value in found.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise ConfigError(f"{what}: {name!r}: {value!r} must be text")
    return found
