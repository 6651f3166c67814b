"""Settings against tables: names that mean nothing, topics that cannot be."""

from __future__ import annotations

from typing import Any

from millstream.cdc.model import TableShape
from millstream.cdc.settings import CaptureSettings, OutboxSettings, TableSettings
from millstream.cdc.topic_names import topic_findings


def settings(**values: Any) -> CaptureSettings:
    return CaptureSettings(name="shop", source="postgresql://db/shop", **values)


def tables(*names: str) -> list[TableShape]:
    pairs = [name.rpartition(".") for name in names]
    return [TableShape(namespace, name, (), ("id",)) for namespace, _, name in pairs]


def texts(capture: CaptureSettings, *names: str) -> list[str]:
    found = topic_findings(capture, tables(*names))
    assert all(not one.ok and one.fatal for one in found)
    return [f"{one.subject}: {one.text} -> {one.fix}" for one in found]


def test_settings_that_fit_have_no_findings() -> None:
    capture = settings(table={"public.a": TableSettings(topic="x")})
    assert texts(capture, "public.a", "public.b") == []


def test_two_tables_of_one_topic_are_found() -> None:
    (text,) = texts(settings(), "public.orders", "archive.orders")
    assert text.startswith("table archive.orders: it has the same topic as public.orders")
    assert 'topic = "{namespace}-{table}"' in text
    (text,) = texts(settings(table={"b": TableSettings(topic="a")}), "a", "b")
    assert '[cdc.table."b"] topic = "a-2"' in text


def test_a_table_whose_name_is_no_topic_is_found_with_one_that_is() -> None:
    (text,) = texts(settings(), "public.Order Items")
    assert "cannot have the name 'Order Items'" in text
    assert 'topic = "Order-Items"' in text


def test_settings_of_a_table_that_is_not_captured_are_found() -> None:
    capture = settings(
        table={"public.ordrs": TableSettings(exclude=("secret",))},
        outbox=(OutboxSettings("public.outbox"),),
    )
    found = texts(capture, "public.orders")
    assert len(found) == 2
    assert "Did you mean 'public.orders'?" in found[0]
    assert "table public.outbox: it has settings and is not captured" in found[1]


def test_an_outbox_has_no_topic_of_its_own() -> None:
    capture = settings(outbox=(OutboxSettings("public.b"),), topic="{namespace}{table}")
    assert texts(capture, "public.b") == []
