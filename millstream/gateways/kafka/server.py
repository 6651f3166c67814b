"""One connection of a Kafka client: requests are started as they come, answered in their order."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Mapping
from typing import Any, Final

from millstream.gateways.kafka.calls import Call, Handler, Session
from millstream.gateways.kafka.protocol import (
    Api,
    BadRequest,
    Request,
    UnsupportedApiVersions,
    read_request,
    unsupported_version_answer,
    write_response,
)
from millstream.gateways.listener import Transport

__all__ = ["KafkaConnection"]

_log = logging.getLogger("millstream.gateways.kafka")

# What may be asked before a client has logged in.
_OPEN: Final = {Api.API_VERSIONS, Api.SASL_HANDSHAKE, Api.SASL_AUTHENTICATE}
# Requests of a connection that are under way; clients send 5 at a time, librdkafka more.
IN_FLIGHT_MAX: Final = 100
BEFORE_LOGIN_BYTES: Final = 64 * 1024  # of a request: anybody may send it


class _Answer:
    """The place of an answer in the order of a connection."""

    __slots__ = ("frame", "ready", "size", "task")

    def __init__(self, size: int) -> None:
        self.size = size  # of the request
        self.ready = False
        self.frame: memoryview | None = None  # None when ready: the request gets no answer
        self.task: asyncio.Task[None] | None = None


class KafkaConnection:
    """Handles the frames of one connection; the listener calls `frame` and `lost`."""

    def __init__(
        self, transport: Transport, session: Session, handlers: Mapping[Api, Handler]
    ) -> None:
        self._transport = transport
        self._session = session
        self._handlers = handlers
        self._answers: deque[_Answer] = deque()
        self._closed = False
        self._paused = False
        self._max_frame = transport.max_frame
        session.close = self._close
        if session.access is None:
            transport.max_frame = min(BEFORE_LOGIN_BYTES, transport.max_frame)

    def frame(self, data: bytes) -> None:
        """Start a request."""
        if self._closed or self._session.closing:
            return
        answer = _Answer(len(data))
        self._answers.append(answer)
        try:
            request = read_request(data)
            if self._session.access is None and request.api not in _OPEN:
                raise BadRequest(f"{request.api.name} before the client has logged in")
        except UnsupportedApiVersions as newer:
            self._finish(answer, unsupported_version_answer(newer.correlation_id))
            return
        except BadRequest as error:
            self._close(str(error))
            return
        answer.task = asyncio.get_running_loop().create_task(self._handle(request, answer))
        if len(self._answers) >= IN_FLIGHT_MAX and not self._paused:
            self._paused = True
            self._transport.pause()

    def lost(self, reason: str) -> None:
        """The connection is gone: what its client waited for is given up, never what it sent."""
        self._closed = True
        if self._session.access is not None:
            self._session.access.leave(self._session.close)
        for answer in self._answers:
            if answer.task is not None:
                answer.task.cancel()
        self._answers.clear()

    async def _handle(self, request: Request, answer: _Answer) -> None:
        try:
            fields = await self._handlers[request.api](Call(request, self._session))
            frame = None if fields is None else self._encode(request, fields)
        except asyncio.CancelledError:
            raise
        except Exception:
            # Without an answer a client would wait for a minute; closed, it connects again.
            _log.exception("%s version %d failed", request.api.name, request.version)
            self._close("a request failed")
            return
        self._finish(answer, frame)

    @staticmethod
    def _encode(request: Request, fields: Mapping[str, Any]) -> memoryview:
        return write_response(request.api, request.version, request.correlation_id, fields)

    def _finish(self, answer: _Answer, frame: memoryview | None) -> None:
        """Send what is ready, as far as all before it is."""
        answer.ready, answer.frame = True, frame
        answers = self._answers
        while answers and answers[0].ready:
            first = answers.popleft()
            if first.frame is None:
                self._transport.release(first.size)
            else:
                self._transport.send(first.frame, frees=first.size)
        if self._session.closing and not answers:
            self._close(self._session.closing)
        elif self._session.access is not None:
            self._transport.max_frame = self._max_frame
        if self._paused and len(answers) < IN_FLIGHT_MAX:
            self._paused = False
            self._transport.resume()

    def _close(self, reason: str) -> None:
        if not self._closed:
            self._closed = True
            self._transport.close(reason)
