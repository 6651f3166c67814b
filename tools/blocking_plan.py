"""Which asynchronous classes have a blocking twin, in which file, and their special cases."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class ClassPlan:
    """How the twin of one class is generated. Everything else comes from the class itself."""

    home: str  # module of the asynchronous class
    name: str
    file: str  # module of the twin in millstream/blocking/generated
    base: str = "Twin"  # a hand-written base for what cannot be generated
    base_home: str = "twin"
    also: tuple[str, ...] = ()  # asynchronous base classes that the twin has too
    fixed: dict[str, str] = field(default_factory=dict)  # attributes that never change: their types
    live: dict[str, str] = field(default_factory=dict)  # attributes that change: read on the loop
    pure: bool = False  # its properties never change: read without the loop
    ahead: dict[str, int] = field(default_factory=dict)  # items fetched ahead of the reader
    posted: frozenset[str] = frozenset()  # plain calls without a result
    queued: frozenset[str] = frozenset()  # calls that go to the loop in groups
    lots: frozenset[str] = frozenset()  # take many events, some at a time
    last: frozenset[str] = frozenset()  # calls that wait until producers handed over their events
    ends: frozenset[str] = frozenset()  # calls that are made even after a queued one failed
    skip: frozenset[str] = frozenset()  # not offered, or written by hand in the base


MESSAGING = "millstream.messaging"
# Hand-written bases that enter and leave a context themselves.
CONTEXT_BASES = {
    *("Changing", "Connected", "DeliveryReading", "GroupLeaving", "MessageReading", "Sending"),
}

# In order: a file imports the classes of the files before it at the top, those of later files
# inside the calls that need them.
PLANS = [
    ClassPlan(
        f"{MESSAGING}.core.message",
        "Message",
        "message",
        pure=True,
        fixed={"data": "bytes"},
    ),
    ClassPlan(
        f"{MESSAGING}.subscriptions.delivery",
        "Delivery",
        "delivery",
        also=("Event",),
        pure=True,
        posted=frozenset({"ack", "nack", "extend", "terminate"}),
        skip=frozenset({"timestamp", "position"}),
    ),
    ClassPlan(
        f"{MESSAGING}.core.subscriber",
        "Subscriber",
        "subjects",
        base="MessageReading",
        base_home="reading",
        fixed={"subject": "str", "settings": "SubscriberSettings"},
        skip=frozenset({"start", "next", "counters", "pending", "close", "__aiter__", "__anext__"}),
    ),
    ClassPlan(
        f"{MESSAGING}.core.paced_publisher",
        "PacedPublisher",
        "subjects",
        base="Sending",
        base_home="sending",
        fixed={"subject": "str"},
        live={"published": "int", "held_seconds": "float", "unanswered": "int"},
        queued=frozenset({"publish"}),
        ends=frozenset({"close"}),
    ),
    ClassPlan(
        f"{MESSAGING}.core.service",
        "Service",
        "subjects",
        base="Endpoints",
        base_home="endpoints",
        fixed={
            "name": "str",
            "version": "str",
            "id": "str",
            "description": "str",
            "metadata": "dict[str, str]",
        },
        skip=frozenset({"endpoint", "group", "endpoints", "prefix", "queue"}),
    ),
    ClassPlan(
        f"{MESSAGING}.core.identity",
        "Identity",
        "subjects",
        fixed={"client_id": "str"},
        live={"epoch": "int"},
        skip=frozenset({"claim"}),  # it is claimed when the connection returns it
    ),
    ClassPlan(
        f"{MESSAGING}.subscriptions.subscription",
        "Subscription",
        "subscription",
        base="DeliveryReading",
        base_home="reading",
        fixed={"name": "str", "settings": "SubscriptionSettings"},
        skip=frozenset({"inbox", "__aiter__"}),
    ),
    ClassPlan(
        f"{MESSAGING}.groups.group",
        "Group",
        "subscription",
        base="GroupLeaving",
        base_home="grouping",
        fixed={"name": "str", "topic": "str", "settings": "GroupSettings"},
        skip=frozenset({"stop"}),
    ),
    ClassPlan(
        f"{MESSAGING}.dead_letters.queue",
        "DeadLetterQueue",
        "subscription",
        fixed={"name": "str"},
        ahead={"letters": 64, "redriving": 64},
    ),
    ClassPlan(
        f"{MESSAGING}.subscriptions.http_push",
        "HttpPush",
        "subscription",
        fixed={"settings": "HttpPushSettings"},
        live={"delivered": "int", "retried": "int", "rejected": "int"},
    ),
    ClassPlan(
        f"{MESSAGING}.publishing.event_producer",
        "EventProducer",
        "producing",
        base="Sending",
        base_home="sending",
        queued=frozenset({"send"}),
        ends=frozenset({"close"}),
        skip=frozenset({"stored", "failed", "abandoned"}),
    ),
    ClassPlan(
        f"{MESSAGING}.publishing.pack_producer",
        "PackProducer",
        "producing",
        base="Sending",
        base_home="sending",
        live={"last": "Receipt | None"},
        queued=frozenset({"send"}),
        lots=frozenset({"send_many"}),
        ends=frozenset({"close"}),
    ),
    ClassPlan(
        f"{MESSAGING}.publishing.writer",
        "Writer",
        "producing",
        base="Sending",
        base_home="sending",
        fixed={"name": "str"},
        live={"skipped": "int"},
        queued=frozenset({"write"}),
        ends=frozenset({"close", "abandon"}),
    ),
    ClassPlan(
        f"{MESSAGING}.process",
        "Process",
        "producing",
        fixed={"settings": "ProcessSettings"},
    ),
    ClassPlan(f"{MESSAGING}.subscriptions.admin", "Subscriptions", "topic"),
    ClassPlan(f"{MESSAGING}.groups.admin", "GroupAdmin", "topic"),
    ClassPlan(f"{MESSAGING}.schedules", "Schedules", "producing"),
    ClassPlan(
        f"{MESSAGING}.topic_admin",
        "TopicAdmin",
        "topic",
        skip=frozenset({"read_messages", "refresh_durability"}),
    ),
    ClassPlan(
        f"{MESSAGING}.topic",
        "Topic",
        "topic",
        base="TopicReading",
        base_home="reading",
        fixed={
            "name": "str",
            "settings": "TopicSettings",
            "partitions": "int",
            "subscriptions": "Subscriptions",
            "groups": "GroupAdmin",
            "schedules": "Schedules",
            "admin": "TopicAdmin",
        },
        ahead={"batches": 2},
        skip=frozenset(
            {
                *("read", "value_type", "handle", "acks", "forget_durability"),
                *("process_input", "process_output", "fenced_target", "past"),
            }
        ),
    ),
    ClassPlan("millstream.tables", "PastTable", "tables", pure=True, fixed={"name": "str"}),
    ClassPlan("millstream.tables", "Table", "tables", fixed={"topic": "Topic"}),
    ClassPlan(
        "millstream.schemas.registry.registry",
        "Registry",
        "tables",
        skip=frozenset({"add_version", "delete", "message_at", "put"}),
    ),
    ClassPlan(
        "millstream.schemas.registry.guard",
        "Guard",
        "tables",
        fixed={"topic": "str", "settings": "GuardSettings", "subject": "str"},
        live={"stored": "int", "refused": "int"},
    ),
    ClassPlan(
        "millstream.event_store.change",
        "AggregateChange",
        "event_store",
        base="Changing",
        base_home="changing",
        live={"result": "Loaded[Any] | None"},
        skip=frozenset({"try_append", "repeat", "abandon"}),
    ),
    ClassPlan(
        "millstream.event_store.store",
        "EventStore",
        "event_store",
        fixed={"name": "str", "topic": "Topic"},
        skip=frozenset({"types", "folding", "append_to", "changes_on"}),
    ),
    ClassPlan(
        "millstream.projections.projection",
        "Projection",
        "event_store",
        fixed={"name": "str", "version": "int", "process_name": "str"},
    ),
    ClassPlan(
        "millstream.projections.projection",
        "ProjectionView",
        "event_store",
        fixed={"name": "str"},
    ),
    ClassPlan(
        "millstream.mill",
        "Mill",
        "mill",
        base="Connected",
        base_home="connected",
        live={"identity": "Identity | None"},
        last=frozenset({"close", "drain", "flush"}),
        skip=frozenset({"connection", "jetstream", "open_as"}),
    ),
]

# The first sentence of each generated file.
FILES = {
    "message": "Messages of subjects, as they arrive.",
    "delivery": "Deliveries: events under a lease.",
    "subjects": "Subjects: subscribers, services, client ids.",
    "subscription": "Subscriptions, ordered groups, dead letters and pushes.",
    "producing": "Producers, exactly-once writers and processes.",
    "topic": "Topics: durable, replayable, partitioned logs of events; their subscriptions.",
    "tables": "Tables and schemas.",
    "event_store": "Event stores: aggregates, their events and states; projections.",
    "mill": "The connection that scripts and notebooks hold.",
}

# Alias of a handler's type -> its plain type, and how it is passed to the asynchronous call.
HANDLERS = {
    "MessageHandler": (
        "Callable[[Message], object]",
        "in_thread({0}, partial(Message, self._loop))",
    ),
    "Handler": ("Callable[[Delivery], object]", "in_thread({0}, partial(Delivery, self._loop))"),
    "GroupHandler": ("Callable[[GroupEvent], object]", "in_group({0}, self._inner)"),
    "Transform": ("Callable[..., Any]", "in_thread(collected({0}))"),
    "Decision": ("Callable[[Any], Any]", "in_thread({0})"),
    "Projector": ("Callable[..., Any]", "{0}"),  # it only changes rows: a thread would cost more
}

# Alias of what may be one twin or several -> its plain type; the objects inside are passed on.
SEVERAL = {
    "Sources": "Topic | Sequence[Topic]",
    "Targets": "Topic | Table | Sequence[Topic | Table]",
    "StateTables": "Mapping[str, Table] | Sequence[Table]",
}
