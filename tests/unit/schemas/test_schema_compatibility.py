"""The compatibility rules, change by change, and compared with fastavro."""

from __future__ import annotations

import dataclasses
import io
import json
from typing import Any

import fastavro
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream import errors
from millstream.schemas import (
    ColumnBuilder,
    ColumnResolution,
    Mode,
    Resolution,
    RowReader,
    Schema,
    check,
    make_codec,
    parse_mode,
    to_avro,
)
from millstream.schemas import types as t
from millstream.schemas.resolution import matching_field
from millstream.schemas.schema import checked
from tests.unit.schemas.schema_strategies import NAMES, quick, records, types, values


def record(*fields: t.Field, name: str = "R", aliases: tuple[str, ...] = ()) -> t.Record:
    return t.Record(name, (t.Field("id", t.Int(64)), *fields), "", aliases)


def field(type_: t.Type, default: object = t.MISSING, name: str = "x", **facts: Any) -> t.Field:
    return t.Field(name, type_, default, **facts)


I32, I64, F32, F64, TEXT = t.Int(32), t.Int(64), t.Float(32), t.Float(64), t.String()
AB, ABC = t.Enum("E", ("A", "B")), t.Enum("E", ("A", "B", "C"))
AB_DEFAULT, ABC_DEFAULT = t.Enum("E", ("A", "B"), "A"), t.Enum("E", ("A", "B", "C"), "A")
INNER = t.Record("I", (t.Field("a", TEXT),))
INNER_MORE = t.Record("I", (t.Field("a", TEXT), t.Field("b", TEXT)))
INNER_MORE_DEFAULT = t.Record("I", (t.Field("a", TEXT), t.Field("b", TEXT, "")))

# The kind of change, the old and the new record, and the rule broken (or "") when the new version
# reads old data (backward) and when the old version reads new data (forward).
CHANGES: list[tuple[str, t.Record, t.Record, str, str]] = [
    ("nothing changes", record(), record(), "", ""),
    ("add a field with a default", record(), record(field(TEXT, "")), "", ""),
    ("add a nullable field, default null", record(), record(field(t.Nullable(TEXT), None)), "", ""),
    ("add a field without a default", record(), record(field(TEXT)), "no_default", ""),
    ("add a nullable field, no default", record(), record(field(t.Nullable(TEXT))), "no_default",
     ""),
    ("remove a field with a default", record(field(TEXT, "")), record(), "", ""),
    ("remove a field without a default", record(field(TEXT)), record(), "", "no_default"),
    ("rename with an alias", record(field(TEXT)), record(field(TEXT, name="y", aliases=("x",))),
     "", "no_default"),
    ("rename without an alias", record(field(TEXT)), record(field(TEXT, name="y")),
     "no_default", "no_default"),
    ("widen int32 to int64", record(field(I32)), record(field(I64)), "", "type_changed"),
    ("narrow int64 to int32", record(field(I64)), record(field(I32)), "type_changed", ""),
    ("widen uint32 to int64", record(field(t.Int(32, False))), record(field(I64)), "",
     "type_changed"),
    ("make a signed number unsigned", record(field(I32)), record(field(t.Int(32, False))),
     "type_changed", "type_changed"),
    ("widen float32 to float64", record(field(F32)), record(field(F64)), "", "type_changed"),
    ("int32 to float64", record(field(I32)), record(field(F64)), "", "type_changed"),
    ("int64 to float64", record(field(I64)), record(field(F64)), "type_changed", "type_changed"),
    ("int32 to float32", record(field(I32)), record(field(F32)), "type_changed", "type_changed"),
    ("number to text", record(field(I32)), record(field(TEXT)), "type_changed", "type_changed"),
    ("text to bytes", record(field(TEXT)), record(field(t.Binary())), "type_changed",
     "type_changed"),
    ("fixed size changes", record(field(t.Binary(4))), record(field(t.Binary(8))),
     "type_changed", "type_changed"),
    ("make nullable", record(field(TEXT)), record(field(t.Nullable(TEXT))), "", "null_refused"),
    ("no longer nullable", record(field(t.Nullable(TEXT))), record(field(TEXT)), "null_refused",
     ""),
    ("more decimal digits", record(field(t.Decimal(9, 2))), record(field(t.Decimal(12, 2))),
     "", "type_changed"),
    ("another decimal scale", record(field(t.Decimal(9, 2))), record(field(t.Decimal(9, 3))),
     "type_changed", "type_changed"),
    ("milliseconds to microseconds", record(field(t.Timestamp(True, "ms"))),
     record(field(t.Timestamp())), "type_changed", "type_changed"),
    ("lose the zone", record(field(t.Timestamp())), record(field(t.Timestamp(False))),
     "type_changed", "type_changed"),
    ("date to timestamp", record(field(t.Date())), record(field(t.Timestamp())),
     "type_changed", "type_changed"),
    ("add a symbol", record(field(AB)), record(field(ABC)), "", "symbol_unknown"),
    ("add a symbol, with a default symbol", record(field(AB_DEFAULT)), record(field(ABC_DEFAULT)),
     "", ""),
    ("remove a symbol", record(field(ABC)), record(field(AB)), "symbol_unknown", ""),
    ("remove a symbol, with a default symbol", record(field(ABC)), record(field(AB_DEFAULT)), "",
     ""),
    ("rename an enum", record(field(AB)), record(field(t.Enum("F", ("A", "B")))),
     "name_changed", "name_changed"),
    ("enum to text", record(field(AB)), record(field(TEXT)), "type_changed", "type_changed"),
    ("uuid to text", record(field(t.Uuid())), record(field(TEXT)), "type_changed", "type_changed"),
    ("rename the record", record(), record(name="S"), "name_changed", "name_changed"),
    ("rename the record, with an alias", record(), record(name="S", aliases=("R",)), "",
     "name_changed"),
    ("move the record to a namespace", record(), record(name="com.R"), "", ""),
    ("nested: add a field with a default", record(field(INNER)),
     record(field(INNER_MORE_DEFAULT)), "", ""),
    ("nested: add a field without a default", record(field(INNER)), record(field(INNER_MORE)),
     "no_default", ""),
    ("list of narrower numbers", record(field(t.List(I64))), record(field(t.List(I32))),
     "type_changed", ""),
    ("list item becomes nullable", record(field(t.List(I32))),
     record(field(t.List(t.Nullable(I32)))),
     "", "null_refused"),
    ("list to map", record(field(t.List(I32))), record(field(t.Map(I32))),
     "type_changed", "type_changed"),
    ("map value widens", record(field(t.Map(I32))), record(field(t.Map(I64))), "", "type_changed"),
    ("map key changes", record(field(t.Map(I32, I32))), record(field(t.Map(I32, I64))),
     "type_changed", "type_changed"),
    ("a type becomes a union", record(field(I32)), record(field(t.Union((I32, TEXT)))),
     "", "option_unknown"),
    ("a union gets an option", record(field(t.Union((I32, TEXT)))),
     record(field(t.Union((I32, TEXT, t.Bool())))), "", "option_unknown"),
    ("a union loses an option", record(field(t.Union((I32, TEXT)))), record(field(TEXT)),
     "option_unknown", ""),
    ("a union's options change order", record(field(t.Union((I32, TEXT)))),
     record(field(t.Union((TEXT, I32)))), "", ""),
    ("a field number changes", record(field(TEXT, "", number=2)), record(field(TEXT, "", number=3)),
     "number_changed", "number_changed"),
    ("a field number goes to another field", record(field(TEXT, "", number=2)),
     record(field(TEXT, "", name="y", number=2)), "number_reused", "number_reused"),
    ("a field number stays through a rename", record(field(TEXT, "", number=2)),
     record(field(TEXT, "", name="y", number=2, aliases=("x",))), "", ""),
    ("the default changes", record(field(TEXT, "a")), record(field(TEXT, "b")), "", ""),
    ("the default goes away", record(field(TEXT, "a")), record(field(TEXT)), "", ""),
    ("docs change", record(field(TEXT)), record(field(TEXT, doc="new")), "", ""),
]  # fmt: skip


