"""What application code calls: connections, subjects, topics, events, subscriptions."""

from millstream.messaging.client import Client, Connecting, connect
from millstream.messaging.dead_letter import DeadLetter, DeadLetterFilter
from millstream.messaging.dead_letter_queue import DeadLetterQueue, RedriveReport
from millstream.messaging.delivery import Delivery
from millstream.messaging.event import Event, NewEvent, PublishOptions, Receipt
from millstream.messaging.group import Group, GroupEvent, GroupSettings
from millstream.messaging.group_admin import GroupInfo
from millstream.messaging.http_push import HttpPush, HttpPushSettings
from millstream.messaging.identity import Identity, IdentitySettings
from millstream.messaging.message import Message
from millstream.messaging.overload import Counters, Overload, SubscriberSettings
from millstream.messaging.reading import ReadPlan
from millstream.messaging.service import Service
from millstream.messaging.start import Start
from millstream.messaging.subscriber import Subscriber
from millstream.messaging.subscription import Reject, Subscription
from millstream.messaging.subscription_admin import Lag, SubscriptionInfo
from millstream.messaging.subscription_settings import SubscriptionSettings
from millstream.messaging.topic import Topic
from millstream.messaging.topic_info import TopicInfo
from millstream.messaging.topic_settings import Origin, TopicSettings

__all__ = [
    "Client",
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
    "HttpPush",
    "HttpPushSettings",
    "Identity",
    "IdentitySettings",
    "Lag",
    "Message",
    "NewEvent",
    "Origin",
    "Overload",
    "PublishOptions",
    "ReadPlan",
    "Receipt",
    "RedriveReport",
    "Reject",
    "Service",
    "Start",
    "Subscriber",
    "SubscriberSettings",
    "Subscription",
    "SubscriptionInfo",
    "SubscriptionSettings",
    "Topic",
    "TopicInfo",
    "TopicSettings",
    "connect",
]
