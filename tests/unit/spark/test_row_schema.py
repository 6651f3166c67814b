"""Which columns a source has, by its options and by whether its values have a schema."""

from __future__ import annotations

import pytest

from millstream.spark.options import COLUMNS, source_options
from millstream.spark.source.row_schema import column_names

FEW = ["key", "value", "timestamp"]
ALL = [name for name in COLUMNS if name not in ("headers", "reason")]


@pytest.mark.parametrize(
    ("given", "typed", "names"),
    [
        ({}, True, FEW),
        ({}, False, ALL),
        ({"includeMetadata": "true"}, True, ALL),
        ({"includeMetadata": "false"}, False, FEW),
        ({"includeHeaders": "true", "undecodable": "null"}, True, [*FEW, "headers", "reason"]),
        ({"columns": "offset,value.a"}, True, ["value", "offset"]),
        ({"columns": "offset,value"}, False, ["value", "offset"]),
        ({"columns": "value", "includeMetadata": "false"}, False, ["value"]),
        (
            {"columns": "value", "includeMetadata": "true"},
            True,
            ["value", "topic", "partition", "offset", "subject", "index"],
        ),
    ],
)
@pytest.mark.parametrize("what", ["subscribe", "table"])
def test_columns_of_a_source(
    given: dict[str, str], typed: bool, names: list[str], what: str
) -> None:
    options = source_options({what: "orders", **given}, batch=True)
    assert column_names(options, typed) == names