@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize("change", CHANGES, ids=[change[0] for change in CHANGES])
def test_each_change_is_allowed_or_refused_as_the_table_says(
    change: tuple[str, t.Record, t.Record, str, str], mode: Mode
) -> None:
    _, old, new, backward, forward = change
    expected = set()
    if mode.value.startswith(("BACKWARD", "FULL")) and backward:
        expected.add(("backward", backward))
    if mode.value.startswith(("FORWARD", "FULL")) and forward:
        expected.add(("forward", forward))
    problems = check(new, [old], mode)
    assert {(problem.direction, problem.rule) for problem in problems} == expected
    for problem in problems:
        assert problem.field or problem.rule == "name_changed"
        assert problem.message


@pytest.mark.parametrize("change", CHANGES, ids=[change[0] for change in CHANGES])
def test_what_the_table_allows_fastavro_reads_and_what_it_refuses_resolution_refuses(
    change: tuple[str, t.Record, t.Record, str, str],
) -> None:
    _, old, new, backward, _ = change
    if backward and not backward.startswith("number"):
        with pytest.raises(errors.SchemaError, match="cannot be read as"):
            Resolution(old, new)
        return

    @quick
    @given(values(old, finite=True))
    def read(value: Any) -> None:
        reads_everywhere(old, new, value)

    read()


