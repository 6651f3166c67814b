"""Values of typed topics: what a task does with a schema that it has to look up."""

from __future__ import annotations

import pyarrow as pa
import pytest

from millstream.errors import (
    ApiError,
    ConnectFailed,
    MillstreamError,
    NoResponders,
    RequestTimeout,
    SchemaNotFound,
    TopicNotFound,
)
from millstream.schemas import Schema
from millstream.schemas import types as t
from millstream.settings import ConnectionSettings
from millstream.spark.broker_access import SchemaSnapshot
from millstream.spark.source import values
from millstream.spark.source.values import TypedDecoder

ORDER = Schema(t.Record("Order", (t.Field("id", t.Int(64)),)))
NEWER = Schema(t.Record("Order", (t.Field("id", t.Int(64)), t.Field("note", t.String(), ""))))


def decoder(
    monkeypatch: pytest.MonkeyPatch, answer: Schema | MillstreamError
) -> tuple[TypedDecoder, list[int]]:
    """A decoder that knows version 1; the ids of those that it looks up."""
    asked: list[int] = []

    def load_schema(_: object, id_: int) -> Schema:
        asked.append(id_)
        if isinstance(answer, MillstreamError):
            raise answer
        return answer

    monkeypatch.setattr(values, "jetstream_to", lambda _: None)
    monkeypatch.setattr(values, "load_schema", load_schema)
    snapshot = SchemaSnapshot("orders", "json", "1", {"1": ORDER.to_json()})
    return TypedDecoder(snapshot, ConnectionSettings()), asked


def test_a_version_that_came_later_is_looked_up_once_and_read_as_the_known_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found, asked = decoder(monkeypatch, NEWER)
    payloads = pa.array([b'{"id":1}', b'{"id":2,"note":"x"}', b'{"id":3,"note":"y"}'])
    decoded = found.plain(payloads, ["1", "7", "7"])
    assert decoded.reasons is None
    assert decoded.array.to_pylist() == [{"id": 1}, {"id": 2}, {"id": 3}]
    assert asked == [7]


@pytest.mark.parametrize(
    "error",
    [
        ConnectFailed("no server could be reached"),
        RequestTimeout("$JS.API", 60),
        NoResponders("$JS.API"),
        ApiError(503, 10008, "JetStream system temporarily unavailable"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_broker_that_is_away_does_not_make_values_undecodable(
    monkeypatch: pytest.MonkeyPatch, error: MillstreamError
) -> None:
    found, _ = decoder(monkeypatch, error)
    with pytest.raises(type(error)):
        found.plain(pa.array([b'{"id":1}']), ["7"])
    with pytest.raises(type(error)):
        found.packed(pa.array([{"id": 1}]), "7")


@pytest.mark.parametrize(
    "error",
    [SchemaNotFound("there is no schema with id 7"), TopicNotFound(404, 10059, "no registry")],
    ids=lambda error: type(error).__name__,
)
def test_a_version_that_does_not_exist_is_the_reason(
    monkeypatch: pytest.MonkeyPatch, error: MillstreamError
) -> None:
    found, _ = decoder(monkeypatch, error)
    assert found.plain(pa.array([b'{"id":1}', None]), ["7", None]).reasons == [str(error), None]
    assert found.packed(pa.array([{"id": 1}]), "7").reasons == [str(error)]


@pytest.mark.parametrize("id_", ["0", "00", "-1", "x", "٣", "1.0", "1" * 20, "1" * 5000])
def test_an_id_that_no_schema_can_have_is_not_looked_up(
    monkeypatch: pytest.MonkeyPatch, id_: str
) -> None:
    found, asked = decoder(monkeypatch, NEWER)
    decoded = found.plain(pa.array([b'{"id":1}']), [id_])
    assert decoded.reasons is not None
    assert "is not the id of a schema" in (decoded.reasons[0] or "")
    assert asked == []
