"""Every error Millstream raises.

MillstreamError
├── ConfigError (ValueError)                 a setting, option or argument is wrong
│   ├── MissingExtra (ImportError)           an optional dependency is not installed
│   └── PipelineInvalid                      the declarations of a project do not fit together
├── BrokerError (RuntimeError)               the embedded server
│   ├── ServerMissing                        no nats-server binary was found
│   ├── ServerTooOld                         the one found is too old
│   ├── StartFailed                          it did not start; `cause` says why
│   │   ├── PortTaken                        another process listens there
│   │   ├── FolderLocked                     another server owns the data folder
│   │   ├── WrongKey                         the folder is encrypted with another key
│   │   └── NoSpace                          the disk is full
│   ├── NotRunning                           nothing runs on this data folder
│   └── Unhealthy                            the server could not read some stored data
├── ConnectError (ConnectionError)           the connection to the broker
│   ├── ConnectFailed                        no server could be reached
│   │   └── TlsFailed                        it was reached, but not securely
│   ├── AuthenticationFailed                 it was reached and refused the credentials
│   └── ConnectionClosed                     the connection was closed (by us, or retries ran out)
├── PermissionDenied (PermissionError)       this user has no permission for that subject
├── RequestTimeout (TimeoutError)            no answer within the deadline
├── IncompleteList (TimeoutError)            a list lacks streams that could not be reached
├── NoMessage (TimeoutError)                 no message arrived within the time given
├── SubscriberClosed                         the subscriber was closed or drained
├── NoResponders                             no subscriber or service listens on the subject
│   └── NoGuard                              no guard of the guarded topic answers
├── ServiceError                             a service answered with an error
├── IdentityTaken                            another living client holds the client id
├── IdentityLost                             the client id was taken over by another client
├── GroupNotFound (LookupError)              the topic has no ordered group of that name
├── GroupBusy                                the group has running members and cannot be changed
├── DeadLetterNotFound (LookupError)         the queue has no dead letter at that offset
├── RedriveTaken                             another redrive of the same dead letters took over
├── ApiError                                 JetStream refused a request; carries its codes
│   ├── TopicNotFound (LookupError)
│   ├── TopicConflict (ValueError)           declared before with other settings
│   ├── SubscriptionNotFound (LookupError)
│   ├── SubscriptionConflict (ValueError)
│   ├── WrongSequence                        an expected-sequence check failed: the fence held
│   ├── LimitReached                         the topic, account or disk limit is used up
│   └── NotReplicated                        replicas were requested from a single node
├── PublishError                             an event was not stored, or may not be stored
│   ├── NotDurable                           the server stores less durably than the topic demands
│   ├── PartlyStored                         some events of a list were refused
│   ├── PayloadTooLarge (ValueError)
│   ├── NotKept                              acknowledged and dropped: nobody wants it
│   ├── Unconfirmed                          no ack arrived; it may or may not be stored
│   ├── FencedOut                            another process took over this writer's name
│   ├── PartlyWritten                        some rows of a Spark batch are stored, others are not
│   └── RowsMoved                            a rerun Spark task has different rows
├── ProcessFailed                            a process's function raised; its output was not stored
├── PipelineError (RuntimeError)             a pipeline of Spark queries
│   ├── PipelineBusy                         it is running and cannot be started, reset or packed
│   ├── PipelineNotRunning                   it is not running, so it cannot be stopped
│   └── FlowsFailed                          some flows failed permanently, after their restarts
├── DataLoss                                 events that should exist are missing
├── VersionConflict                          an append expected another version of the aggregate
├── AggregateNotFound (LookupError)          the event store has no events of that aggregate
│   └── AggregateDeleted                     it was deleted or archived: no more events
├── ProjectionNotFound (LookupError)         there is no projection of that name
├── NotCaughtUp                              a projection lacks too much to be made the active one
├── UnknownEvent (LookupError)               a type of event that the event store does not know
├── HistoryGone (LookupError)                a table does not know a value of the past any more
├── BackupError                              a backup cannot be made, read or restored
├── CaptureError (RuntimeError)              a capture of database changes cannot go on
│   ├── CaptureBusy                          it is running and cannot be started or reset
│   ├── CaptureNotRunning                    it is not running, so it cannot be stopped
│   ├── SourceUnreachable                    the database cannot be reached
│   ├── LogUnreadable (ValueError)           what the database sent cannot be decoded
│   ├── SourceLost                           it no longer has the changes that come next
│   └── BreakingChange                       a table was changed incompatibly; names the column
├── GatewayError (RuntimeError)              a gateway for clients of other protocols cannot go on
│   ├── GatewayBusy                          one of its name runs already
│   └── GatewayNotRunning                    no process runs it
├── SinkError (RuntimeError)                 a topic cannot be applied to a database
│   ├── SinkTakenOver                        another process applies it under the same name
│   └── RowRefused                           the database refused a row; names its key
├── Undecodable (ValueError)                 a stored event cannot be decoded
├── NotJson (ValueError)                     json() was asked for, and the value is none
├── SchemaError (ValueError)                 a schema cannot be used or changed in this way
│   ├── Unmappable                           a type cannot be represented in a format
│   ├── Incompatible                         a version is not compatible with earlier ones
│   ├── SchemaNotFound (LookupError)         the registry has no such schema
│   ├── NoUpcaster                           a stored version of an event cannot be read here
│   └── Unfit                                a value does not fit its schema
└── PackError (ValueError)                   bytes that are not a valid pack

Each message says what was requested, what was found and what to do; the facts are also fields.
"""

