"""`millstream pub`: messages to a subject, or events to a topic."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count
from typing import TYPE_CHECKING, Annotated, Final

import typer

from millstream.cli.options.bodies import (
    BodyArgument,
    HeaderOption,
    TemplateOption,
    body_bytes,
    filled,
    header_pairs,
    stdin_lines,
)
from millstream.cli.output import JsonOption, print_json, say
from millstream.cli.session import ServerOption, run
from millstream.errors import ConfigError
from millstream.settings import parse_duration

if TYPE_CHECKING:
    from millstream.messaging import NewEvent, PublishOptions, Receipt, Topic
    from millstream.mill import Mill

__all__ = ["app"]

app = typer.Typer()

TOPIC = "Events of a topic"
IN_FLIGHT: Final = 1000  # repeated events that wait for their receipts together

_Body = tuple[bytes, dict[str, bytes]]  # a body, with the words that may be filled in


@app.command()
def pub(
    to: Annotated[str, typer.Argument(metavar="SUBJECT", help="A subject; with -t a topic.")],
    body: BodyArgument = None,
    topic: Annotated[
        bool,
        typer.Option("--topic", "-t", help="Store it in this topic and wait until it is stored."),
    ] = False,
    lines: Annotated[
        bool, typer.Option("--lines", "-l", help="Each line that is piped in is a message.")
    ] = False,
    header: HeaderOption = None,
    times: Annotated[int, typer.Option("--count", "-c", min=1, help="Send it so often.")] = 1,
    pause: Annotated[str, typer.Option("--sleep", help="Pause after each, such as 100ms.")] = "0s",
    template: TemplateOption = False,
    reply_to: Annotated[
        str | None, typer.Option("--reply-to", help="Subject where answers are awaited.")
    ] = None,
    key: Annotated[
        str | None, typer.Option("--key", "-k", help="Key of the event.", rich_help_panel=TOPIC)
    ] = None,
    key_delimiter: Annotated[
        str | None,
        typer.Option(
            "--key-delimiter",
            "-K",
            help="With --lines: the key stands before it.",
            rich_help_panel=TOPIC,
        ),
    ] = None,
    null: Annotated[
        bool,
        typer.Option(
            "--null", help="No value: in a table, its key is deleted.", rich_help_panel=TOPIC
        ),
    ] = False,
    event_id: Annotated[
        str | None,
        typer.Option("--id", help="Id; a second one is not stored.", rich_help_panel=TOPIC),
    ] = None,
    time: Annotated[
        str | None,
        typer.Option("--time", help="Time of the event, with its zone.", rich_help_panel=TOPIC),
    ] = None,
    ttl: Annotated[
        str | None,
        typer.Option("--ttl", help="Keep it so long, such as 1h.", rich_help_panel=TOPIC),
    ] = None,
    at: Annotated[
        str | None,
        typer.Option("--at", help="Deliver it then: a date, or in 10m.", rich_help_panel=TOPIC),
    ] = None,
    server: ServerOption = None,
    json_: JsonOption = False,
) -> None:
    """Publish a message to a subject, or with -t an event to a topic.

    A message reaches who listens now, at most once. An event is stored before the command ends;
    its receipt says where, and how durably. With --json one receipt a line.
    """
    extras = {
        "--key": key, "--key-delimiter": key_delimiter, "--id": event_id,
        "--time": time, "--ttl": ttl, "--at": at, "--null": null or None,
    }  # fmt: skip
    given = [name for name, value in extras.items() if value is not None]
    if given and not topic:
        raise ConfigError(f"{given[0]} is of events: say with -t that '{to}' is a topic")
    if topic and reply_to is not None:
        raise ConfigError("--reply-to is of messages; an event of a topic awaits no answer")
    if event_id is not None and (lines or times > 1) and not template:
        raise ConfigError("--id is of one event: give it a {{Count}} and --template")
    if key_delimiter is not None and not lines:
        raise ConfigError("--key-delimiter goes with --lines")
    if lines and (body not in (None, "-") or times > 1):
        raise ConfigError("--lines takes what is piped in, once: leave the body and --count out")
    if null and (body is not None or lines or key is None):
        raise ConfigError("--null is an event without a value: give a --key and no body")
    body = "" if null else body
    source = _Source(to, body, lines, times, template)
    pairs = header_pairs(header)
    seconds = parse_duration(pause)
    if topic:
        options = _options(ttl, at)
        shape = _Shape(key, key_delimiter, event_id, time, dict(pairs), options, template, null)
        run(lambda mill: _to_topic(mill, source, shape, seconds, json_), server)
    else:
        sent = run(lambda mill: _to_subject(mill, source, pairs, reply_to, seconds), server)
        if json_:
            print_json({"subject": to, "messages": sent})
        else:
            say(f"Published {sent:,} message{'s' * (sent != 1)} to '{to}'")


@dataclass(frozen=True, slots=True)
class _Source:
    """Where the bodies come from."""

    to: str
    body: str | None
    lines: bool
    count: int
    template: bool

    def batches(self) -> Iterator[list[_Body]]:
        """Bodies in groups: those of a pipe as they come, repeated ones up to IN_FLIGHT."""
        if self.lines:
            number = count(1)
            for group in stdin_lines():
                yield [self._body(text, next(number)) for text in group]
            return
        once = body_bytes(self.body)
        for first in range(1, self.count + 1, IN_FLIGHT):
            last = min(first + IN_FLIGHT, self.count + 1)
            yield [self._body(once, number) for number in range(first, last)]

    def _body(self, text: bytes, number: int) -> _Body:
        if not self.template:
            return text, {}
        words = self._words(number)
        return filled(text, words), words

    def _words(self, number: int) -> dict[str, bytes]:
        from millstream.cli.options.positions import time_text
        from millstream.deadline import now_ns
        from millstream.wire.protocol import unique_token

        return {
            "Count": b"%d" % number,
            "Time": time_text(now_ns()).encode(),
            "ID": unique_token().encode(),
            "Subject": self.to.encode(),
        }


@dataclass(frozen=True, slots=True)
class _Shape:
    """How a body becomes an event."""

    key: str | None
    delimiter: str | None
    id: str | None
    time: str | None
    headers: dict[str, str]
    options: "PublishOptions | None"
    template: bool
    null: bool

    def event(self, text: bytes, words: dict[str, bytes]) -> "NewEvent":
        from millstream.cli.options.positions import nanoseconds
        from millstream.messaging import NewEvent

        key: bytes | str | None = self.key
        if self.delimiter is not None:
            before, found, after = text.partition(self.delimiter.encode())
            if found:
                key, text = before, after
        event_id = self.id
        if self.template and event_id is not None:
            event_id = filled(event_id.encode(), words).decode()
        if self.template and isinstance(key, str):
            key = filled(key.encode(), words)
        time = None if self.time is None else nanoseconds(self.time)
        value = None if self.null else text
        return NewEvent(value, key, self.headers or None, time, event_id, self.options)


def _options(ttl: str | None, at: str | None) -> "PublishOptions | None":
    from datetime import timedelta

    from millstream.cli.options.positions import nanoseconds
    from millstream.deadline import now_ns
    from millstream.events.event import datetime_of
    from millstream.messaging import PublishOptions

    if ttl is None and at is None:
        return None
    deliver_at = None
    if at is not None:
        try:
            deliver_at = datetime_of(now_ns()) + timedelta(seconds=parse_duration(at))
        except ConfigError:
            deliver_at = datetime_of(nanoseconds(at))
    return PublishOptions(ttl=None if ttl is None else parse_duration(ttl), deliver_at=deliver_at)


async def _to_subject(
    mill: "Mill", source: _Source, pairs: list[tuple[str, str]], reply_to: str | None, pause: float
) -> int:
    import asyncio

    sent = 0
    batches = source.batches()
    while group := await asyncio.to_thread(next, batches, None):
        for text, _ in group:
            await mill.publish(source.to, text, pairs, reply_to)
            sent += 1
            if pause:
                await mill.flush()
                await asyncio.sleep(pause)
        await mill.flush()
    return sent


def _typed(topic: "Topic", event: "NewEvent") -> "NewEvent":
    """The event with its JSON as a value of the topic's schema, if the topic has one."""
    values = topic.value_type
    if values is None or event.value is None:
        return event
    text = event.value.encode() if isinstance(event.value, str) else event.value
    return replace(event, value=values.parse(text))


async def _to_topic(
    mill: "Mill", source: _Source, shape: _Shape, pause: float, as_json: bool
) -> None:
    import asyncio

    topic = await mill.topic(source.to)
    batches = source.batches()
    stored = again = 0
    receipt: Receipt | None = None
    while group := await asyncio.to_thread(next, batches, None):
        step = 1 if pause else len(group)
        for place in range(0, len(group), step):
            events = [shape.event(*body) for body in group[place : place + step]]
            for receipt in await topic.publish_many(_typed(topic, event) for event in events):
                stored += 1
                again += receipt.duplicate
                if as_json:
                    print_json(receipt._asdict(), line=True)
            await asyncio.sleep(pause)
    if not as_json:
        say(_said(source.to, receipt, stored, again))


def _said(topic: str, receipt: "Receipt | None", stored: int, again: int) -> str:
    if stored == 1 and receipt is not None:
        verb = "Was there before" if receipt.duplicate else "Stored"
        where = f"partition {receipt.partition}, offset {receipt.offset}"
        return f"{verb}: {topic}, {where} ({receipt.durability})"
    repeated = f"; {again:,} were there before" if again else ""
    return f"Stored {stored - again:,} events in '{topic}'{repeated}"
