"""Names, keys, headers, values and command lines with hostile content."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import millstream
from millstream import Mill, NewEvent
from millstream.errors import ConfigError, MillstreamError, PayloadTooLarge
from millstream.messaging.topics.admin import Purge
from tests.faults.supervisor import REPOSITORY

SECONDS = 30.0  # for an answer
NAMES = [
    "",
    ".",
    "..",
    "../../etc/passwd",
    "a.b",
    "a b",
    "a*",
    ">",
    "$JS.API",
    "_mill",
    "a\r\nPUB x 0\r\n",
    "a\0b",
    "x" * 300,
    "\N{RIGHT-TO-LEFT OVERRIDE}abc",
    "\ud800",
    "-",
    "$SYS",
]


@pytest.fixture
async def mill(millstream_url: str) -> AsyncIterator[Mill]:
    async with millstream.connect(millstream_url, request_timeout=SECONDS) as connected:
        yield connected


@pytest.mark.parametrize("name", NAMES)
async def test_a_hostile_name_is_refused_or_works_and_harms_nothing(mill: Mill, name: str) -> None:
    witness = await mill.create_topic("witness")
    await witness.publish(b"1")
    with contextlib.suppress(ConfigError):
        topic = await mill.create_topic(name)
        assert (await topic.publish(b"x", "k")).offset == 1
    for deed in (witness.subscribe, mill.claim, mill.publish, mill.topic):
        with contextlib.suppress(MillstreamError):
            await deed(name)
    with contextlib.suppress(MillstreamError):
        await witness.publish(b"2", name)
        await witness.admin.purge(Purge(key=name))
    assert [event.value async for event in witness.read()] == [b"1"]


@settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    key=st.one_of(st.none(), st.text(max_size=60), st.binary(max_size=60)),
    value=st.binary(max_size=200),
    headers=st.dictionaries(st.text(max_size=12), st.text(max_size=20), max_size=3),
)
def test_any_event_is_read_back_unchanged_or_refused(
    millstream_url: str, key: str | bytes | None, value: bytes, headers: dict[str, str]
) -> None:
    async def there_and_back() -> None:
        async with millstream.connect(millstream_url, request_timeout=SECONDS) as mill:
            topic = await mill.create_topic("any")
            try:
                receipt = await topic.publish(value, key, headers=headers)
            except MillstreamError:
                return
            (event,) = await topic.get(receipt.offset)
            wanted = key.decode("utf-8", "surrogateescape") if isinstance(key, bytes) else key
            assert (event.key, event.value) == (wanted, value)
            assert {n: v.strip() for n, v in headers.items()} == dict(event.headers)

    asyncio.run(there_and_back())


async def test_a_payload_that_is_too_large_is_refused_and_the_connection_stays(mill: Mill) -> None:
    topic = await mill.create_topic("big")
    limit = mill.connection.info.max_payload
    with pytest.raises(PayloadTooLarge):
        await topic.publish(b"x" * (limit + 1))
    with pytest.raises(MillstreamError):
        await topic.publish(b"x" * (limit - 10), headers={"a": "b" * 100})
    with pytest.raises(MillstreamError):
        await topic.publish(b"x", headers={"a": "b" * 70_000})
    with pytest.raises(MillstreamError):
        await topic.publish(b"x", "k" * 40_000)
    assert (await topic.publish(b"")).offset == 1


async def test_valid_events_are_stored_next_to_hostile_ones(mill: Mill) -> None:
    topic = await mill.create_topic("mixed")
    events = [NewEvent(b"1"), NewEvent(b"2", headers={"a\r\nb": "x"}), NewEvent(b"3")]
    with pytest.raises(MillstreamError):
        await topic.publish_many(events)
    assert [event.value async for event in topic.read()] == [b"1", b"3"]


COMMANDS = [
    ["nonsense"],
    ["topic", "create", "a b"],
    ["topic", "create", ""],
    ["topic", "create", "x", "--partitions", "-1"],
    ["topic", "create", "x", "--partitions", "9" * 30],
    ["topic", "create", "x", "--max-age", "forever"],
    ["topic", "create", "x", "--max-bytes", "many"],
    ["topic", "read", "../x"],
    ["publish", "a..b", "x"],
    ["publish", "\r\nPUB a 0\r\n", "x"],
    ["import", "x", "/nonexistent"],
    ["import", "x", "/dev/null"],
    ["--server", "http://x", "topic", "list"],
    ["topic", "list", "--server", "nats://"],
    ["topic", "list", "--server", "nats://host:99999"],
]


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
async def test_a_nonsensical_command_line_fails_without_a_traceback(
    millstream_url: str, words: list[str]
) -> None:
    extra = [] if "--server" in words else ["--server", millstream_url]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", "from millstream.cli.main import main; main()", *words, *extra),
        cwd=REPOSITORY,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await process.communicate()
    text = (out + err).decode("utf-8", "replace")
    assert "Traceback" not in text
    assert process.returncode != 0, text
    assert text.strip()
