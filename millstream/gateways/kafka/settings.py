"""Settings of the Kafka gateway."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from millstream.declared import Declaration, Form, declared
from millstream.errors import ConfigError
from millstream.gateways.settings import LIMITS, GatewaySettings

__all__ = ["DEFAULT_PORT", "KafkaSettings"]

DEFAULT_PORT: Final = 9092
TOPICS: Final = "Topics"
_MEBIBYTE: Final = 1024 * 1024
_PARTITIONS_MAX: Final = 1000


class ValueFormat(StrEnum):
    """What the values of typed topics are for clients."""

    TOPIC = "topic"
    JSON = "json"
    AVRO = "avro"
    PROTOBUF = "protobuf"


@dataclass(frozen=True, slots=True, kw_only=True)
class KafkaSettings(GatewaySettings):
    """Everything about one gateway for clients of Kafka."""

    name: str = declared(
        "kafka", Declaration("Name of the gateway; only one of a name runs at a time.")
    )
    port: int = declared(
        DEFAULT_PORT, Declaration("Port to listen on; 0 for any free port.", Form.NUMBER)
    )
    auto_create: bool = declared(
        True,
        Declaration(
            "Create topics that clients ask for and that do not exist.",
            Form.SWITCH,
            TOPICS,
            flags=("--auto-create/--no-auto-create",),
        ),
    )
    default_partitions: int = declared(
        1, Declaration("Partitions of topics that clients create.", Form.NUMBER, TOPICS)
    )
    default_replicas: int | None = declared(
        None,
        Declaration(
            "Replicas of topics that clients create without saying how many.",
            Form.NUMBER,
            TOPICS,
            default_text="3 on a cluster of three nodes or more, else 1",
        ),
    )
    values: ValueFormat = declared(
        ValueFormat.TOPIC,
        Declaration(
            "What values of typed topics are for clients: json, avro, protobuf, or topic, as each "
            "topic has them.",
            Form.CHOICE,
            TOPICS,
            metavar="|".join(ValueFormat),
        ),
    )
    values_prefix: bool | None = declared(
        None,
        Declaration(
            "Values of typed topics begin with the prefix of a schema registry.",
            Form.SWITCH,
            TOPICS,
            flags=("--values-prefix/--no-values-prefix",),
            default_text="with avro and protobuf",
        ),
    )
    cache_bytes: int = declared(
        128 * _MEBIBYTE,
        Declaration(
            "Size of the batches that are kept for readers near the end of topics.",
            Form.SIZE,
            LIMITS,
        ),
    )

    def __post_init__(self) -> None:
        # The slots of a dataclass make it another class than the one that `super()` would mean.
        GatewaySettings.__post_init__(self)
        if not 1 <= self.default_partitions <= _PARTITIONS_MAX:
            raise ConfigError(
                f"default_partitions must be 1 to {_PARTITIONS_MAX:,}, not "
                f"{self.default_partitions:,}"
            )
        if self.cache_bytes < 0:
            raise ConfigError(f"cache_bytes cannot be below 0, as {self.cache_bytes:,} is")
        try:
            object.__setattr__(self, "values", ValueFormat(self.values))
        except ValueError:
            choices = ", ".join(ValueFormat)
            raise ConfigError(f"values {self.values!r}: choose one of {choices}") from None
