"""JetStream requests and replies: names, typed values, error codes. Pure."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from millstream.errors import (
    ApiError,
    LimitReached,
    MillstreamError,
    NotReplicated,
    SubscriptionConflict,
    SubscriptionNotFound,
    TopicConflict,
    TopicNotFound,
    Unfit,
    WrongSequence,
)
from millstream.wire.protocol import ProtocolError
from millstream.wire.words import WORDINGS, Wording, asked_for

__all__ = [
    "FULL",
    "NANOSECONDS",
    "RETRY",
    "AckAddress",
    "ClusterInfo",
    "ConsumerConfig",
    "ConsumerInfo",
    "ErrorCode",
    "PubAck",
    "Refusal",
    "SourceInfo",
    "StreamInfo",
    "StreamState",
    "api_prefix",
    "consumer_request",
    "error_from",
    "parse_ack_address",
    "publish_error",
]

NANOSECONDS: Final = 1_000_000_000


class ErrorCode:
    """The server's error numbers that mean something to us."""

    NO_LEADER = 10008
    STREAM_OFFLINE = 10118
    STREAM_NOT_FOUND = 10059
    STREAM_NAME_IN_USE = 10058
    CONSUMER_NOT_FOUND = 10014
    CONSUMER_EXISTS = 10148
    CONSUMER_NAME_IN_USE = 10013
    REPLICAS_NOT_CLUSTERED = 10074
    REPLICAS_OF_STREAM = 10134  # a consumer on an interest stream has the stream's replicas
    NO_SUITABLE_PEERS = 10005
    WRONG_LAST_ID = 10070
    WRONG_LAST_SEQUENCE = 10071
    WRONG_LAST_SEQUENCE_IN_FLIGHT = 10164
    DUPLICATE_IN_PROCESS = 10158
    STORE_FAILED = 10077
    INSUFFICIENT_RESOURCES = 10023
    ACCOUNT_RESOURCES = 10002
    MEMORY_RESOURCES = 10028
    STORAGE_RESOURCES = 10047
    MAX_CONSUMERS = 10026
    MAX_STREAMS = 10027
    MESSAGE_NOT_FOUND = 10037
    DELETE_FAILED = 10057
    RESET_BELOW_START = 10204
    WORK_QUEUE_NEEDS_ACKS = 10084  # a consumer of a work queue takes what it reads
    BATCH_INCOMPLETE = 10176
    BATCH_DUPLICATE = 10201
    BATCH_TOO_MANY = 10210
    # Those of guards, outside of the server's numbers.
    GUARD_UNFIT = 40001  # the payload does not fit the schema
    GUARD_HEADER = 40002  # a header asks for something that a guard does not support
    GUARD_NOT_STORED = 40003  # not stored, or unknown; publish it again with its id
    GUARD_BUSY = 40004  # too many messages at the moment; publish it again


# There is no room: for a message of this stream, of the account, or of any.
FULL: Final = frozenset(
    {
        ErrorCode.STORE_FAILED,
        ErrorCode.INSUFFICIENT_RESOURCES,
        ErrorCode.ACCOUNT_RESOURCES,
        ErrorCode.MEMORY_RESOURCES,
        ErrorCode.STORAGE_RESOURCES,
    }
)

# What the server cannot do now but soon will: worth another try of the same request.
RETRY: Final = frozenset(
    {
        ErrorCode.NO_LEADER,
        ErrorCode.DUPLICATE_IN_PROCESS,
        ErrorCode.WRONG_LAST_SEQUENCE_IN_FLIGHT,
        ErrorCode.GUARD_NOT_STORED,
        ErrorCode.GUARD_BUSY,
    }
)

_CLASSES: Final[dict[int, type[ApiError]]] = {
    ErrorCode.STREAM_NOT_FOUND: TopicNotFound,
    ErrorCode.STREAM_NAME_IN_USE: TopicConflict,
    ErrorCode.CONSUMER_NOT_FOUND: SubscriptionNotFound,
    ErrorCode.CONSUMER_EXISTS: SubscriptionConflict,
    ErrorCode.CONSUMER_NAME_IN_USE: SubscriptionConflict,
    ErrorCode.REPLICAS_NOT_CLUSTERED: NotReplicated,
    ErrorCode.NO_SUITABLE_PEERS: NotReplicated,
    ErrorCode.WRONG_LAST_ID: WrongSequence,
    ErrorCode.WRONG_LAST_SEQUENCE: WrongSequence,
    ErrorCode.WRONG_LAST_SEQUENCE_IN_FLIGHT: WrongSequence,
    ErrorCode.STORE_FAILED: LimitReached,
    ErrorCode.INSUFFICIENT_RESOURCES: LimitReached,
    ErrorCode.ACCOUNT_RESOURCES: LimitReached,
    ErrorCode.MEMORY_RESOURCES: LimitReached,
    ErrorCode.STORAGE_RESOURCES: LimitReached,
    ErrorCode.MAX_CONSUMERS: LimitReached,
    ErrorCode.MAX_STREAMS: LimitReached,
}


class Refusal(msgspec.Struct, frozen=True):
    """The error part of a JetStream reply."""

    code: int = 0
    err_code: int = 0
    description: str = ""


def publish_error(refusal: Refusal) -> MillstreamError:
    """The exception for a refused publish.

    What a guard refuses is the same error as if this client had refused it.
    """
    if refusal.err_code == ErrorCode.GUARD_UNFIT:
        return Unfit.from_text(refusal.description)
    return error_from(refusal)


