"""Options: all are checked when a query is built; the error for a wrong one names the right one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from millstream.errors import ConfigError
from millstream.spark.options import OPTIONS, sink_options, source_options
from millstream.spark.source.offsets import OffsetLimit


def test_defaults_are_those_of_the_kafka_source() -> None:
    stream = source_options({"subscribe": "orders"}, batch=False)
    assert stream.start == OffsetLimit("latest")
    assert stream.fail_on_data_loss
    assert not stream.headers
    batch = source_options({"subscribe": "orders"}, batch=True)
    assert (batch.start, batch.end) == (OffsetLimit("earliest"), OffsetLimit("latest"))


def test_names_do_not_depend_on_case() -> None:
    options = source_options({"SUBSCRIBE": "a, b,a", "maxoffsetspertrigger": "5"}, batch=False)
    assert options.topics == ("a", "b")
    assert options.offsets_per_trigger == 5


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({}, "give one of the options subscribe, subscribePattern"),
        ({"subscribe": "a", "assign": '{"a": [0]}'}, "'subscribe' and 'assign' cannot be combined"),
        ({"subscribe": " , "}, "it is empty"),
        ({"subscribePattern": "("}, "not a regular expression"),
        ({"assign": "a:0"}, "write it like"),
        ({"assign": '{"a": []}'}, "names no partition"),
        ({"subscribe": "a", "kafka.bootstrap.servers": "x"}, "use 'url'"),
        ({"subscribe": "a", "kafka.group.id": "x"}, "only interest topics need"),
        ({"subscribe": "a", "kafka.max.poll.records": "1"}, "Kafka client"),
        ({"subscribe": "a", "startingOffset": "x"}, "did you mean 'startingOffsets'"),
        ({"subscribe": "a", "zzz": "x"}, "unknown option 'zzz': the options are asOf"),
        ({"topics": "a"}, "use 'subscribe'"),
        ({"subscribe": "a", "startingOffsets": "first"}, "choose earliest, latest, or offsets"),
        ({"subscribe": "a", "startingOffsets": '{"a": {"0": 0}}'}, "offsets start at 1"),
        ({"subscribe": "a", "startingOffsets": '{"a": 1}'}, "not JSON of the form"),
        (
            {"subscribe": "a", "startingOffsets": "latest", "startingTimestamp": "1"},
            "'startingOffsets' and 'startingTimestamp' cannot be combined",
        ),
        ({"subscribe": "a", "startingTimestamp": "yesterday"}, "milliseconds since 1970"),
        ({"subscribe": "a", "maxOffsetsPerTrigger": "0"}, "1 or more"),
        ({"subscribe": "a", "minPartitions": "99999"}, "the maximum is 10,000"),
        ({"subscribe": "a", "failOnDataLoss": "maybe"}, "choose true or false"),
        ({"subscribe": "a", "undecodable": "skip"}, "choose fail, null or drop"),
        ({"subscribe": "a", "columns": "price"}, "no column 'price'"),
        ({"subscribe": "a", "columns": "key.x"}, "no column 'key.x'"),
        ({"eventStore": "a", "includeMetadata": "true"}, "not for event stores"),
        ({"stream": "a", "subjects": "a..b"}, "non-empty tokens"),
        ({"subscribe": "a", "endingOffsets": "latest"}, "belongs to a batch read"),
        ({"subscribe": "a", "topic": "b"}, "'topic' belongs to a sink"),
        ({"table": "a,b"}, "read them separately"),
        ({"table": "a", "subjects": "x"}, "cannot be combined with 'table'"),
        ({"table": "a", "asOf": "2026-01-01T00:00Z"}, "belongs to a batch read"),
    ],
)
def test_a_wrong_option_of_a_stream_is_rejected(given: dict[str, str], text: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(text)):
        source_options(given, batch=False)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"subscribe": "a", "asOf": "2026-01-01T00:00Z"}, "is for tables and event stores"),
        ({"table": "a", "asOf": "2026-01-01 00:00"}, "no time zone"),
        ({"table": "a", "asOf": "soon"}, "write it like"),
    ],
)
def test_a_wrong_time_of_a_table_is_rejected(given: dict[str, str], text: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(text)):
        source_options(given, batch=True)


def test_an_end_cannot_be_earliest() -> None:
    for text in ("earliest", '{"a": {"0": -2}}'):
        with pytest.raises(ConfigError, match="nothing would be read"):
            source_options({"subscribe": "a", "endingOffsets": text}, batch=True)
    found = source_options({"subscribe": "a", "endingOffsets": '{"a": {"0": 7}}'}, batch=True)
    assert found.end.offsets == {("a", 0): 7}


def test_a_table_is_read_as_it_is_now() -> None:
    with pytest.raises(ConfigError, match="a table is read as it is now"):
        source_options({"table": "t", "startingOffsets": "earliest"}, batch=True)
    assert source_options({"table": "t"}, batch=False).start == OffsetLimit("earliest")


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"topic": "a", "table": "b"}, "cannot be combined"),
        ({"topic": "a b"}, "topic name 'a b'"),
        ({"topic": "a", "commitMode": "twice"}, "choose direct or staged"),
        ({"table": "a", "commitMode": "staged"}, "not for tables"),
        ({"topic": "a", "subscribe": "b"}, "'subscribe' belongs to a source"),
        ({"topic": "a", "compression": "gzip"}, "choose none, lz4 or zstd"),
        ({"topic": "a", "maxRowsPerPack": "2000000"}, "the maximum is 1,000,000"),
        ({"topic": "a", "maxPackBytes": "big"}, "not a size"),
    ],
)
def test_a_wrong_option_of_a_sink_is_rejected(given: dict[str, str], text: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(text)):
        sink_options(given)


def test_options_that_spark_adds_are_accepted() -> None:
    given = {"topic": "a", "checkpointlocation": "x", "queryname": "y", "maxPackBytes": "1MiB"}
    assert sink_options(given).pack_bytes == 1024 * 1024


def test_every_option_is_documented() -> None:
    page = (Path(__file__).parents[3] / "docs" / "SPARK.md").read_text()
    assert not [name for name in OPTIONS if f"`{name}`" not in page]


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"table": "a"}, "needs the option 'subscribe'"),
        ({"subscribe": "a,b"}, "reads one topic, not 2"),
        ({"subscribe": "a", "startingOffsets": "earliest"}, "'startingOffsets' cannot be combined"),
        ({"subscribe": "a", "minPartitions": "2"}, "'minPartitions' cannot be combined"),
        ({"subscribe": "a", "asOf": "2026-01-01T00:00:00Z", "endingTimestamp": "1"}, "'asOf' and"),
        ({"subscribe": "a", "undecodable": "null"}, "use drop"),
        ({"subscribe": "a", "rows": "last"}, "choose all or latest"),
    ],
)
def test_latest_rows_are_refused_with_options_that_would_not_be_obeyed(
    options: dict[str, str], error: str
) -> None:
    with pytest.raises(ConfigError, match=error):
        source_options({"rows": "latest", **options}, batch=True)
    with pytest.raises(ConfigError, match="belongs to a batch read"):
        source_options({"rows": "latest", **options}, batch=False)
