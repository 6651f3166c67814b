"""The blocking API, for scripts and notebooks: `with millstream.blocking.connect() as mill`.

Every class here is the blocking form of the asynchronous class of the same name, generated from
it; the work is done by an event loop on a separate thread.
"""

from millstream.blocking.connecting import connect
from millstream.blocking.endpoints import EndpointGroup
from millstream.blocking.generated.delivery import Delivery
from millstream.blocking.generated.event_store import (
    AggregateChange,
    EventStore,
    Projection,
    ProjectionView,
)
from millstream.blocking.generated.message import Message
from millstream.blocking.generated.mill import Mill
from millstream.blocking.generated.producing import EventProducer, PackProducer, Process, Writer
from millstream.blocking.generated.subjects import Identity, PacedPublisher, Service, Subscriber
from millstream.blocking.generated.subscription import (
    DeadLetterQueue,
    Group,
    HttpPush,
    Subscription,
)
from millstream.blocking.generated.tables import Guard, Registry, Table
from millstream.blocking.generated.topic import Subscriptions, Topic, TopicAdmin
from millstream.blocking.sending import Pending

__all__ = [
    "AggregateChange",
    "DeadLetterQueue",
    "Delivery",
    "EndpointGroup",
    "EventProducer",
    "EventStore",
    "Group",
    "Guard",
    "HttpPush",
    "Identity",
    "Message",
    "Mill",
    "PacedPublisher",
    "PackProducer",
    "Pending",
    "Process",
    "Projection",
    "ProjectionView",
    "Registry",
    "Service",
    "Subscriber",
    "Subscription",
    "Subscriptions",
    "Table",
    "Topic",
    "TopicAdmin",
    "Writer",
    "connect",
]
