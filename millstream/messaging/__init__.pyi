"""What application code calls: connections, subjects, topics, events, subscriptions."""

from millstream.events.event import Event, NewEvent, PublishOptions, Receipt
from millstream.events.event_list import EventList
from millstream.events.start import Start
from millstream.messaging.client import Client, Connecting
from millstream.messaging.core.discovery import ServiceInfo, ServiceStats
from millstream.messaging.core.identity import Identity, IdentitySettings
from millstream.messaging.core.message import Message
from millstream.messaging.core.overload import Counters, Overload, SubscriberSettings
from millstream.messaging.core.service import Service
from millstream.messaging.core.subscriber import Subscriber
from millstream.messaging.dead_letters.letter import DeadLetter, DeadLetterFilter
from millstream.messaging.dead_letters.queue import DeadLetterQueue, RedriveReport
from millstream.messaging.groups.admin import GroupInfo
from millstream.messaging.groups.group import Group, GroupEvent, GroupSettings
from millstream.messaging.process_list import ProcessInfo
from millstream.messaging.publishing.counters import ProducerCounters
from millstream.messaging.reading.event_count import EventCount
from millstream.messaging.reading.replay import ReadPlan
from millstream.messaging.schedules import Schedule
from millstream.messaging.subscriptions.admin import Lag, SubscriptionInfo
from millstream.messaging.subscriptions.delivery import Delivery
from millstream.messaging.subscriptions.http_push import HttpPush, HttpPushSettings
from millstream.messaging.subscriptions.settings import SubscriptionSettings
from millstream.messaging.subscriptions.subscription import Reject, Subscription
from millstream.messaging.topic import Topic
from millstream.messaging.topics.info import TopicInfo
from millstream.messaging.topics.settings import Origin, TopicSettings

__all__ = [
    "Client",
    "Connecting",
    "Counters",
    "DeadLetter",
    "DeadLetterFilter",
    "DeadLetterQueue",
    "Delivery",
    "Event",
    "EventCount",
    "EventList",
    "Group",
    "GroupEvent",
    "GroupInfo",
    "GroupSettings",
    "HttpPush",
    "HttpPushSettings",
    "Identity",
    "IdentitySettings",
    "Lag",
    "Message",
    "NewEvent",
    "Origin",
    "Overload",
    "ProcessInfo",
    "ProducerCounters",
    "PublishOptions",
    "ReadPlan",
    "Receipt",
    "RedriveReport",
    "Reject",
    "Schedule",
    "Service",
    "ServiceInfo",
    "ServiceStats",
    "Start",
    "Subscriber",
    "SubscriberSettings",
    "Subscription",
    "SubscriptionInfo",
    "SubscriptionSettings",
    "Topic",
    "TopicInfo",
    "TopicSettings",
]