from __future__ import annotations

from millstream.errors.base import (
    ConfigError,
    MillstreamError,
    MissingExtra,
)
from millstream.errors.broker import (
    BrokerError,
    FolderLocked,
    NoSpace,
    NotRunning,
    PortTaken,
    ServerMissing,
    ServerTooOld,
    StartFailed,
    Unhealthy,
    WrongKey,
)
from millstream.errors.cdc import (
    BreakingChange,
    CaptureBusy,
    CaptureError,
    CaptureNotRunning,
    LogUnreadable,
    RowRefused,
    SinkError,
    SinkTakenOver,
    SourceLost,
    SourceUnreachable,
)
from millstream.errors.connection import (
    AuthenticationFailed,
    ConnectError,
    ConnectFailed,
    ConnectionClosed,
    IdentityLost,
    IdentityTaken,
    IncompleteList,
    NoGuard,
    NoMessage,
    NoResponders,
    PermissionDenied,
    RequestTimeout,
    ServiceError,
    SubscriberClosed,
    TlsFailed,
)
from millstream.errors.data import (
    BackupError,
    DataLoss,
    HistoryGone,
    Incompatible,
    NotJson,
    PackError,
    SchemaError,
    SchemaNotFound,
    Undecodable,
    Unfit,
    Unmappable,
)
from millstream.errors.gateways import GatewayBusy, GatewayError, GatewayNotRunning
from millstream.errors.pipelines import (
    FlowsFailed,
    PipelineBusy,
    PipelineError,
    PipelineInvalid,
    PipelineNotRunning,
)
from millstream.errors.stores import (
    AggregateDeleted,
    AggregateNotFound,
    NotCaughtUp,
    NoUpcaster,
    ProjectionNotFound,
    UnknownEvent,
    VersionConflict,
)
from millstream.errors.topics import (
    ApiError,
    DeadLetterNotFound,
    FencedOut,
    GroupBusy,
    GroupNotFound,
    LimitReached,
    NotDurable,
    NotKept,
    NotReplicated,
    PartlyStored,
    PartlyWritten,
    PayloadTooLarge,
    ProcessFailed,
    PublishError,
    RedriveTaken,
    RowsMoved,
    SubscriptionConflict,
    SubscriptionNotFound,
    TopicConflict,
    TopicNotFound,
    Unconfirmed,
    WrongSequence,
)

__all__ = [
    "AggregateDeleted",
    "AggregateNotFound",
    "ApiError",
    "AuthenticationFailed",
    "BackupError",
    "BreakingChange",
    "BrokerError",
    "CaptureBusy",
    "CaptureError",
    "CaptureNotRunning",
    "ConfigError",
    "ConnectError",
    "ConnectFailed",
    "ConnectionClosed",
    "DataLoss",
    "DeadLetterNotFound",
    "FencedOut",
    "FlowsFailed",
    "FolderLocked",
    "GatewayBusy",
    "GatewayError",
    "GatewayNotRunning",
    "GroupBusy",
    "GroupNotFound",
    "HistoryGone",
    "IdentityLost",
    "IdentityTaken",
    "Incompatible",
    "IncompleteList",
    "LimitReached",
    "LogUnreadable",
    "MillstreamError",
    "MissingExtra",
    "NoGuard",
    "NoMessage",
    "NoResponders",
    "NoSpace",
    "NoUpcaster",
    "NotCaughtUp",
    "NotDurable",
    "NotJson",
    "NotKept",
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
    "ProjectionNotFound",
    "PublishError",
    "RedriveTaken",
    "RequestTimeout",
    "RowRefused",
    "RowsMoved",
    "SchemaError",
    "SchemaNotFound",
    "ServerMissing",
    "ServerTooOld",
    "ServiceError",
    "SinkError",
    "SinkTakenOver",
    "SourceLost",
    "SourceUnreachable",
    "StartFailed",
    "SubscriberClosed",
    "SubscriptionConflict",
    "SubscriptionNotFound",
    "TlsFailed",
    "TopicConflict",
    "TopicNotFound",
    "Unconfirmed",
    "Undecodable",
    "Unfit",
    "Unhealthy",
    "UnknownEvent",
    "Unmappable",
    "VersionConflict",
    "WrongKey",
    "WrongSequence",
]
