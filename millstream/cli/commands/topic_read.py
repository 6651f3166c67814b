"""`millstream topic tail` and `topic replay`: read events without touching subscriptions."""

from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from millstream.cli.options.reading import (
    PLACE_HELP,
    CountOption,
    FormatOption,
    KeyOption,
    PartitionOption,
    RawOption,
    SubjectOption,
    TopicArgument,
    ValueOption,
)
from millstream.cli.output import JsonOption, say
from millstream.cli.session import ServerOption, run
from millstream.errors import ConfigError

if TYPE_CHECKING:
    from datetime import datetime

    from millstream.cli.options.positions import Place
    from millstream.cli.views.event_text import Formatter
    from millstream.messaging import Event, NewEvent, Topic
    from millstream.mill import Mill

__all__ = ["app", "events_from", "plan_end"]

app = typer.Typer()

WAITING_EVENTS: Final = 1000  # of all partitions together, between their readers and the output
REPLAYED_AT_ONCE: Final = 1000


@app.command()
def tail(
    name: TopicArgument,
    offset: Annotated[
        str, typer.Option("--offset", "-o", metavar="PLACE", help=f"Where to begin: {PLACE_HELP}.")
    ] = "end",
    exit_: Annotated[
        bool, typer.Option("--exit", "-e", help="End with the last event that is stored now.")
    ] = False,
    count: CountOption = None,
    form: FormatOption = None,
    raw: RawOption = False,
    key: KeyOption = None,
    subject: SubjectOption = None,
    partition: PartitionOption = None,
    value: ValueOption = "auto",
    server: ServerOption = None,
    json_: JsonOption = False,
) -> None:
    """Print events of a topic as they are stored, until Ctrl-C; with --json one object a line.

    'tail -o -10' shows the last ten and goes on; 'tail -o beginning -e' prints all and ends.
    """
    from millstream.cli.options.positions import place
    from millstream.cli.views.event_text import formatter

    begin = place(offset)
    write = formatter(form, raw=raw, as_json=json_, value=value)
    choices = _choices(key, subject, partition, follow=not exit_)

    async def work(mill: "Mill") -> None:
        topic = await mill.topic(name)
        if begin.word == "keys" and not exit_:
            raise ConfigError("-o keys is what is stored now: add -e")
        await _print(await events_from(topic, begin, choices), write, count)

    run(work, server)


@app.command()
def replay(
    name: TopicArgument,
    start: Annotated[
        str, typer.Option("--start", metavar="PLACE", help=f"Where to begin: {PLACE_HELP}.")
    ] = "beginning",
    end: Annotated[
        str,
        typer.Option("--end", metavar="PLACE", help="Where to end, exclusive: an offset or @TIME."),
    ] = "end",
    to: Annotated[
        str | None,
        typer.Option("--to", metavar="TOPIC", help="Store them again in this topic."),
    ] = None,
    speed: Annotated[
        float | None,
        typer.Option("--speed", help="Keep the pauses between events: 1 as they were, 2 halved."),
    ] = None,
    count: CountOption = None,
    form: FormatOption = None,
    raw: RawOption = False,
    key: KeyOption = None,
    subject: SubjectOption = None,
    partition: PartitionOption = None,
    value: ValueOption = "auto",
    server: ServerOption = None,
    json_: JsonOption = False,
) -> None:
    """Read a range of a topic again, by offset or time: print it, or store it in another topic.

    Subscriptions are not touched. An event that is stored again keeps key, headers, time and, with
    its origin added, id: a replay that is repeated within the duplicate window stores no event
    twice.
    """
    from millstream.cli.options.positions import place
    from millstream.cli.views.event_text import formatter

    begin, until = place(start), plan_end(end)
    if speed is not None and speed <= 0:
        raise ConfigError(f"--speed {speed:g}: give a number above 0, such as 1 or 10")
    if to is not None and (form is not None or raw):
        raise ConfigError("--to stores the events; --format and --raw print them. Choose one")
    if to == name:
        raise ConfigError(f"--to {to}: that is the topic itself")
    write = formatter(form, raw=raw, as_json=json_, value=value)
    choices = _choices(key, subject, partition, end=until)

    async def work(mill: "Mill") -> None:
        topic = await mill.topic(name)
        events = await events_from(topic, begin, choices)
        if speed is not None:
            events = _paced(events, speed)
        if to is None:
            await _print(events, write, count)
        else:
            stored, again = await _store(events, await mill.topic(to), count, speed is not None)
            repeated = f"; {again:,} were there before" if again else ""
            say(f"Stored {stored:,} events of '{name}' in '{to}'{repeated}")

    run(work, server)


