"""What expressions use of the columns of a source, from Spark's text of them."""

from __future__ import annotations

import pytest

pytest.importorskip("pyspark")

from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    IntegerType,
    LongType,
    StructType,
    TimestampType,
)

from millstream.pipelines.pruning import Used, _collect, _lines

VALUE = "struct<id: bigint, time: timestamp>"
COLUMNS = (
    StructType()
    .add("key", BinaryType())
    .add("value", StructType().add("id", LongType()).add("time", TimestampType()))
    .add("items", ArrayType(StructType().add("id", IntegerType())))
)


def used(*lines: str, only_named: bool = False) -> tuple[Used, set[int]]:
    """Of the columns 1 to 3, below the line of the root."""
    columns = dict(enumerate(COLUMNS.fields, 1))
    found: Used = {}
    named = _collect(
        _lines("\n".join(["array(...)", *lines])), columns, found, only_named=only_named
    )
    return found, named


def test_fields_of_a_struct_and_complete_columns() -> None:
    lines = [
        ":- value#2.id AS id#9L",
        ":  +- value#2.id",
        f":     +- value#2: {VALUE}",
        ":- (cast(key#1 as string) = value#2.time)",
        ":  :- cast(key#1 as string)",
        ":  :  +- key#1: binary",
        ":  +- value#2.time",
        f":     +- value#2: {VALUE}",
        "+- other#12: string",
    ]
    assert used(*lines) == ({"key": None, "value": {"id", "time"}}, set())


def test_a_column_that_is_used_as_a_whole_is_read_as_a_whole() -> None:
    field = ["+- value#2.id AS id#9L", "   +- value#2.id", f"      +- value#2: {VALUE}"]
    whole = [":- isnull(value#2)", f":  +- value#2: {VALUE}"]
    assert used(*whole, *field) == ({"value": None}, set())
    # A field of every item of an array looks like a field of a struct.
    items = ["+- items#3.id AS n#9", "   +- items#3.id", "      +- items#3: array<struct<id: int>>"]
    assert used(*items) == ({"items": None}, set())
    # Not a field of it, as far as its type tells.
    assert used("+- value#2.ID", f"   +- value#2: {VALUE}") == ({"value": None}, set())
    several = ["+- value#2.id", f"   :- value#2: {VALUE}", "   +- 1"]
    assert used(*several) == ({"value": None}, set())


def test_a_projection_passes_on_what_it_names() -> None:
    lines = [":- key#1: binary", f":- value#2: {VALUE}", "+- 1 AS n#9", "   +- 1"]
    assert used(*lines, only_named=True) == ({}, {1, 2})
    assert used(*lines) == ({"key": None, "value": None}, set())


def test_a_watermark_and_constants_hide_no_use() -> None:
    lines = [
        ":- value#2-T10800000ms.time",
        f":  +- value#2: {VALUE}",
        "+- concat(a",
        ":- b, key#1) AS text#9",
        "   +- concat(a",
        ":- b, key#1)",
        "      :- a",
        ":- b",
        "      +- key#1: binary",
    ]
    assert used(*lines) == ({"key": None, "value": {"time"}}, set())
    # A constant that looks like a column: more is read than is used.
    assert used("+- x#3 AS text#9", "   +- x#3") == ({"items": None}, set())
