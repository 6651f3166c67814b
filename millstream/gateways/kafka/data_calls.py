"""The calls that carry records: Produce, Fetch, ListOffsets, DeleteRecords, InitProducerId."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

from millstream.deadline import now_ns
from millstream.errors import MillstreamError
from millstream.gateways.access import Access
from millstream.gateways.kafka.calls import Call, Handler
from millstream.gateways.kafka.catalog import KafkaTopic, TopicCatalog, UnknownTopic
from millstream.gateways.kafka.fetching import Fetch, Wanted
from millstream.gateways.kafka.partition_log import Appended, OutOfRange, PartitionLog
from millstream.gateways.kafka.producer_ids import ProducerIds
from millstream.gateways.kafka.protocol import Api, ErrorCode
from millstream.gateways.kafka.records import BadBatch, RawBatch, split_batches
from millstream.gateways.kafka.topic_rights import access_of
from millstream.gateways.overload import Books

__all__ = ["DataCalls"]

_log = logging.getLogger("millstream.gateways.kafka")

_NO_TIME: Final = -1
# Spark asks for the first offset again and again while it reads, after every 500 records.
HEAD_AGE_MAX: Final = 0.01  # seconds
ROOM_MIN: Final = 1024 * 1024  # bytes of records that a Fetch may have in any case
_LATEST, _EARLIEST, _MAX_TIME = -1, -2, -3  # what ListOffsets asks for instead of a time


@dataclass(frozen=True, slots=True)
class _Refused(Exception):
    """A partition of a request that gets an error instead of its answer."""

    code: ErrorCode
    text: str = ""


class DataCalls:
    """Handlers of the calls that carry records."""

    def __init__(self, catalog: TopicCatalog, ids: ProducerIds, books: Books) -> None:
        self._catalog = catalog
        self._ids = ids
        self._books = books

    def handlers(self) -> dict[Api, Handler]:
        """Which call each of them serves."""
        return {
            Api.PRODUCE: self.produce,
            Api.FETCH: self.fetch,
            Api.LIST_OFFSETS: self.list_offsets,
            Api.DELETE_RECORDS: self.delete_records,
            Api.INIT_PRODUCER_ID: self.init_producer_id,
        }

    # -- Produce --------------------------------------------------------------------------

    async def produce(self, call: Call) -> dict[str, Any] | None:
        """Store the batches of each partition; answered when all are stored or refused."""
        body, session = call.request.body, call.session
        parts = [(topic.name, part) for topic in body.topic_data for part in topic.partition_data]
        # The batches of one connection are handed to the logs in the order of their requests.
        logs: list[PartitionLog] = []
        async with session.produce_order:
            started = [
                await self._append(access_of(call), body, name, part, logs) for name, part in parts
            ]
        for one in started:
            if isinstance(one, asyncio.Future):
                await one
        if logs:
            for log in {id(log): log for log in logs}.values():
                await log.partitioner_recorded()
        if body.acks == 0:
            return None
        topics: dict[str, list[dict[str, Any]]] = {}
        for (name, part), one in zip(parts, started, strict=True):
            found = one.result() if isinstance(one, asyncio.Future) else one
            topics.setdefault(name, []).append(_produced(part.index, found))
        return {
            "responses": [
                {"name": name, "partition_responses": answers} for name, answers in topics.items()
            ]
        }

    async def _append(
        self, access: Access, body: Any, name: str, part: Any, logs: list[PartitionLog]
    ) -> asyncio.Future[Appended] | Appended:
        """Hand a batch to its partition; the answer comes later, or is a refusal."""
        try:
            if body.acks not in (-1, 0, 1):
                raise _Refused(ErrorCode.invalid_required_acks, f"acks is {body.acks}")
            topic, log = await self._log(access, name, part.index, "write")
            with self._books.step("produce: checks of batches"):
                batch = _one_batch(body, part, topic.max_message_bytes)
            logs.append(log)
            now = now_ns() // 1_000_000
            return await log.append(batch, now - topic.before_max_ms, now + topic.after_max_ms)
        except _Refused as refused:
            return _failed(refused.code, refused.text)
        except BadBatch as error:
            return Appended(-1, error.code, str(error), error.index)
        except MillstreamError as error:
            return _failed(*_broker_fault(error))

    async def _log(
        self, access: Access, name: str, index: int, action: str
    ) -> tuple[KafkaTopic, PartitionLog]:
        topic = await self._catalog.find(name)
        if topic is None or not 0 <= index < topic.partitions:
            raise _Refused(ErrorCode.unknown_topic_or_partition)
        may = {"read": access.may_read, "write": access.may_write, "manage": access.may_manage}
        if not may[action](topic.subjects):
            raise _Refused(ErrorCode.topic_authorization_failed, f"this user may not {action}")
        try:
            return topic, await self._catalog.log(name, index)
        except UnknownTopic:
            raise _Refused(ErrorCode.unknown_topic_or_partition) from None

    # -- Fetch ----------------------------------------------------------------------------

    async def fetch(self, call: Call) -> dict[str, Any]:
        """Records from the offsets on; waits for some if there are none."""
        body = call.request.body
        wanted: list[Wanted] = []
        for topic in body.topics:
            for part in topic.partitions:
                log, error = await self._opened(access_of(call), topic.topic, part.partition)
                one = Wanted(topic.topic, part.partition, part.fetch_offset, log, error)
                one.max_bytes = part.partition_max_bytes
                wanted.append(one)
        max_bytes = min(body.max_bytes, max(ROOM_MIN, call.session.room()))
        await Fetch(wanted, max(1, body.min_bytes), max_bytes).run(body.max_wait.total_seconds())
        topics: dict[str, list[dict[str, Any]]] = {}
        for one in wanted:
            topics.setdefault(one.topic, []).append(_fetched(one))
        return {
            "error_code": ErrorCode.none,
            "session_id": 0,  # no sessions: each request names all its partitions
            "responses": [{"topic": name, "partitions": parts} for name, parts in topics.items()],
        }

    async def _opened(
        self, access: Access, name: str, index: int
    ) -> tuple[PartitionLog | None, ErrorCode]:
        try:
            _, log = await self._log(access, name, index, "read")
            return log, ErrorCode.none
        except _Refused as refused:
            return None, refused.code
        except MillstreamError as error:
            return None, _broker_fault(error)[0]

    # -- ListOffsets, DeleteRecords -------------------------------------------------------

    async def list_offsets(self, call: Call) -> dict[str, Any]:
        """The first offset, the next one, or the first of a time on."""
        access = access_of(call)
        topics = []
        for topic in call.request.body.topics:
            parts = []
            for part in topic.partitions:
                answer: dict[str, Any] = {"partition_index": part.partition_index}
                try:
                    _, log = await self._log(access, topic.name, part.partition_index, "read")
                    found = await _offset_at(log, part.timestamp)
                    code = ErrorCode.none
                    answer["leader_epoch"] = log.leader_epoch
                except _Refused as refused:
                    found, code = (-1, _NO_TIME), refused.code
                except MillstreamError as error:
                    found, code = (-1, _NO_TIME), _broker_fault(error)[0]
                parts.append(
                    answer | {"error_code": code, "offset": found[0], "timestamp": found[1]}
                )
            topics.append({"name": topic.name, "partitions": parts})
        return {"topics": topics}

    async def delete_records(self, call: Call) -> dict[str, Any]:
        """Remove the records before an offset (-1: all of them)."""
        access = access_of(call)
        topics = []
        for topic in call.request.body.topics:
            parts = []
            for part in topic.partitions:
                start, code = -1, ErrorCode.none
                try:
                    _, log = await self._log(access, topic.name, part.partition_index, "manage")
                    start = await log.delete_before(
                        log.end_offset if part.offset == -1 else part.offset
                    )
                except _Refused as refused:
                    code = refused.code
                except OutOfRange:
                    code = ErrorCode.offset_out_of_range
                except MillstreamError as error:
                    code = _broker_fault(error)[0]
                parts.append(
                    {
                        "partition_index": part.partition_index,
                        "low_watermark": start,
                        "error_code": code,
                    }
                )
            topics.append({"name": topic.name, "partitions": parts})
        return {"topics": topics}

    # -- InitProducerId -------------------------------------------------------------------

    async def init_producer_id(self, call: Call) -> dict[str, Any]:
        """A new id for an idempotent producer."""
        answer = {"producer_id": -1, "producer_epoch": -1}
        if call.request.body.transactional_id is not None:
            # The one error that every client takes as final.
            code = ErrorCode.transactional_id_authorization_failed
            return answer | {"error_code": code}
        try:
            number = await self._ids.new()
        except MillstreamError as error:
            _broker_fault(error)
            return answer | {"error_code": ErrorCode.coordinator_not_available}
        return {"error_code": ErrorCode.none, "producer_id": number, "producer_epoch": 0}


def _one_batch(body: Any, part: Any, max_bytes: int) -> RawBatch:
    batches = split_batches(part.records or b"", max_bytes)
    if len(batches) != 1:
        raise BadBatch(
            ErrorCode.invalid_record,
            f"{len(batches)} batches for one partition: a request has one for each",
        )
    if body.transactional_id is not None or batches[0].head.is_transactional:
        raise _Refused(
            ErrorCode.transactional_id_authorization_failed,
            "transactions are not served by this gateway",
        )
    return batches[0]


async def _offset_at(log: PartitionLog, time_ms: int) -> tuple[int, int]:
    """What ListOffsets asks for: an offset, and the time of its record where that was asked."""
    if time_ms == _LATEST:
        return log.end_offset, _NO_TIME
    if time_ms == _EARLIEST:
        await log.look_at_head(HEAD_AGE_MAX)
        return log.start_offset, _NO_TIME
    found = await (log.max_time() if time_ms == _MAX_TIME else log.offset_at(time_ms))
    return (-1, _NO_TIME) if found is None else found


def _broker_fault(error: MillstreamError) -> tuple[ErrorCode, str]:
    """The broker did not do what was asked: clients try again."""
    _log.warning("the broker refused a request: %s", error)
    return ErrorCode.kafka_storage_error, str(error)


def _failed(code: ErrorCode, text: str) -> Appended:
    return Appended(base_offset=-1, error=code, text=text)


def _produced(index: int, found: Appended) -> dict[str, Any]:
    return {
        "index": index,
        "error_code": found.error,
        "base_offset": found.base_offset,
        "log_append_time": None,
        "log_start_offset": -1,
        "record_errors": _record_errors(found),
        "error_message": found.text or None,
    }


def _record_errors(found: Appended) -> Iterable[dict[str, Any]]:
    if found.record is None:
        return ()
    return ({"batch_index": found.record, "batch_index_error_message": found.text},)


def _fetched(one: Wanted) -> dict[str, Any]:
    log = one.log
    end = -1 if log is None else log.end_offset
    return {
        "partition_index": one.partition,
        "error_code": one.error,
        "high_watermark": end,
        "last_stable_offset": end,
        "log_start_offset": -1 if log is None else log.start_offset,
        "aborted_transactions": None,
        "preferred_read_replica": -1,
        "records": one.records,
    }