def reads_everywhere(old: t.Record, new: t.Record, value: Any) -> None:
    """One value of the old version, read with the new one along every path."""
    old, new = checked(old), checked(new)
    resolution = Resolution(old, new)
    plain = resolution.value(value)
    assert Schema(new).fit(plain) == plain
    column = ColumnResolution(old, new).column(ColumnBuilder(old).build([value, value]))
    column.validate(full=True)
    assert RowReader(new).read(column) == [plain, plain]
    try:
        writer, reader = to_avro(old), to_avro(new)
    except errors.Unmappable:
        return
    data = make_codec(Schema(old), "avro").encode(value)
    assert make_codec(Schema(new), "avro").decode(data, Schema(old)) == plain
    theirs = fastavro.schemaless_reader(io.BytesIO(data), json_copy(writer), json_copy(reader))
    for one in new.fields:
        source = matching_field(one, old)
        # fastavro leaves defaults and durations as numbers; only the written values are compared.
        if source is not None and isinstance(t.strip(one.type)[0], (t.Int, t.String, t.Bool)):
            assert theirs[one.name] == plain[one.name]  # type: ignore[index, call-overload]


def json_copy(form: dict[str, Any]) -> dict[str, Any]:
    copied: dict[str, Any] = json.loads(json.dumps(form))
    return copied


@st.composite
def evolutions(draw: st.DrawFn) -> tuple[t.Record, t.Record, Any]:
    """A record, a changed version of it, and a value of the first."""
    old = checked(draw(records(1)))
    fields = list(old.fields)
    for _ in range(draw(st.integers(1, 3))):
        index = draw(st.integers(0, len(fields) - 1))
        one = fields[index]
        match draw(st.sampled_from(["add", "remove", "retype", "nullable", "rename", "widen"])):
            case "add":
                name = draw(NAMES.filter(lambda n: all(n != f.name for f in fields)))
                type_ = draw(types(1))
                default = draw(st.just(t.MISSING) | values(type_, finite=True))
                fields.append(t.Field(name, type_, default))
            case "remove" if len(fields) > 1:
                fields.pop(index)
            case "retype":
                fields[index] = t.Field(one.name, draw(types(1)))
            case "nullable" if not isinstance(one.type, t.Nullable):
                fields[index] = t.Field(one.name, t.Nullable(one.type))
            case "rename":
                taken = [n for f in fields for n in (f.name, *f.aliases)]
                if f"n_{one.name}" not in taken:
                    aliases = (one.name,) if draw(st.booleans()) else ()
                    fields[index] = t.Field(f"n_{one.name}", one.type, aliases=aliases)
            case "widen" if isinstance(one.type, t.Int) and one.type.bits < 64:
                fields[index] = t.Field(one.name, t.Int(64))
    try:
        new = checked(dataclasses.replace(old, fields=tuple(fields)))
    except errors.SchemaError:
        new = old
    return old, new, draw(values(old, finite=True))


@quick
@given(evolutions())
def test_if_backward_says_yes_the_new_version_reads_what_the_old_one_wrote(
    evolution: tuple[t.Record, t.Record, Any],
) -> None:
    old, new, value = evolution
    if check(new, [old], Mode.BACKWARD):
        with pytest.raises(errors.SchemaError, match="cannot be read as"):
            Resolution(old, new)
    else:
        reads_everywhere(old, new, value)
    assert bool(check(old, [new], "forward")) == bool(check(new, [old], "backward"))


V1 = record(field(TEXT))
V2 = record()
V3 = record(field(I32, 0))


def test_only_the_transitive_modes_check_more_than_the_last_version() -> None:
    assert check(V3, [V1, V2], Mode.BACKWARD) == []
    problems = check(V3, [V1, V2], Mode.BACKWARD_TRANSITIVE)
    assert [(p.field, p.rule, p.version) for p in problems] == [("x", "type_changed", 0)]
    assert check(V3, [V1, V2], Mode.NONE) == []
    assert check(V3, [], Mode.FULL_TRANSITIVE) == []


def test_a_problem_says_field_rule_and_direction_in_one_line() -> None:
    (problem,) = check(record(field(t.Nullable(TEXT))), [record()], "backward")
    assert str(problem) == (
        "field 'x': the written data does not have it and it has no default [backward, no_default]"
    )


def test_an_unknown_mode_is_refused_with_the_list_of_modes() -> None:
    assert parse_mode("full_transitive") is Mode.FULL_TRANSITIVE
    with pytest.raises(errors.ConfigError, match=r"'SIDEWAYS' .* BACKWARD, BACKWARD_TRANSITIVE"):
        parse_mode("SIDEWAYS")


def test_unchanged_columns_are_not_copied_when_a_batch_is_resolved() -> None:
    old, new = record(field(TEXT)), record(field(TEXT), field(I32, 7, name="z"))
    rows = [{"id": n, "x": f"text {n}"} for n in range(100)]
    array = ColumnBuilder(old).build(rows)
    resolved = ColumnResolution(old, new).column(array)
    for index in (0, 1):
        before = [b.address for b in array.field(index).buffers() if b is not None]
        after = [b.address for b in resolved.field(index).buffers() if b is not None]
        assert before == after
    assert RowReader(new).read(resolved) == [{**row, "z": 7} for row in rows]
    assert ColumnResolution(old, old).column(array) is array
