"""`millstream topic tail` and `topic replay`: read events without a subscription."""

from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from millstream.cli.options.groups import grouped
from millstream.cli.options.positions import POSITION_HELP, Position, parse_position
from millstream.cli.options.reading import (
    CountOption,
    EventFormat,
    RangeOptions,
    Selection,
    TopicArgument,
)
from millstream.cli.output import JsonOption, say
from millstream.cli.session import ServerOption, run
from millstream.cli.views.left_out import LeftOut
from millstream.errors import ConfigError

if TYPE_CHECKING:
    from millstream.cli.views.event_text import Formatter
    from millstream.messaging import Event, NewEvent, Topic
    from millstream.mill import Mill

__all__ = ["app", "events_from"]

app = typer.Typer()

WAITING_EVENTS: Final = 1000  # of all partitions together, between their readers and the output
REPLAY_BATCH: Final = 1000


@app.command()
@grouped
def tail(
    name: TopicArgument,
    selection: Selection,
    form: EventFormat,
    offset: Annotated[
        str,
        typer.Option(
            "--offset", "-o", metavar="POSITION", help=f"Where to start: {POSITION_HELP}."
        ),
    ] = "end",
    exit_: Annotated[
        bool, typer.Option("--exit", "-e", help="Stop after the last event that is stored now.")
    ] = False,
    *,
    count: CountOption = None,
    server: ServerOption = None,
    json_: JsonOption = False,
) -> None:
    """Print the events of a topic as they are stored, until Ctrl-C; --json: one object per line.

    'tail -o -10' prints the last ten and continues; 'tail -o beginning -e' prints all and ends.
    """
    from millstream.cli.views.event_text import formatter_of

    start = parse_position(offset)
    write = formatter_of(form, json_)
    left_out = LeftOut(selection.undecodable)
    arguments = {**selection.arguments(), "follow": not exit_, "undecodable": left_out}

    async def work(mill: "Mill") -> None:
        topic = await mill.topic(name)
        if start.name == "keys" and not exit_:
            raise ConfigError("-o keys reads only what is stored now: add -e")
        await _print(await events_from(topic, start, arguments), write, count, left_out)

    run(work, server)
    left_out.finish()


@dataclass(frozen=True, slots=True)
class _Target:
    """What becomes of the events that `replay` reads."""

    to: Annotated[
        str | None,
        typer.Option("--to", metavar="TOPIC", help="Store them again in this topic."),
    ] = None
    speed: Annotated[
        float | None,
        typer.Option(
            "--speed", help="Keep the pauses between events: 1 as they were, 2 half as long."
        ),
    ] = None

    def check(self, name: str, form: EventFormat) -> None:
        """Refuse options that exclude each other."""
        if self.speed is not None and self.speed <= 0:
            raise ConfigError(f"--speed {self.speed:g}: give a number above 0, such as 1 or 10")
        if self.to is not None and (form.form is not None or form.raw):
            raise ConfigError("--to stores the events; --format and --raw print them. Choose one")
        if self.to == name:
            raise ConfigError(f"--to {self.to}: that is the topic itself")


@app.command()
@grouped
def replay(
    name: TopicArgument,
    events: RangeOptions,
    selection: Selection,
    target: _Target,
    form: EventFormat,
    *,
    count: CountOption = None,
    server: ServerOption = None,
    json_: JsonOption = False,
) -> None:
    """Read a range of a topic again, by offset or time: print it, or store it in another topic.

    Subscriptions are not affected. An event that is stored again keeps its key, headers and time;
    its id names the original event, so a replay that is repeated within the duplicate window stores
    no event twice.
    """
    from millstream.cli.views.event_text import formatter_of

    target.check(name, form)
    start, end = events.positions()
    write = formatter_of(form, json_)
    left_out = LeftOut(selection.undecodable)
    arguments = {**selection.arguments(), "end": end, "undecodable": left_out}

    async def work(mill: "Mill") -> None:
        found = await events_from(await mill.topic(name), start, arguments)
        paced = found if target.speed is None else _paced(found, target.speed)
        if target.to is None:
            await _print(paced, write, count, left_out)
            return
        copy = await mill.topic(target.to)
        stored, again = await _store(paced, copy, count, target.speed is not None)
        repeated = f"; {again:,} were already stored" if again else ""
        say(f"Stored {stored:,} events of '{name}' in '{target.to}'{repeated}")

    run(work, server)
    left_out.finish()


async def events_from(
    topic: "Topic", start: Position, arguments: dict[str, Any]
) -> "AsyncIterator[Event]":
    """The events from a position on; if it differs by partition, they are read concurrently."""
    wanted = arguments["partitions"]
    missing = [number for number in wanted or () if number >= topic.partitions]
    if missing:
        raise ConfigError(f"topic '{topic.name}' has no partition {missing[0]}")
    if not start.differs:
        return topic.read(start=start.start(0), **arguments)
    parts = [
        part for part in (await topic.info()).partitions if wanted is None or part.number in wanted
    ]
    return merged(
        [
            topic.read(
                start=start.start(part.last_offset), **{**arguments, "partitions": [part.number]}
            )
            for part in parts
        ]
    )


def merged(readers: "Sequence[AsyncIterator[Event]]") -> "AsyncIterator[Event]":
    """Events of several readers as they arrive; each reader's stay in order."""
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


async def _print(
    events: "AsyncIterator[Event]", write: "Formatter", count: int | None, left_out: LeftOut
) -> None:
    from millstream.cli.views.stdout_writer import StdoutWriter

    left = count
    async with StdoutWriter() as out, aclosing(events):  # type: ignore[type-var]
        async for event in events:
            try:
                line = write(event)
            except ConfigError as error:
                left_out.unwritable(event, error)
                continue
            await out.write(line)
            if left is not None:
                left -= 1
                if not left:
                    return


async def _paced(events: "AsyncIterator[Event]", speed: float) -> "AsyncIterator[Event]":
    """The events with the pauses that were between them, divided by the speed."""
    import asyncio

    loop = asyncio.get_running_loop()
    started, first = loop.time(), None
    async with aclosing(events):  # type: ignore[type-var]
        async for event in events:
            first = event.timestamp_ns if first is None else first
            due = started + (event.timestamp_ns - first) / 1e9 / speed
            await asyncio.sleep(max(0.0, due - loop.time()))
            yield event


async def _store(
    events: "AsyncIterator[Event]", target: "Topic", count: int | None, one_by_one: bool
) -> tuple[int, int]:
    """Store the events; return how many were new and how many had been stored before."""
    stored = again = taken = 0
    batch: list[NewEvent] = []
    batch_size = 1 if one_by_one else REPLAY_BATCH
    async with aclosing(events):  # type: ignore[type-var]
        async for event in events:
            batch.append(_copy(event))
            taken += 1
            last = count is not None and taken >= count
            if len(batch) >= batch_size or last:
                receipts = await target.publish_many(batch)
                stored, again = stored + len(receipts), again + sum(r.duplicate for r in receipts)
                batch.clear()
            if last:
                break
    receipts = await target.publish_many(batch)
    stored, again = stored + len(receipts), again + sum(r.duplicate for r in receipts)
    return stored - again, again


def _copy(event: "Event") -> "NewEvent":
    """The event for another topic; its id names the original, so a repeated replay is harmless."""
    from millstream.cli.views.event_text import value_bytes
    from millstream.messaging import NewEvent

    event_id = f"replay:{event.topic}:{event.partition}:{event.offset}:{event.index}"
    return NewEvent(
        None if event.value is None else value_bytes(event.value),
        event.key,
        event.headers or None,
        event.timestamp_ns,
        event_id,
    )
