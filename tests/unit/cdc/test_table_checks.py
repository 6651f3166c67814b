"""What is said about a table before it is captured."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from millstream.cdc.model import Finding
from millstream.cdc.postgres.catalog import (
    ColumnFacts,
    IndexFacts,
    TableFacts,
    from_item,
    shape_of_relation,
    shape_of_table,
)
from millstream.cdc.postgres.pgoutput import Relation, RelationColumn
from millstream.cdc.postgres.table_checks import check_table
from millstream.cdc.settings import CaptureSettings, Format, TableSettings
from millstream.errors import BreakingChange, ConfigError
from millstream.schemas import types as t

ID = ColumnFacts(1, "id", 23, -1, "integer", not_null=True)
CODE = ColumnFacts(2, "code", 25, -1, "text", not_null=True, toastable=True)
NOTE = ColumnFacts(3, "note", 25, -1, "text", toastable=True)
TOTAL = ColumnFacts(4, "total", 1700, (10 << 16 | 2) + 4, "numeric(10,2)")
TWICE = ColumnFacts(5, "twice", 23, -1, "integer", generated=True)
PRIMARY = IndexFacts("orders_pkey", ("id",), primary=True)
BY_CODE = IndexFacts("orders_code", ("code",))
ORDERS = TableFacts(
    1, "public", "orders", columns=(ID, CODE, NOTE, TOTAL, TWICE), indexes=(PRIMARY, BY_CODE)
)


def found(
    table: TableFacts = ORDERS, format: Format = "changes", **own: Any
) -> tuple[list[Finding], list[Finding]]:
    """What makes a capture impossible, and what is only said."""
    settings = CaptureSettings(
        "c", "postgresql://", table={"public.orders": TableSettings(**own)}, format=format
    )
    findings = check_table(table, settings, "app")
    fatal = [one for one in findings if not one.ok and one.fatal]
    return fatal, [one for one in findings if one not in fatal]


def only(findings: tuple[list[Finding], list[Finding]]) -> Finding:
    (one,) = findings[0]
    return one


def changed(**facts: Any) -> TableFacts:
    return dataclasses.replace(ORDERS, **facts)


def test_a_table_with_a_primary_key_is_all_right_and_says_what_is_not_sent() -> None:
    fatal, others = found()
    assert not fatal
    assert others[0] == Finding("table public.orders", True, "key id, rows not counted yet")
    assert "listed in 'unchanged', not sent: code, note" in others[1].text
    assert others[1].fix == 'ALTER TABLE "public"."orders" REPLICA IDENTITY FULL;'
    assert found(changed(identity="f"))[1][1:] == []


def test_a_table_without_a_key_breaks_the_application_and_is_refused() -> None:
    one = only(found(changed(indexes=())))
    assert "refuses every UPDATE and DELETE of the application" in one.text
    assert one.fix.startswith('ALTER TABLE "public"."orders" ADD PRIMARY KEY (...);')


def test_a_unique_index_is_proposed_as_the_identity() -> None:
    one = only(found(changed(indexes=(BY_CODE,))))
    assert one.fix == 'ALTER TABLE "public"."orders" REPLICA IDENTITY USING INDEX "orders_code";'


@pytest.mark.parametrize("unusable", [{"deferrable": True}, {"columns": ("note",)}])
def test_an_index_that_cannot_be_the_identity_is_not_proposed(unusable: dict[str, Any]) -> None:
    index = dataclasses.replace(BY_CODE, **unusable)
    assert "USING INDEX" not in only(found(changed(indexes=(index,)))).fix


def test_an_identity_of_nothing_is_refused_though_there_is_a_primary_key() -> None:
    one = only(found(changed(identity="n")))
    assert "its replica identity is nothing" in one.text
    assert one.fix == 'ALTER TABLE "public"."orders" REPLICA IDENTITY DEFAULT;'


def test_a_full_identity_without_a_key_needs_a_key() -> None:
    table = changed(identity="f", indexes=())
    assert "nothing says which changes are of the same row" in only(found(table)).text
    assert "nothing ensures that its key (code) is unique" in only(found(table, key=("code",))).text


def test_a_key_of_the_settings_must_be_unique_not_null_and_in_the_identity() -> None:
    one = only(found(key=("code",)))
    assert "its replica identity (id) lacks columns of its key (code)" in one.text
    assert one.fix == 'ALTER TABLE "public"."orders" REPLICA IDENTITY USING INDEX "orders_code";'
    by_note = IndexFacts("orders_note", ("note",))
    table = changed(indexes=(by_note,), identity="f")
    assert "may be null: note" in only(found(table, key=("note",))).text
    assert not found(changed(identity="f"), key=("code",))[0]


def test_a_key_without_an_order_that_all_agree_on_is_captured_as_text() -> None:
    number = dataclasses.replace(ID, type_oid=701, source_type="double precision")
    one = only(found(changed(columns=(number,))))
    assert "'id' of its key is double precision" in one.text
    assert one.fix == "list 'id' under 'text' in the table's settings"
    assert not found(changed(columns=(number,)), text=("id",))[0]


def test_rows_without_their_large_values_are_refused() -> None:
    one = only(found(format="rows"))
    assert 'format "rows" has no way to say so: code, note' in one.text
    assert 'ALTER TABLE "public"."orders" REPLICA IDENTITY FULL;' in one.fix
    assert not found(format="rows", exclude=("code", "note"))[0]
    assert not found(format="rows", columns=("id", "total"))[0]
    assert not found(changed(identity="f"), format="rows")[0]


@pytest.mark.parametrize("setting", ["columns", "exclude", "key", "text", "mask"])
def test_an_unknown_column_is_refused_with_the_near_name(setting: str) -> None:
    own: dict[str, Any] = {setting: {"nore": "null"} if setting == "mask" else ("nore",)}
    one = only(found(**own))
    assert one.text == f"{setting} has 'nore', which is no column of it: did you mean 'note'?"
    with pytest.raises(ConfigError, match="did you mean 'note'"):
        shape_of_table(ORDERS, TableSettings(**own))


def test_a_generated_column_is_not_captured_and_cannot_be_asked_for() -> None:
    assert "a generated column" in only(found(text=("twice",))).text
    assert [c.name for c in shape_of_table(ORDERS, TableSettings()).columns] == [
        *("id", "code", "note", "total")
    ]
    assert not found(exclude=("twice",))[0]


def test_a_mask_of_the_key_is_refused() -> None:
    assert "part of the key" in only(found(mask={"id": "hash"})).text
    assert not found(mask={"note": "redact"})[0]


def test_a_key_that_is_left_out_is_refused() -> None:
    assert "'id' is part of its key" in only(found(exclude=("id",))).text


def test_missing_rights_are_named_with_the_grant() -> None:
    fatal, _ = found(changed(may_select=False, may_use=False, filtered=True))
    assert [one.fix for one in fatal] == [
        'GRANT USAGE ON SCHEMA "public" TO "app";',
        'GRANT SELECT ON "public"."orders" TO "app";',
        'ALTER ROLE "app" BYPASSRLS;',
    ]


def test_partitions_with_another_identity_are_named() -> None:
    parts = (("public.orders_1", "d"), ("public.orders_2", "f"))
    one = only(found(changed(kind="p", partitions=parts)))
    assert one.fix == "ALTER TABLE public.orders_2 REPLICA IDENTITY DEFAULT;"


def test_a_column_whose_name_no_field_can_have_must_be_left_out() -> None:
    table = changed(columns=(ID, ColumnFacts(2, "a.b", 25, -1, "text")))
    assert "has a dot" in only(found(table)).text
    assert not found(table, exclude=("a.b",))[0]


def test_a_snapshot_reads_partitions_but_no_tables_that_inherit() -> None:
    assert from_item(ORDERS) == 'ONLY "public"."orders"'
    assert from_item(changed(kind="p")) == '"public"."orders"'


# -- shapes of the stream -----------------------------------------------------------------


def relation(*names: str, key: tuple[str, ...] = ("id",), identity: str = "d") -> Relation:
    types = {c.name: (c.type_oid, c.typmod) for c in ORDERS.columns}
    columns = (RelationColumn(n, n in key, *types.get(n, (25, -1))) for n in names)
    return Relation(1, "public", "orders", identity, tuple(columns))


def at_stream(one: Relation, table: TableFacts = ORDERS) -> TableFacts:
    """As read_relation_facts would put both together."""
    known = {column.name: column for column in table.columns}
    new = (known.get(c.name) or ColumnFacts(0, c.name, c.type_oid, c.typmod, "text")
           for c in one.columns)  # fmt: skip
    return dataclasses.replace(table, columns=tuple(new), identity=one.identity)


def test_the_shape_of_the_stream_has_its_columns_with_the_settings_applied() -> None:
    one = relation("id", "note", "total")
    own = TableSettings(exclude=("note", "gone"), text=("total",))
    shape = shape_of_relation(one, at_stream(one), own)
    assert [(c.name, c.type, c.identity) for c in shape.columns] == [
        ("id", t.Int(32), 1),
        ("total", t.String(), 4),
    ]
    assert shape.key == ("id",)


def test_a_key_that_was_renamed_since_is_taken_from_the_stream() -> None:
    one = relation("number", "note", key=("number",))
    assert shape_of_relation(one, at_stream(one), TableSettings()).key == ("number",)


def test_a_key_column_that_is_gone_stops_the_capture() -> None:
    one = relation("id", "note")
    with pytest.raises(BreakingChange, match="'code': a column of the key was dropped or renamed"):
        shape_of_relation(one, at_stream(one), TableSettings(key=("code",)))
    full = relation("number", key=("number",), identity="f")
    with pytest.raises(BreakingChange, match="'id'"):
        shape_of_relation(full, at_stream(full), TableSettings())
