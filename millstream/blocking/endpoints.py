"""The endpoints of a service, answered by plain functions in worker threads."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from millstream.blocking.generated.message import Message
from millstream.blocking.twin import Twin, in_thread
from millstream.messaging.core import service as async_service
from millstream.messaging.core.service import EndpointSettings

__all__ = ["EndpointGroup", "Endpoints"]

Answer = bytes | str | None
H = TypeVar("H", bound=Callable[[Message], Answer])


class Endpoints(Twin):
    """What a service and its groups have in common."""

    __slots__ = ()

    _inner: async_service.EndpointGroup

    @property
    def prefix(self) -> str:
        """The tokens with which the subjects of its endpoints start."""
        return self._inner.prefix

    @property
    def queue(self) -> str:
        """The queue group that shares the requests."""
        return self._inner.queue

    def group(self, prefix: str, queue: str | None = None) -> EndpointGroup:
        """A group of endpoints with a common subject prefix."""
        return EndpointGroup(self._loop, self._inner.group(prefix, queue))

    def endpoint(
        self, subject: str, settings: EndpointSettings | None = None, **values: Any
    ) -> Callable[[H], H]:
        """Let the decorated function answer requests to this subject; also on a running service.

        It is called in a worker thread, `concurrency` of them at a time. What it returns (bytes or
        text) is the answer; None means that it answers itself with `message.respond`. A
        raised ServiceError is the answer with its code and description; any other exception is
        answered with code 500 and logged.
        """

        def register(handler: H) -> H:
            answer = in_thread(handler, partial(Message, self._loop))
            self._loop.invoke(lambda: self._inner.endpoint(subject, settings, **values)(answer))
            return handler

        return register


class EndpointGroup(Endpoints):
    """Endpoints whose subjects start with the same tokens, and that may share a queue group."""

    __slots__ = ()
