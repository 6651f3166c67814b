"""Commands on topics in which other clients stored odd messages: bytes, not text, and bad packs."""

from __future__ import annotations

import asyncio
import base64
import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

import millstream
from tests.integration.cli.messaging_commands import Commands
from tests.integration.cli.test_messaging_files import contents

# Subject and header lines of each message; none of them is text.
ODD = [
    (b"orders.a", b"X-\xff\xfe: plain\r\n"),
    (b"orders.b", b"X-A: \xff\r\n"),
    (b"orders.c", "X-\uef80\ueffe: \uefff\r\nX: 1\r\n".encode()),  # what escapes look like
    (b"orders.d", b"Nats-Msg-Id: \x80\xff\r\n"),
    (b"orders.e\xff", b"Mill-Key: k\xfe\r\n"),
    (b"orders.f", b"a b: 1\r\n: 2\r\nabc\r\n"),
    (b"orders.g", "Nats-Msg-Id: \uef80\r\n\N{SKULL}: \N{SKULL}\r\n".encode()),
]


def store(url: str, messages: list[tuple[bytes, bytes]]) -> None:
    async def send() -> None:
        async with millstream.connect(url) as mill:
            for number, (subject, lines) in enumerate(messages):
                block = b"NATS/1.0\r\n" + lines + b"\r\n"
                mill.connection.publish(subject, b"%d" % number, headers=block)
            await mill.connection.flush(60)

    asyncio.run(send())


@pytest.fixture
def run(millstream_url: str) -> Commands:
    run = Commands(millstream_url)
    run("topic", "create", "orders")
    return run


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.parquet"])
@pytest.mark.parametrize("into", ["packs", "table"])
def test_what_is_not_text_is_exported_and_imported_as_the_same_bytes(
    run: Commands, tmp_path: Path, name: str, into: str
) -> None:
    store(run.url, ODD)
    file = tmp_path / name
    assert run.json("export", "orders", str(file))["events"] == len(ODD)
    run("topic", "create", "copy", *(["--history", "1"] if into == "table" else []))
    run("import", "copy", str(file))
    found = contents(run.url, "copy")
    assert [row[:3] for row in found] == [row[:3] for row in contents(run.url, "orders")]
    ids = [row[4] for row in found]
    assert [ids[3], ids[6]] == ["\udc80\udcff", "\uef80"]
    assert found[0][2] == {"X-\udcff\udcfe": "plain"}
    assert found[4][0] == "k\udcfe"


def test_json_has_what_is_not_text_in_base64(run: Commands) -> None:
    store(run.url, ODD)
    events = run.lines("topic", "tail", "orders", "-o", "beginning", "-e")
    run("subscription", "create", "orders", "billing", "--start", "beginning")
    pulled = run.lines("subscription", "pull", "orders", "billing", "-n", str(len(ODD)))
    for first, second in zip(events, pulled, strict=True):
        assert first == second
    name, value = next(iter(events[0]["headers_base64"].items()))
    assert (base64.b64decode(name), base64.b64decode(value)) == (b"X-\xff\xfe", b"plain")
    assert "headers" not in events[0]
    assert base64.b64decode(events[1]["headers_base64"]["WC1B"]) == b"\xff"
    assert base64.b64decode(events[3]["id_base64"]) == b"\x80\xff"
    assert base64.b64decode(events[4]["subject_base64"]) == b"orders.e\xff"
    assert base64.b64decode(events[4]["key_base64"]) == b"k\xfe"
    assert events[6]["headers"] == {"\N{SKULL}": "\N{SKULL}"}
    run("topic", "tail", "orders", "-o", "beginning", "-e")
    run("topic", "tail", "orders", "-o", "beginning", "-e", "-f", "%t %k %h %i %s\\n")


def test_they_are_replayed_into_another_topic_unchanged(run: Commands) -> None:
    store(run.url, ODD)
    run("topic", "create", "copy")
    run("topic", "replay", "orders", "--to", "copy")
    found = [row[:3] for row in contents(run.url, "copy")]
    assert found == [row[:3] for row in contents(run.url, "orders")]


def test_dead_letters_of_them_are_shown(run: Commands) -> None:
    store(run.url, ODD)

    async def give_up() -> None:
        async with millstream.connect(run.url) as mill:
            topic = await mill.topic("orders")
            async with topic.subscribe("billing") as member:
                for delivery in await member.pull(len(ODD)):
                    delivery.terminate("odd")

    asyncio.run(give_up())
    letters = run.json("dlq", "ls", "orders", "billing")
    assert [letter["cause"] for letter in letters] == ["odd"] * len(ODD)
    assert base64.b64decode(letters[4]["key_base64"]) == b"k\xfe"
    run("dlq", "ls", "orders", "billing")
    for letter in letters:
        run("dlq", "show", "orders", "billing", str(letter["offset"]))
        run.json("dlq", "show", "orders", "billing", str(letter["offset"]))
    run("dlq", "redrive", "orders", "billing")
    count = str(len(ODD))
    assert len(run.lines("subscription", "pull", "orders", "billing", "-n", count)) == len(ODD)


BAD = [
    (b"orders.a", b""),
    (b"orders.b", b"Mill-Pack: 9\r\n"),
    (b"orders.c", b""),
]


def test_a_bad_pack_is_named_and_the_rest_is_printed(run: Commands) -> None:
    store(run.url, BAD)
    named = "left out: orders/0, offset 2, index 0: not a valid pack (version)"
    tail = ("topic", "tail", "orders", "-o", "beginning", "-e", "--raw")
    printed, errors = run.partly(*tail)
    assert (printed, named in errors) == ("0\n2\n", True)
    assert run(*tail, "--undecodable", "drop") == "0\n2\n"
    printed, errors = run.partly("topic", "replay", "orders", "--raw")
    assert (printed, named in errors) == ("0\n2\n", True)
    assert "one of fail, drop" in run.error(*tail, "--undecodable", "ignore")
    assert run("topic", "tail", "orders", "-o", "beginning", "--raw", "-c", "1") == "0\n"


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.parquet"])
def test_an_export_has_everything_but_the_bad_pack(
    run: Commands, tmp_path: Path, name: str
) -> None:
    store(run.url, BAD)
    file = tmp_path / name
    printed, errors = run.partly("export", "orders", str(file), "--json")
    assert "left out: orders/0, offset 2, index 0: not a valid pack" in errors
    assert json.loads(printed) == {
        "topic": "orders",
        "file": str(file),
        "events": 2,
        "left_out": 1,
    }
    run("topic", "create", "copy")
    run("import", "copy", str(file))
    assert [row[1] for row in contents(run.url, "copy")] == [b"0", b"2"]
    again = run.json("export", "orders", str(file), "--force", "--undecodable", "drop")
    assert again["left_out"] == 1


def test_a_time_that_parquet_cannot_hold_costs_one_event(run: Commands, tmp_path: Path) -> None:
    far = (b"orders.b", b"Mill-Time: 99999999999999999999\r\n")
    store(run.url, [BAD[0], far, BAD[2]])
    file = tmp_path / "a.parquet"
    _, errors = run.partly("export", "orders", str(file))
    assert "left out: orders/0, offset 2, index 0: its time, 5138-11-16" in errors
    assert pq.read_table(file).column("value").to_pylist() == [b"0", b"2"]
    run("export", "orders", str(tmp_path / "a.jsonl"))
    run("topic", "create", "copy")
    run("import", "copy", str(tmp_path / "a.jsonl"))
    assert contents(run.url, "copy")[1][3] == 99999999999999999999 // 1000 * 1000
