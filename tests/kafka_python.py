"""The library kafka-python, for tests: imported here only, because it warns when it is imported."""

from __future__ import annotations

import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # of Python 3.11, for how it finds files
    from kafka import KafkaAdminClient, KafkaConsumer, KafkaProducer, TopicPartition
    from kafka.admin import ConfigResource, NewPartitions, NewTopic
    from kafka.errors import BrokerResponseError, KafkaError, for_code
    from kafka.record import MemoryRecords
    from kafka.record.default_records import DefaultRecordBatchBuilder
    from kafka.structs import OffsetAndMetadata

__all__ = [
    "BrokerResponseError",
    "ConfigResource",
    "DefaultRecordBatchBuilder",
    "KafkaAdminClient",
    "KafkaConsumer",
    "KafkaError",
    "KafkaProducer",
    "MemoryRecords",
    "NewPartitions",
    "NewTopic",
    "OffsetAndMetadata",
    "TopicPartition",
    "for_code",
]
