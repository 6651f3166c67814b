"""Event streaming for Python: durable messaging in front, Spark pipelines behind.

Names are loaded from their rooms when they are first used, so `import millstream` stays light:
no pyspark and no pyarrow until something needs them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from millstream.errors import MillstreamError

if TYPE_CHECKING:
    from millstream import blocking as blocking
    from millstream.broker import Broker as Broker
    from millstream.broker import BrokerSettings as BrokerSettings
    from millstream.broker import Cluster as Cluster
    from millstream.events.packs.packing import Packing as Packing
    from millstream.events.row_buffer import Columns as Columns
    from millstream.messaging import Connecting as Connecting
    from millstream.messaging import Counters as Counters
    from millstream.messaging import DeadLetter as DeadLetter
    from millstream.messaging import DeadLetterFilter as DeadLetterFilter
    from millstream.messaging import DeadLetterQueue as DeadLetterQueue
    from millstream.messaging import Delivery as Delivery
    from millstream.messaging import Event as Event
    from millstream.messaging import Group as Group
    from millstream.messaging import GroupEvent as GroupEvent
    from millstream.messaging import GroupInfo as GroupInfo
    from millstream.messaging import GroupSettings as GroupSettings
    from millstream.messaging import HttpPush as HttpPush
    from millstream.messaging import HttpPushSettings as HttpPushSettings
    from millstream.messaging import Identity as Identity
    from millstream.messaging import IdentitySettings as IdentitySettings
    from millstream.messaging import Lag as Lag
    from millstream.messaging import Message as Message
    from millstream.messaging import NewEvent as NewEvent
    from millstream.messaging import Origin as Origin
    from millstream.messaging import Overload as Overload
    from millstream.messaging import PublishOptions as PublishOptions
    from millstream.messaging import ReadPlan as ReadPlan
    from millstream.messaging import Receipt as Receipt
    from millstream.messaging import RedriveReport as RedriveReport
    from millstream.messaging import Reject as Reject
    from millstream.messaging import Service as Service
    from millstream.messaging import Start as Start
    from millstream.messaging import Subscriber as Subscriber
    from millstream.messaging import SubscriberSettings as SubscriberSettings
    from millstream.messaging import Subscription as Subscription
    from millstream.messaging import SubscriptionInfo as SubscriptionInfo
    from millstream.messaging import SubscriptionSettings as SubscriptionSettings
    from millstream.messaging import Topic as Topic
    from millstream.messaging import TopicInfo as TopicInfo
    from millstream.messaging import TopicSettings as TopicSettings
    from millstream.messaging.process import Process as Process
    from millstream.messaging.process import ProcessSettings as ProcessSettings
    from millstream.mill import Mill as Mill
    from millstream.mill import connect as connect
    from millstream.schemas.registry.guard import Guard as Guard
    from millstream.schemas.registry.guard import GuardSettings as GuardSettings
    from millstream.schemas.registry.registry import Registry as Registry
    from millstream.tables import Table as Table

    __version__: str

__all__ = [
    "Broker",
    "BrokerSettings",
    "Cluster",
    "Columns",
    "Connecting",
    "Counters",
    "DeadLetter",
    "DeadLetterFilter",
    "DeadLetterQueue",
    "Delivery",
    "Event",
    "Group",
    "GroupEvent",
    "GroupInfo",
    "GroupSettings",
    "Guard",
    "GuardSettings",
    "HttpPush",
    "HttpPushSettings",
    "Identity",
    "IdentitySettings",
    "Lag",
    "Message",
    "Mill",
    "MillstreamError",
    "NewEvent",
    "Origin",
    "Overload",
    "Packing",
    "Process",
    "ProcessSettings",
    "PublishOptions",
    "ReadPlan",
    "Receipt",
    "RedriveReport",
    "Registry",
    "Reject",
    "Service",
    "Start",
    "Subscriber",
    "SubscriberSettings",
    "Subscription",
    "SubscriptionInfo",
    "SubscriptionSettings",
    "Table",
    "Topic",
    "TopicInfo",
    "TopicSettings",
    "__version__",
    "connect",
]

# Public name -> the room that defines it. Every name of `__all__` but the error base is here.
_HOMES = {
    "Broker": "millstream.broker",
    "BrokerSettings": "millstream.broker",
    "Cluster": "millstream.broker",
    "Columns": "millstream.events.row_buffer",
    "Connecting": "millstream.messaging",
    "Counters": "millstream.messaging",
    "DeadLetter": "millstream.messaging",
    "DeadLetterFilter": "millstream.messaging",
    "DeadLetterQueue": "millstream.messaging",
    "Delivery": "millstream.messaging",
    "Event": "millstream.messaging",
    "Group": "millstream.messaging",
    "GroupEvent": "millstream.messaging",
    "GroupInfo": "millstream.messaging",
    "GroupSettings": "millstream.messaging",
    "Guard": "millstream.schemas.registry.guard",
    "GuardSettings": "millstream.schemas.registry.guard",
    "HttpPush": "millstream.messaging",
    "HttpPushSettings": "millstream.messaging",
    "Identity": "millstream.messaging",
    "IdentitySettings": "millstream.messaging",
    "Lag": "millstream.messaging",
    "Message": "millstream.messaging",
    "Mill": "millstream.mill",
    "NewEvent": "millstream.messaging",
    "Origin": "millstream.messaging",
    "Overload": "millstream.messaging",
    "Packing": "millstream.events.packs.packing",
    "Process": "millstream.messaging.process",
    "ProcessSettings": "millstream.messaging.process",
    "PublishOptions": "millstream.messaging",
    "ReadPlan": "millstream.messaging",
    "Receipt": "millstream.messaging",
    "RedriveReport": "millstream.messaging",
    "Registry": "millstream.schemas.registry.registry",
    "Reject": "millstream.messaging",
    "Service": "millstream.messaging",
    "Start": "millstream.messaging",
    "Subscriber": "millstream.messaging",
    "SubscriberSettings": "millstream.messaging",
    "Subscription": "millstream.messaging",
    "SubscriptionInfo": "millstream.messaging",
    "SubscriptionSettings": "millstream.messaging",
    "Table": "millstream.tables",
    "Topic": "millstream.messaging",
    "TopicInfo": "millstream.messaging",
    "TopicSettings": "millstream.messaging",
    "connect": "millstream.mill",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        value: Any = version("millstream")
    elif name == "blocking":
        from importlib import import_module

        value = import_module("millstream.blocking")
    elif name in _HOMES:
        from importlib import import_module

        value = getattr(import_module(_HOMES[name]), name)
    else:
        raise AttributeError(f"module 'millstream' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
