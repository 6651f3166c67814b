"""The tables of docs/SCHEMAS.md, generated from the code.

`python -m tests.unit.schemas.test_schema_docs` writes them again.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from millstream import errors
from millstream.schemas import arrow_type, spark_type, to_avro, to_json_schema, to_proto
from millstream.schemas import types as t
from tests.unit.schemas.schema_strategies import LEAVES
from tests.unit.schemas.test_schema_compatibility import CHANGES

DOCUMENT = Path(__file__).parents[3] / "docs" / "SCHEMAS.md"

POINT = t.Record("Point", (t.Field("x", t.Int(64)),))
SHOWN: tuple[t.Type, ...] = (
    *(type_ for type_ in LEAVES if type_ not in (t.Decimal(1, 0), t.Decimal(38, 10))),
    t.Enum("Status", ("open", "paid")),
    t.List(t.Int(64)),
    t.List(t.Nullable(t.Int(64))),
    t.List(t.List(t.Int(64))),
    t.Map(t.Int(64)),
    t.Map(t.Int(64), t.Int(64)),
    POINT,
    t.Nullable(t.Int(64)),
    t.Nullable(t.List(t.Int(64))),
    t.Nullable(POINT),
    t.Union((t.Int(64), t.String())),
    t.Union((t.Int(64), t.Date())),
    t.Union((t.Date(), t.String())),
    t.List(t.Union((t.Int(64), t.String()))),
)
PYTHON = {
    t.Bool: "bool", t.Int: "int", t.Float: "float", t.String: "str", t.Binary: "bytes",
    t.Decimal: "Decimal", t.Date: "date", t.Time: "time", t.Timestamp: "datetime",
    t.Duration: "timedelta", t.Uuid: "UUID", t.Enum: "str, Enum", t.List: "list", t.Map: "dict",
    t.Record: "class, dict", t.Nullable: "... or None", t.Union: "any of them",
}  # fmt: skip


def in_avro(record: t.Record) -> str:
    form = to_avro(record)["fields"][0]["type"]
    return _avro_words(form)


def _avro_words(form: Any) -> str:
    if isinstance(form, str):
        return form
    if isinstance(form, list):
        return "[" + ", ".join(map(_avro_words, form)) + "]"
    match form["type"]:
        case "array":
            return f"array of {_avro_words(form['items'])}"
        case "map":
            return f"map of {_avro_words(form['values'])}"
        case "fixed":
            return f"fixed {form['size']}"
    text = f"{form['type']} {form.get('logicalType', '')}".strip()
    return text + (", annotated" if "millstream" in form else "")


def in_proto(record: t.Record) -> str:
    body = to_proto(record).partition("message R {")[2]
    note = "@millstream" in body.partition("\n}")[0]
    if "oneof" in body:
        return "oneof" + (", annotated" if note else "")
    line = next(x for x in body.splitlines() if re.search(r" x = \d+;$", x))
    words = line.strip().removesuffix(" x = 1;").replace(".google.protobuf.", "").replace(".R.", "")
    return words.replace(".Point", "Point") + (", annotated" if note else "")


def in_json(record: t.Record) -> str:
    return _json_words(to_json_schema(record)["properties"]["x"])


def _json_words(form: dict[str, Any]) -> str:
    if "anyOf" in form:
        return " or ".join(_json_words(option) for option in form["anyOf"])
    text: str = form["type"]
    if text == "array":
        text = f"array of {_json_words(form['items'])}"
    elif text == "integer":
        text = f"integer {_power(form['minimum'])} to {_power(form['maximum'] + 1)} - 1"
    elif isinstance(form.get("additionalProperties"), dict):
        text = f"object of {_json_words(form['additionalProperties'])}"
    for word in ("format", "contentEncoding"):
        text += f" {form[word]}" if word in form else ""
    text += " enum" if "enum" in form else ""
    return text + (", annotated" if "x-millstream" in form else "")


def _power(number: int) -> str:
    if number == 0:
        return "0"
    return f"{'-' if number < 0 else ''}2^{abs(number).bit_length() - 1}"


def type_table() -> str:
    lines = [
        "| type | Python | Arrow | Avro | Protobuf | JSON Schema | Spark |",
        "|" + " --- |" * 7,
    ]
    for type_ in SHOWN:
        record = t.Record("R", (t.Field("x", type_),))
        cells = [t.kind(type_).replace("record ", ""), PYTHON[type(type_)]]
        cells.append(str(arrow_type(type_)))
        ways: list[Callable[[t.Record], str]] = [in_avro, in_proto, in_json]
        cells += [_or_refused(way, record) for way in ways]
        cells.append(spark_type(type_))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _or_refused(way: Callable[[t.Record], str], record: t.Record) -> str:
    try:
        return way(record)
    except errors.Unmappable:
        return "refused"


def change_table() -> str:
    lines = ["| change | BACKWARD | FORWARD | FULL |", "| --- | --- | --- | --- |"]
    for name, _, _, backward, forward in CHANGES:
        cells = [backward or "yes", forward or "yes", "no" if backward or forward else "yes"]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


TABLES = {"types": type_table, "changes": change_table}


def _pattern(name: str) -> re.Pattern[str]:
    return re.compile(rf"(<!-- {name}: [^\n]*-->\n)(.*?)(<!-- end -->)", re.DOTALL)


@pytest.mark.parametrize("name", TABLES)
def test_the_tables_of_the_document_are_what_the_code_does(name: str) -> None:
    found = _pattern(name).search(DOCUMENT.read_text())
    assert found is not None
    assert found[2].strip() == TABLES[name]()


if __name__ == "__main__":
    text = DOCUMENT.read_text()
    for name, table in TABLES.items():
        before, _, rest = text.partition(f"<!-- {name}: ")
        head, _, rest = rest.partition("\n")
        after = rest.partition("<!-- end -->")[2]
        text = f"{before}<!-- {name}: {head}\n{table()}\n<!-- end -->{after}"
    DOCUMENT.write_text(text)