def error_from(refusal: Refusal, verb: str = "") -> ApiError:
    """The exception for a refusal of a call, of the most specific class, in our words."""
    kind = _CLASSES.get(refusal.err_code, ApiError)
    wording = WORDINGS.get(refusal.err_code, Wording())
    asked = asked_for(verb)
    return kind(
        refusal.code,
        refusal.err_code,
        refusal.description,
        wording.advice,
        asked=asked.action if asked else "",
        found=wording.found,
    )


def api_prefix(domain: str | None) -> str:
    """What the subjects of the JetStream API start with."""
    return f"$JS.{domain}.API" if domain else "$JS.API"


class PubAck(msgspec.Struct):
    """The server's answer to a publish: where the message is stored, or why it is not."""

    stream: str = ""
    seq: int = 0
    duplicate: bool = False
    domain: str | None = None
    batch: str | None = None
    count: int = 0
    error: Refusal | None = None


class StreamState(msgspec.Struct, frozen=True):
    """What a stream holds; sequences are inclusive, when empty first_seq = last_seq + 1."""

    messages: int = 0
    bytes: int = 0
    first_seq: int = 0
    first_ts: str = ""
    last_seq: int = 0
    last_ts: str = ""
    consumer_count: int = 0
    num_deleted: int = 0
    num_subjects: int = 0


class PeerInfo(msgspec.Struct, frozen=True):
    """One replica of a stream or consumer."""

    name: str = ""
    current: bool = False
    offline: bool = False
    active: int = 0
    lag: int = 0


class ClusterInfo(msgspec.Struct, frozen=True):
    """Where the replicas are and which one leads."""

    name: str = ""
    leader: str = ""
    replicas: list[PeerInfo] = []


class SourceInfo(msgspec.Struct, frozen=True):
    """How far a mirror or source lags its origin."""

    name: str = ""
    lag: int = 0
    active: int = 0
    error: Refusal | None = None


class StreamInfo(msgspec.Struct, frozen=True):
    """A stream's configuration, as the server gives it, and its state."""

    config: dict[str, Any] = {}
    state: StreamState = StreamState()
    created: str = ""
    cluster: ClusterInfo | None = None
    mirror: SourceInfo | None = None
    sources: list[SourceInfo] = []
    ts: str = ""


class ConsumerConfig(msgspec.Struct, omit_defaults=True):
    """A consumer's configuration. Durations are nanoseconds; defaults are the server's."""

    name: str = ""
    durable_name: str = ""
    description: str = ""
    deliver_policy: str = "all"
    opt_start_seq: int = 0
    opt_start_time: str | None = None
    ack_policy: str = ""
    ack_wait: int = 0
    max_deliver: int = 0
    backoff: list[int] = []
    filter_subject: str = ""
    filter_subjects: list[str] = []
    replay_policy: str = "instant"
    rate_limit_bps: int = 0
    max_waiting: int = 0
    max_ack_pending: int = 0
    headers_only: bool = False
    max_batch: int = 0
    max_expires: int = 0
    max_bytes: int = 0
    inactive_threshold: int = 0
    num_replicas: int = 0
    mem_storage: bool = False
    metadata: dict[str, str] = {}
    pause_until: str | None = None
    deliver_subject: str = ""
    deliver_group: str = ""
    flow_control: bool = False
    idle_heartbeat: int = 0

    @property
    def filters(self) -> tuple[str, ...]:
        """The subjects it takes; empty: all."""
        return (self.filter_subject,) if self.filter_subject else tuple(self.filter_subjects)


class SequencePair(msgspec.Struct, frozen=True):
    """A position in a consumer and in its stream."""

    consumer_seq: int = 0
    stream_seq: int = 0
    last_active: str | None = None


class ConsumerInfo(msgspec.Struct, frozen=True):
    """A consumer's configuration and how far it is."""

    stream_name: str = ""
    name: str = ""
    created: str = ""
    config: ConsumerConfig = msgspec.field(default_factory=ConsumerConfig)
    delivered: SequencePair = SequencePair()
    ack_floor: SequencePair = SequencePair()
    num_ack_pending: int = 0
    num_redelivered: int = 0
    num_waiting: int = 0
    num_pending: int = 0
    cluster: ClusterInfo | None = None
    push_bound: bool = False
    paused: bool = False
    pause_remaining: int = 0


def consumer_request(
    stream: str, config: ConsumerConfig, action: str = ""
) -> tuple[str, dict[str, Any]]:
    """The API verb and body that create or change a consumer; the name and a filter are in it."""
    verb = f"CONSUMER.CREATE.{stream}.{config.durable_name or config.name}"
    if config.filter_subject:
        verb = f"{verb}.{config.filter_subject}"
    return verb, {"stream_name": stream, "config": config, "action": action}


class AckAddress(msgspec.Struct, frozen=True):
    """What the reply subject of a delivered message contains."""

    stream: str
    consumer: str
    delivered: int  # how many times, this one included
    sequence: int  # in the stream
    consumer_sequence: int
    timestamp_ns: int  # when it was stored
    pending: int  # how many follow


def parse_ack_address(reply: bytes) -> AckAddress:
    """Parse `$JS.ACK.<stream>.<consumer>...`, with or without domain and account hash."""
    parts = reply.split(b".")
    at = 2 if len(parts) == 9 else 4
    try:
        stream, consumer = parts[at].decode(), parts[at + 1].decode()
        return AckAddress(stream, consumer, *map(int, parts[at + 2 : at + 7]))
    except (IndexError, TypeError, ValueError) as error:
        raise ProtocolError(f"not the address of an ack: {reply[:200]!r}") from error
