"""The blocking twin, for scripts and notebooks: `with millstream.blocking.connect() as mill`.

Every class here is the plain face of the asynchronous one of the same name, made from it, and does
its work in an event loop on a thread of its own.
"""

from millstream.blocking.delivery import Delivery
from millstream.blocking.door import connect
from millstream.blocking.endpoints import EndpointGroup
from millstream.blocking.message import Message
from millstream.blocking.mill import Mill
from millstream.blocking.producing import EventProducer, PackProducer, Process, Writer
from millstream.blocking.sending import Pending
from millstream.blocking.state import Guard, Registry, Table
from millstream.blocking.subjects import Identity, PacedPublisher, Service, Subscriber
from millstream.blocking.subscription import DeadLetterQueue, Group, HttpPush, Subscription
from millstream.blocking.topic import Topic

__all__ = [
    "DeadLetterQueue",
    "Delivery",
    "EndpointGroup",
    "EventProducer",
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
    "Registry",
    "Service",
    "Subscriber",
    "Subscription",
    "Table",
    "Topic",
    "Writer",
    "connect",
]
