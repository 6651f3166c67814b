"""import and export: files of every format become the same events again."""

from __future__ import annotations

import asyncio
import csv
import gzip
import json
import subprocess
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import millstream
from millstream.cli.files.writer import writer_name
from tests.integration.cli.conftest import MILLSTREAM, until
from tests.integration.cli.messaging_commands import Commands

ODD = [
    millstream.NewEvent(b"plain", key="a", id="one"),
    millstream.NewEvent('grün\r\n,"quoted";\ttab\x00'.encode(), key="k,\n\"'"),
    millstream.NewEvent(b"\xff\x00\xfe", key=b"\xfe\xff", headers={"A": "1", "B": "zwei, drei"}),
    millstream.NewEvent(b"", key=None, timestamp=1_700_000_000_123_456_789),
    millstream.NewEvent(None, key="gone"),
    millstream.NewEvent(b'{"n": 1}', key="0", timestamp=datetime(1969, 1, 1, tzinfo=UTC)),
]


@pytest.fixture
def run(millstream_url: str) -> Commands:
    run = Commands(millstream_url)
    run("topic", "create", "orders")
    return run


@dataclass
class Sale:
    """A typed row."""

    item: str
    price: float
    count: int | None
    at: datetime


def contents(url: str, topic: str) -> list[tuple[Any, ...]]:
    """What makes an event, in the order of the topic; times to the microsecond, as packs have."""

    async def read() -> list[tuple[Any, ...]]:
        async with millstream.connect(url) as mill:
            events = [event async for event in (await mill.topic(topic)).read()]
        return [
            (e.key, e.value, dict(e.headers), e.timestamp_ns // 1000 * 1000, e.id) for e in events
        ]

    return asyncio.run(read())


def publish(url: str, topic: str, events: list[millstream.NewEvent]) -> None:
    async def write() -> None:
        async with millstream.connect(url) as mill:
            found = await mill.topic(topic)
            for event in events:
                await found.publish_many([event])

    asyncio.run(write())


@pytest.mark.parametrize(
    "name", ["a.jsonl", "a.jsonl.gz", "a.csv", "a.tsv", "a.csv.gz", "a.parquet"]
)
def test_an_exported_topic_is_imported_as_the_same_events(
    run: Commands, tmp_path: Path, name: str
) -> None:
    publish(run.url, "orders", ODD)
    file = tmp_path / name
    assert run.json("export", "orders", str(file))["events"] == len(ODD)
    run("topic", "create", "copy")
    assert run.json("import", "copy", str(file))["stored"] == len(ODD)
    assert contents(run.url, "copy") == contents(run.url, "orders")
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize("form", ["base64", "auto"])
def test_values_are_written_as_asked(run: Commands, tmp_path: Path, form: str) -> None:
    publish(run.url, "orders", ODD)
    file = tmp_path / "a.jsonl"
    run("export", "orders", str(file), "--value", form)
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert ("value" in rows[0]) == (form == "auto")
    run("topic", "create", "copy")
    run("import", "copy", str(file))
    assert contents(run.url, "copy") == contents(run.url, "orders")


def test_values_that_are_json_are_exported_as_objects(run: Commands, tmp_path: Path) -> None:
    publish(run.url, "orders", [millstream.NewEvent(b'{"a": [1, null]}')])
    printed = run("export", "orders", "-", "--value", "json")
    assert json.loads(printed)["value"] == {"a": [1, None]}
    publish(run.url, "orders", [millstream.NewEvent(b"no json")])
    file = tmp_path / "a.jsonl"
    _, errors = run.partly("export", "orders", str(file), "--value", "json")
    assert "left out: orders/0, offset 2, index 0: its value is not JSON" in errors
    assert file.read_text() == printed
    run("export", "orders", str(tmp_path / "t.parquet"), "--value", "text")
    table = pq.read_table(tmp_path / "t.parquet")
    assert table.schema.field("value").type == pa.string()
    assert table.column("value").to_pylist() == ['{"a": [1, null]}', "no json"]


def test_a_range_is_exported(run: Commands, tmp_path: Path) -> None:
    publish(run.url, "orders", [millstream.NewEvent(b"%d" % n, key=str(n % 2)) for n in range(6)])
    chosen = (("--start", "2", "--end", "5"), ("-k", "1"), ("--start", "-2"), ("--count", "1"))
    found = []
    for number, options in enumerate(chosen):
        file = tmp_path / f"{number}.jsonl"
        run("export", "orders", str(file), *options)
        found.append([json.loads(line)["value"] for line in file.read_text().splitlines()])
    assert found == [["1", "2", "3"], ["1", "3", "5"], ["4", "5"], ["0"]]


def test_an_existing_file_is_not_replaced_without_force(run: Commands, tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text("precious")
    assert "--force" in run.error("export", "orders", str(file))
    assert file.read_text() == "precious"
    run("export", "orders", str(file), "--force")
    assert file.read_text() == ""
    assert "format" in run.error("export", "orders", str(tmp_path / "a.xyz"))


def test_rows_of_any_json_lines_are_values_with_chosen_columns(
    run: Commands, tmp_path: Path
) -> None:
    file = tmp_path / "rows.jsonl"
    lines = [
        '{"customer": "ann", "at": "2026-01-31T12:00:00+01:00", "n":  1}',
        "",
        '{"customer": 7, "at": "2026-01-31T12:00:01Z", "n": 2}',
    ]
    file.write_text("\n".join(lines))
    run("import", "orders", str(file), "--key", "customer", "--time", "at", "--id", "n")
    found = contents(run.url, "orders")
    assert [event[0] for event in found] == ["ann", "7"]
    assert [event[1].decode() for event in found] == [lines[0], lines[2]]  # byte for byte
    assert found[0][3] == 1_769_857_200_000_000_000
    assert [event[4] for event in found] == ["1", "2"]


def test_rows_of_a_csv_are_objects_or_one_column_is_the_value(
    run: Commands, tmp_path: Path
) -> None:
    file = tmp_path / "rows.csv"
    with file.open("w", newline="") as stream:
        rows = csv.writer(stream, delimiter=";")
        rows.writerows([["id", "name", "ms"], ["1", "Zoë", "1700000000123"], ["2", "", ""]])
    options = ("-d", ";", "--key", "name", "--time", "ms", "--time-unit", "ms")
    run("import", "orders", str(file), *options)
    first, second = contents(run.url, "orders")
    assert (first[0], json.loads(first[1])) == (
        "Zoë",
        {"id": "1", "name": "Zoë", "ms": "1700000000123"},
    )
    assert first[3] == 1_700_000_000_123_000_000
    assert second[0] is None
    run("topic", "create", "names")
    run("import", "names", str(file), "-d", ";", "--value", "name")
    assert [event[1].decode() for event in contents(run.url, "names")] == ["Zoë", ""]


def test_rows_of_any_parquet_are_objects(run: Commands, tmp_path: Path) -> None:
    file = tmp_path / "rows.parquet"
    moment = datetime(2026, 1, 31, 12, 0, 0, 5, tzinfo=UTC)
    columns = {
        "name": ["a", None],
        "price": [Decimal("1.50"), Decimal("2.00")],
        "at": pa.array([1_700_000_000_123_456_789, 1], pa.timestamp("ns", tz="UTC")),
        "day": [moment, moment],
        "tags": [["x"], []],
    }
    pq.write_table(pa.table(columns), file)
    run("import", "orders", str(file), "--key", "name", "--time", "at")
    first, second = contents(run.url, "orders")
    assert (first[0], second[0]) == ("a", None)
    assert first[3] == 1_700_000_000_123_456_000
    assert json.loads(first[1]) == {
        "name": "a",
        "price": "1.50",
        "at": "2023-11-14T22:13:20.123456789Z",
        "day": "2026-01-31T12:00:00.000005Z",
        "tags": ["x"],
    }


def test_running_an_import_again_stores_nothing_twice_by_default(
    run: Commands, tmp_path: Path
) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"n": 1}\n{"n": 1}\n')  # the same row twice is two events
    assert run.json("import", "orders", str(file)) == {
        "topic": "orders", "file": str(file), "stored": 2, "stored_before": 0,
    }  # fmt: skip
    assert "2 were already stored" in run("import", "orders", str(file))
    assert run.json("import", "orders", str(file), "--name", "other")["stored"] == 2
    assert run.json("import", "orders", str(file), "--again")["stored"] == 2
    assert len(contents(run.url, "orders")) == 6
    assert "--again" in run.error("import", "orders", str(file), "--again", "--name", "x")


def test_a_bad_row_stops_the_import_and_a_second_run_continues(
    run: Commands, tmp_path: Path
) -> None:
    file = tmp_path / "rows.jsonl"
    good = [json.dumps({"n": number}) for number in range(1, 1501)]
    file.write_text("\n".join([*good[:1200], "{broken", *good[1200:]]))
    assert "row 1,201: not JSON" in run.error("import", "orders", str(file))
    assert len(contents(run.url, "orders")) == 1000  # whole groups, in order
    file.write_text("\n".join([*good[:1200], good[0], *good[1200:]]))
    run("import", "orders", str(file))
    values = [json.loads(event[1])["n"] for event in contents(run.url, "orders")]
    assert values == [*range(1, 1201), 1, *range(1201, 1501)]


@pytest.mark.parametrize(
    ("name", "text", "options", "words"),
    [
        ("a.jsonl", '{"value": "x", "headers": [1]}', (), "headers"),
        ("a.jsonl", '{"value_base64": "%"}', (), "base64"),
        ("a.jsonl", '{"a": 1}', ("--key", "b"), "no column 'b'"),
        ("a.jsonl", '{"a": [1]}', ("--key", "a"), "a key is a string"),
        ("a.jsonl", '{"a": 5}', ("--time", "a"), "--time-unit"),
        ("a.jsonl", '{"a": "soon"}', ("--time", "a"), "not a time"),
        ("a.jsonl", "{}", ("--value", "a", "--whole"), "choose one"),
        ("a.jsonl", "{}", ("--time-unit", "h"), "--time-unit"),
        ("a.jsonl", "{}", ("-d", ";"), "applies to CSV only"),
        ("a.csv", "a,b\n1", (), "row 1: it has more or fewer fields"),
        ("a.csv", "a,a\n1,2", (), "have the same name"),
        ("a.csv", "a,b\n1,2", ("-d", "||"), "one character"),
        ("a.parquet", "no parquet", (), "not a Parquet file"),
        ("a.xyz", "", (), "--format"),
        ("a.xyz", "", ("-f", "xml"), "one of"),
    ],
)
def test_a_row_or_option_that_does_not_fit_is_a_sentence(
    run: Commands, tmp_path: Path, name: str, text: str, options: tuple[str, ...], words: str
) -> None:
    file = tmp_path / name
    file.write_text(text)
    assert words in run.error("import", "orders", str(file), *options)
    assert contents(run.url, "orders") == []


def test_events_go_from_topic_to_topic_in_a_pipe(run: Commands) -> None:
    publish(run.url, "orders", ODD)
    run("topic", "create", "copy")
    assert f"Stored {len(ODD)}" in run("import", "copy", "-", piped=run("export", "orders", "-"))
    assert contents(run.url, "copy") == contents(run.url, "orders")
    run("topic", "create", "raw")
    run("import", "raw", "-", piped='{"a": 1}\n')
    assert contents(run.url, "raw")[0][1] == b'{"a": 1}'


def test_a_gzipped_file_is_really_compressed(run: Commands, tmp_path: Path) -> None:
    publish(run.url, "orders", ODD[:1])
    run("export", "orders", str(tmp_path / "a.jsonl.gz"))
    assert b"plain" in gzip.decompress((tmp_path / "a.jsonl.gz").read_bytes())


def test_csv_refuses_an_empty_key(run: Commands, tmp_path: Path) -> None:
    publish(run.url, "orders", [millstream.NewEvent(b"x", key="")])
    assert "empty key" in run.partly("export", "orders", str(tmp_path / "a.csv"))[1]
    run("export", "orders", str(tmp_path / "a.jsonl"))
    run("topic", "create", "copy")
    run("import", "copy", str(tmp_path / "a.jsonl"))
    assert contents(run.url, "copy")[0][0] == ""


def _stored(run: Commands, goal: int) -> bool:
    return bool(run.json("topic", "info", "once")["messages"] >= goal)


def test_an_import_killed_and_run_again_stores_each_row_once(run: Commands, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    count = 30_000
    file.write_text("".join(f'{{"n": {n}}}\n' for n in range(count)))
    run("topic", "create", "once")
    for kill_at in (3, 9, 16):
        process = subprocess.Popen(
            [MILLSTREAM, "import", "once", str(file), "--server", run.url],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        with process:
            until(partial(_stored, run, kill_at))
            process.kill()
    run("import", "once", str(file))
    numbers = [json.loads(event[1])["n"] for event in contents(run.url, "once")]
    assert numbers == list(range(count))


def test_an_import_into_several_partitions_counts_each_row_once(
    run: Commands, tmp_path: Path
) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(f'{{"k": "{n % 7}", "n": {n}}}\n' for n in range(100)))
    run("topic", "create", "spread", "--partitions", "4")

    async def stop_half_way() -> None:
        """As an import that was killed when some partitions had stored more rows than others."""
        async with millstream.connect(run.url) as mill:
            topic = await mill.topic("spread")
            packs = millstream.Packing(max_events=10, linger=60)
            writer = await topic.writer(writer_name(str(file)), packs).open()
            for n in range(50):
                await writer.write(b"{}", str(n % 7), position=n + 1)
            await writer.abandon()
            assert writer.position == 0

    asyncio.run(stop_half_way())
    there = len(contents(run.url, "spread"))
    assert 0 < there < 50
    assert run.json("import", "spread", str(file), "--key", "k") == {
        "topic": "spread", "file": str(file), "stored": 100 - there, "stored_before": there,
    }  # fmt: skip
    again = run.json("import", "spread", str(file), "--key", "k")
    assert (again["stored"], again["stored_before"]) == (0, 100)


def test_rows_become_values_of_a_topics_type(run: Commands, tmp_path: Path) -> None:
    async def declare() -> None:
        async with millstream.connect(run.url) as mill:
            await mill.create_topic("sales", schema=Sale)

    asyncio.run(declare())
    file = tmp_path / "sales.csv"
    rows = "tea,2.5,3,2026-01-31T12:00:00Z\nmug,7,,2026-02-01T00:00:00Z\n"
    file.write_text(f"item,price,count,at\n{rows}")
    run("import", "sales", str(file), "--key", "item")
    first, second = contents(run.url, "sales")
    assert first[1] == {
        "item": "tea", "price": 2.5, "count": 3, "at": datetime(2026, 1, 31, 12, tzinfo=UTC),
    }  # fmt: skip
    assert (second[0], second[1]["count"]) == ("mug", None)
    file.write_text("item,price,count,at\ntea,cheap,3,2026-01-31T12:00:00Z\n")
    words = run.error("import", "sales", str(file), "--again")
    assert "row 1" in words
    assert "price" in words
