"""Spark's DDL, without Spark."""

from __future__ import annotations

import pytest

from millstream import errors
from millstream.schemas import to_spark
from millstream.schemas import types as t

F = t.Field


def test_spark_ddl_names_types_nullability_and_comments() -> None:
    record = t.Record(
        "R",
        (
            F("id", t.Int(32, signed=False), doc="it's a \\ key"),
            F("odd name", t.Nullable(t.List(t.Nullable(t.Time()))), None),
            F("m", t.Map(t.Record("I", (F("a", t.Timestamp(False)),)))),
        ),
    )
    assert to_spark(record) == (
        "id bigint NOT NULL COMMENT 'it\\'s a \\\\ key', `odd name` array<time(6)>, "
        "m map<string, struct<a: timestamp_ntz NOT NULL>> NOT NULL"
    )
    assert "NOT NULL" not in to_spark(record, nullability=False)
    twins = t.Record("R", (F("a", t.Bool()), F("A", t.Bool())))
    with pytest.raises(errors.Unmappable, match=r"field 'A'.*differ only in case"):
        to_spark(twins)
