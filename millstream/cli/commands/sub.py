"""`millstream sub`: print the messages of a subject as they arrive."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from millstream.cli.output import JsonOption
from millstream.cli.session import ServerOption, run
from millstream.errors import ConfigError
from millstream.settings import parse_duration

if TYPE_CHECKING:
    from millstream.messaging import Message
    from millstream.mill import Mill

__all__ = ["app", "message_writer"]

app = typer.Typer()


@app.command()
def sub(
    subject: Annotated[
        str, typer.Argument(metavar="SUBJECT", help="Subject; * is one token, > all that follow.")
    ],
    *,
    queue: Annotated[
        str, typer.Option("--queue", "-q", help="Share the messages in this queue group.")
    ] = "",
    count: Annotated[
        int | None, typer.Option("--count", "-c", min=1, help="Stop after N messages.")
    ] = None,
    wait: Annotated[
        str | None,
        typer.Option("--wait", help="Stop after this time without a message, such as 5s."),
    ] = None,
    raw: Annotated[
        bool, typer.Option("--raw", "-r", help="Print only the bodies, one per line.")
    ] = False,
    server: ServerOption = None,
    json_: JsonOption = False,
) -> None:
    """Print the messages of a subject until Ctrl-C; with --json one object per line.

    At most once: messages published before, or while the connection is lost, are not shown. For
    stored events see 'topic tail'.
    """
    write = message_writer(raw, json_)
    seconds = None if wait is None else parse_duration(wait)
    run(lambda mill: _follow(mill, subject, queue, count, seconds, write), server)


async def _follow(
    mill: "Mill",
    subject: str,
    queue: str,
    count: int | None,
    seconds: float | None,
    write: "Callable[[int, Message], bytes]",
) -> None:
    from millstream.cli.views.stdout_writer import StdoutWriter
    from millstream.errors import NoMessage
    from millstream.messaging import SubscriberSettings

    subscriber = mill.subscribe(subject, SubscriberSettings(queue=queue))
    number = lost = 0
    try:
        async with subscriber, StdoutWriter() as out:
            typer.echo(f"Listening on '{subject}'", err=True)
            while count is None or number < count:
                try:
                    message = await subscriber.next(seconds)
                except NoMessage:
                    return
                number += 1
                await out.write(write(number, message))
                lost = subscriber.counters.dropped  # closing counts what is still pending
    finally:
        if lost:
            typer.echo(f"{lost:,} messages arrived too fast and were dropped", err=True)


def message_writer(raw: bool, as_json: bool) -> "Callable[[int, Message], bytes]":
    """The function that turns the n-th message into bytes to print."""
    from millstream.cli.views.event_text import (
        header_fields,
        json_line,
        shown,
        text_field,
        value_field,
    )

    if raw and as_json:
        raise ConfigError("choose one of --raw and --json")
    if raw:
        return lambda number, message: message.data + b"\n"

    def record(number: int, message: "Message") -> bytes:
        fields: dict[str, Any] = text_field("subject", message.subject)
        fields |= {"reply": None} if message.reply is None else text_field("reply", message.reply)
        fields |= header_fields(message.headers)
        return json_line(fields | value_field(message.data, "auto"))

    def line(number: int, message: "Message") -> bytes:
        headers = "".join(f"  {name}: {value}" for name, value in message.header_items)
        reply = f"  (reply to {message.reply})" if message.reply else ""
        tail = f"{headers}{reply}".encode("utf-8", "surrogateescape")
        subject = message.subject.encode("utf-8", "surrogateescape")
        return b"#%d  %s  %s%s\n" % (
            number, shown(subject), shown(message.data), shown(tail)
        )  # fmt: skip

    return record if as_json else line
