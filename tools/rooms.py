"""The rooms of the package and who may import whom.

tests/unit/test_layers.py holds the code to these tables; tools/architecture_picture.py draws them.
"""

from __future__ import annotations

FOUNDATION = {
    *("errors", "settings", "deadline", "declared", "lazy", "closing", "guarded", "nearest"),
    *("failure_log", "nats_context", "version", "bulk"),
}
EDGES = {"cli"}
INNER = {
    *("broker", "wire", "events", "messaging", "schemas", "tables", "spark", "pipelines"),
    *("backups", "event_store", "projections", "cdc", "gateways"),
}
MESSAGING = {
    "messaging",
    "messaging.core",
    "messaging.topics",
    "messaging.publishing",
    "messaging.reading",
    "messaging.subscriptions",
    "messaging.dead_letters",
    "messaging.groups",
    "messaging.processing",
}
EVENTS = {"events", "events.packs"}
CDC = {"cdc", "cdc.postgres", "cdc.mysql", "cdc.sqlite", "cdc.sink"}
GATEWAYS = {"gateways", "gateways.kafka"}
SCHEMAS = {"schemas", "schemas.values", "schemas.formats", "schemas.registry"}

# Room or sub-room -> the rooms it may import besides the foundation and itself. A room's own name
# means the files directly in it; its sub-rooms are named one by one.
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "settings": set(),
    "deadline": set(),
    "declared": set(),
    "lazy": set(),
    "closing": set(),
    "guarded": set(),
    "nearest": set(),
    "failure_log": set(),
    "nats_context": set(),
    "version": set(),
    "bulk": set(),
    "broker": set(),
    "wire": set(),
    "wire.aio": {"wire"},
    "wire.sync": {"wire"},
    "events.packs": {"wire", "events"},
    "events": {"wire", "events.packs"},
    "messaging.core": {"wire", "wire.aio", "events"},
    "messaging.topics": {"wire", "wire.aio", "events"},
    "messaging.publishing": {"wire", "wire.aio", *EVENTS, "messaging.topics"},
    "messaging.reading": {"wire", "wire.aio", *EVENTS, "messaging.topics"},
    "messaging.dead_letters": {
        *("wire", "wire.aio", *EVENTS),
        *("messaging.topics", "messaging.reading"),
    },
    "messaging.subscriptions": {
        *("wire", "wire.aio", *EVENTS),
        *("messaging.topics", "messaging.dead_letters"),
    },
    "messaging.groups": {
        *("wire", "wire.aio", *EVENTS),
        *("messaging.topics", "messaging.subscriptions", "messaging.dead_letters"),
    },
    "messaging.processing": {
        *("wire", "wire.aio", *EVENTS),
        *("messaging.topics", "messaging.publishing", "messaging.reading"),
        "messaging.dead_letters",
    },
    "messaging": {"wire", "wire.aio", *EVENTS, *MESSAGING},
    "tables": {*EVENTS, *MESSAGING},
    # The files directly in schemas are its model and its front door; sub-rooms have an order.
    "schemas.values": {"schemas"},
    "schemas.formats": {"schemas", "schemas.values"},
    "schemas": {"schemas.values", "schemas.formats"},
    "schemas.registry": {"wire", "wire.aio", *EVENTS, *MESSAGING, "tables", *SCHEMAS},
    "spark": {
        *("wire", "wire.sync", "events", "messaging.topics", *SCHEMAS, "event_store"),
        *("spark.source", "spark.sink"),
    },
    "spark.source": {
        *("wire", "wire.sync", *EVENTS, "messaging.topics", *SCHEMAS, "event_store", "spark"),
    },
    "spark.sink": {
        *("wire", "wire.sync", *EVENTS, "messaging.topics", *SCHEMAS),
        *("spark", "spark.source"),
    },
    "pipelines": {
        *(
            "wire.sync",
            "events",
            "schemas",
            "spark",
            "spark.source",
            "blocking",
            "cdc.sink",
            "__init__",
        ),
    },
    "event_store": {"wire", "wire.aio", *EVENTS, *MESSAGING, *SCHEMAS, "tables"},
    "projections": {*EVENTS, *MESSAGING, "tables", "event_store"},
    "mill": {
        *(*EVENTS, *MESSAGING, "tables", "schemas", "schemas.registry", "event_store"),
        "projections",
    },
    "backups": {"wire", "wire.aio", *MESSAGING, "schemas.registry", "mill"},
    # The files directly in cdc are the model and the capture; a sub-room is one kind of database.
    "cdc.postgres": {*EVENTS, *SCHEMAS, "cdc"},
    "cdc.mysql": {*EVENTS, *SCHEMAS, "cdc"},
    "cdc.sqlite": {*EVENTS, *SCHEMAS, "cdc"},
    "cdc.sink": {*EVENTS, *MESSAGING, *SCHEMAS, "mill", "cdc"},
    "cdc": {"wire", *EVENTS, *MESSAGING, *SCHEMAS, "tables", "mill", *CDC},
    # The files directly in gateways are the frame; a sub-room is one protocol.
    "gateways": {
        *("broker", "wire", "wire.aio", *EVENTS, *MESSAGING, *SCHEMAS, "mill", "gateways.kafka"),
    },
    "gateways.kafka": {
        *("wire", "wire.aio", *EVENTS, *MESSAGING, *SCHEMAS, "tables", "mill", "gateways"),
    },
    # The blocking twins are written from the classes they mirror.
    "blocking": {
        *("wire", "wire.aio", *EVENTS, *MESSAGING, "event_store", "mill", "blocking.generated"),
    },
    "blocking.generated": {
        *("wire", *EVENTS, *MESSAGING, *SCHEMAS, "tables", "event_store", "projections"),
        *("mill", "blocking"),
    },
    "__init__": {
        *("broker", *EVENTS, *MESSAGING, "tables", "schemas.registry", "event_store", "mill"),
        *("blocking", "projections"),
    },
    "cli.options": {"broker", "wire", *EVENTS, *MESSAGING, "schemas", "event_store"},
    "cli.views": {
        *("broker", "wire", *EVENTS, *MESSAGING, *SCHEMAS, "tables", "event_store", "mill"),
        *("projections", "cdc", "cdc.sink", "gateways", "cli", "cli.options"),
    },
    "cli.files": {"wire", *EVENTS, *MESSAGING, *SCHEMAS, "cli", "cli.options", "cli.views"},
    "cli.commands": {
        *("broker", "wire", *EVENTS, *MESSAGING, *SCHEMAS, "tables", "pipelines", "mill"),
        *("backups", "event_store", "projections", "cli", "cli.options", "cli.views", "cli.files"),
        *(*CDC, *GATEWAYS),
    },
    "cli": {"broker", "mill", "cli.commands", "cli.options", "__init__"},
    # Nothing imports it: the library of that name does, when an application asks for it.
    "eventsourcing": {"wire", "events", *MESSAGING, "blocking", "__init__"},
    "testing": {"broker"},
    "testing_plugin": {"broker", "testing"},
}
