"""One connection of a Kafka client: requests are started as they come, answered in their order."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Mapping
from typing import Any, Final

from millstream.failure_log import FailureLog
from millstream.gateways.kafka.calls import Call, Handler, KafkaSession
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
    """An answer in its position in the order of a connection."""

    __slots__ = ("frame", "ready", "size", "stores", "task", "turn")

    def __init__(self, size: int) -> None:
        self.size = size  # of the request
        self.ready = False
        self.stores = False  # its request is done also when nobody waits for the answer
        self.frame: memoryview | None = None  # None when ready: the request gets no answer
        self.task: asyncio.Task[None] | None = None
        self.turn: asyncio.Future[None] | None = None  # what waits until it is the first


class KafkaConnection:
    """Handles the frames of one connection; the listener calls `frame` and `lost`."""

    def __init__(
        self, transport: Transport, session: KafkaSession, handlers: Mapping[Api, Handler]
    ) -> None:
        self._transport = transport
        self._session = session
        self._handlers = handlers
        self._answers: deque[_Answer] = deque()
        self._closed = False
        self._paused = False
        self._max_frame = transport.max_frame
        self._failures = FailureLog(_log)
        session.close = self._close
        session.room = lambda: transport.room
        transport.when_writable = self._give_turn
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
        answer.stores = request.api is Api.PRODUCE
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
            if answer.task is not None and not answer.stores:
                answer.task.cancel()
        self._answers.clear()

    async def _handle(self, request: Request, answer: _Answer) -> None:
        try:
            if request.api is Api.FETCH:
                await self._turn_of(answer)
            fields = await self._handlers[request.api](Call(request, self._session))
            frame = None if fields is None else self._encode(request, fields)
        except asyncio.CancelledError:
            raise
        except Exception as error:
            # Without an answer a client would wait for a minute; closed, it connects again.
            self._failures.warn(error, "%s version %d failed", request.api.name, request.version)
            self._close("a request failed")
            return
        self._finish(answer, frame)

    async def _turn_of(self, answer: _Answer) -> None:
        """Return when all answers before this one are sent, and the client reads them.

        Answers of Fetch are large: they must not gather behind one that waits for new records, nor
        for a client that does not read.
        """
        while self._answers[0] is not answer or not self._transport.writable:
            answer.turn = asyncio.get_running_loop().create_future()
            await answer.turn

    def _give_turn(self) -> None:
        first = self._answers[0] if self._answers else None
        if first is not None and first.turn is not None and not first.turn.done():
            first.turn.set_result(None)

    @staticmethod
    def _encode(request: Request, fields: Mapping[str, Any]) -> memoryview:
        return write_response(request.api, request.version, request.correlation_id, fields)

    def _finish(self, answer: _Answer, frame: memoryview | None) -> None:
        """Send what is ready, as far as all before it is."""
        answer.ready, answer.frame = True, frame
        answers = self._answers
        if not answers:
            return  # the connection is gone
        while answers and answers[0].ready:
            first = answers.popleft()
            if first.frame is None:
                self._transport.release(first.size)
            else:
                self._transport.send(first.frame, frees=first.size)
        self._give_turn()
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