def plan_end(text: str) -> "int | datetime | None":
    """The end of a range, exclusive; None: what is stored now."""
    from millstream.cli.options.positions import place

    found = place(text)
    if found.word == "end":
        return None
    if found.offset is None and found.time is None:
        raise ConfigError(f"--end {text}: give an offset, @TIME or end")
    return found.offset if found.offset is not None else found.time


def _choices(
    key: list[str] | None,
    subject: list[str] | None,
    partition: list[int] | None,
    **others: Any,
) -> dict[str, Any]:
    return {"keys": key or (), "subjects": subject or (), "partitions": partition, **others}


async def events_from(
    topic: "Topic", begin: "Place", choices: dict[str, Any]
) -> "AsyncIterator[Event]":
    """The events from a place on; partitions with starts of their own are read side by side."""
    wanted = choices["partitions"]
    missing = [number for number in wanted or () if number >= topic.partitions]
    if missing:
        raise ConfigError(f"topic '{topic.name}' has no partition {missing[0]}")
    if not begin.differs:
        return topic.read(start=begin.start(0), **choices)
    parts = [
        part for part in (await topic.info()).partitions if wanted is None or part.number in wanted
    ]
    return merged(
        [
            topic.read(
                start=begin.start(part.last_offset), **{**choices, "partitions": [part.number]}
            )
            for part in parts
        ]
    )


def merged(readers: "Sequence[AsyncIterator[Event]]") -> "AsyncIterator[Event]":
    """Events of several readers as they come, each reader's in its order."""
    return readers[0] if len(readers) == 1 else _merged(readers)


async def _merged(readers: "Sequence[AsyncIterator[Event]]") -> "AsyncIterator[Event]":
    import asyncio

    queue: asyncio.Queue[Event | BaseException | None] = asyncio.Queue(WAITING_EVENTS)

    async def drain(reader: "AsyncIterator[Event]") -> None:
        try:
            async for event in reader:
                await queue.put(event)
            await queue.put(None)
        except Exception as error:
            await queue.put(error)

    tasks = [asyncio.get_running_loop().create_task(drain(reader)) for reader in readers]
    try:
        left = len(tasks)
        while left:
            item = await queue.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                left -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _print(events: "AsyncIterator[Event]", write: "Formatter", count: int | None) -> None:
    from millstream.cli.views.lines import Lines

    left = count
    async with Lines() as out, aclosing(events):  # type: ignore[type-var]
        async for event in events:
            await out.write(write(event))
            if left is not None:
                left -= 1
                if not left:
                    return


async def _paced(events: "AsyncIterator[Event]", speed: float) -> "AsyncIterator[Event]":
    """The events with the pauses that were between them, shortened by the factor."""
    import asyncio

    loop = asyncio.get_running_loop()
    begun, first = loop.time(), None
    async with aclosing(events):  # type: ignore[type-var]
        async for event in events:
            first = event.timestamp_ns if first is None else first
            due = begun + (event.timestamp_ns - first) / 1e9 / speed
            await asyncio.sleep(max(0.0, due - loop.time()))
            yield event


async def _store(
    events: "AsyncIterator[Event]", target: "Topic", count: int | None, one_by_one: bool
) -> tuple[int, int]:
    """Store the events; how many that were, and how many the topic had already."""
    stored = again = taken = 0
    batch: list[NewEvent] = []
    at_once = 1 if one_by_one else REPLAYED_AT_ONCE
    async with aclosing(events):  # type: ignore[type-var]
        async for event in events:
            batch.append(_copy(event))
            taken += 1
            last = count is not None and taken >= count
            if len(batch) >= at_once or last:
                receipts = await target.publish_many(batch)
                stored, again = stored + len(receipts), again + sum(r.duplicate for r in receipts)
                batch.clear()
            if last:
                break
    receipts = await target.publish_many(batch)
    stored, again = stored + len(receipts), again + sum(r.duplicate for r in receipts)
    return stored - again, again


def _copy(event: "Event") -> "NewEvent":
    """The same event for another topic; its origin is its id, so a repeated replay is harmless."""
    from millstream.cli.views.event_text import value_bytes
    from millstream.messaging import NewEvent

    origin = f"replay:{event.topic}:{event.partition}:{event.offset}:{event.index}"
    return NewEvent(
        None if event.value is None else value_bytes(event.value),
        event.key,
        event.headers or None,
        event.timestamp_ns,
        origin,
    )
