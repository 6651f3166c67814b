"""`millstream pub`: publish messages to a subject, or events to a topic."""

from typing import TYPE_CHECKING, Annotated

import typer

from millstream.cli.options.bodies import BodyOptions
from millstream.cli.options.events import EventOptions
from millstream.cli.options.groups import grouped
from millstream.cli.output import JsonOption, print_json, say
from millstream.cli.session import ServerOption, run
from millstream.errors import ConfigError

if TYPE_CHECKING:
    from millstream.errors import PermissionDenied
    from millstream.messaging import Receipt
    from millstream.mill import Mill

__all__ = ["app"]

app = typer.Typer()


@app.command()
@grouped
def pub(
    to: Annotated[str, typer.Argument(metavar="SUBJECT", help="A subject; with -t a topic.")],
    bodies: BodyOptions,
    event: EventOptions,
    topic: Annotated[
        bool,
        typer.Option("--topic", "-t", help="Publish an event to this topic and wait for its ack."),
    ] = False,
    reply_to: Annotated[str | None, typer.Option("--reply-to", help="Subject for answers.")] = None,
    *,
    server: ServerOption = None,
    json_: JsonOption = False,
) -> None:
    """Publish a message to a subject, or with -t an event to a topic.

    A message reaches the subscribers that are connected now, at most once; a subject with the name
    of a topic that does not store it is reported on stderr. An event is stored
    before the command ends; its receipt says where, and how durably. With --json one receipt per
    line.
    """
    if not topic:
        given = event.given()
        if given:
            raise ConfigError(
                f"{given[0]} applies to topics only; add -t to publish to topic '{to}'"
            )
        bodies.check()
        run(lambda mill: _to_subject(mill, to, bodies, reply_to, json_), server)
        return
    if reply_to is not None:
        raise ConfigError("--reply-to cannot be used with -t")
    bodies.check()
    event.check(bodies)
    run(lambda mill: _to_topic(mill, to, bodies, event, json_), server)


async def _to_subject(
    mill: "Mill", subject: str, bodies: BodyOptions, reply_to: str | None, as_json: bool
) -> None:
    import asyncio

    # Not mill.publish: its warning would be logged at some later time, or after the command's end.
    from millstream.messaging.core.message import publish
    from millstream.messaging.topics.unstored import why_unstored

    headers, pause = bodies.headers(), bodies.pause()
    sent = 0
    batches = bodies.batches(subject)
    denied: list[PermissionDenied] = []
    mill.connection.on_denied.append(denied.append)
    while batch := await asyncio.to_thread(next, batches, None):
        for body, _ in batch:
            await publish(mill.connection, subject, body, headers, reply_to)
            sent += 1
            if pause:
                await _received(mill, subject, denied)
                await asyncio.sleep(pause)
        await _received(mill, subject, denied)
    reason = await why_unstored(mill.jetstream, subject)
    if reason is not None:
        typer.echo(f"warning: {reason}", err=True)
    if as_json:
        print_json({"subject": subject, "messages": sent})
    else:
        say(f"Published {sent:,} message{'s' * (sent != 1)} to '{subject}'")


async def _received(mill: "Mill", subject: str, denied: "list[PermissionDenied]") -> None:
    """Return when the server has taken what was sent; raises if it refused any of it."""
    await mill.flush()
    for refusal in denied:
        if refusal.subject == subject:
            raise refusal


async def _to_topic(
    mill: "Mill", name: str, bodies: BodyOptions, event: EventOptions, as_json: bool
) -> None:
    import asyncio

    topic = await mill.topic(name)
    new_event = event.maker(topic, bodies)
    pause = bodies.pause()
    batches = bodies.batches(name, null=event.null)
    stored = again = dropped = 0
    receipt: Receipt | None = None
    while batch := await asyncio.to_thread(next, batches, None):
        step = 1 if pause else len(batch)
        for first in range(0, len(batch), step):
            events = [new_event(*body) for body in batch[first : first + step]]
            for receipt in await topic.publish_many(events):
                stored += 1
                again += receipt.duplicate
                dropped += receipt.durability == "none"
                if as_json:
                    print_json(receipt._asdict(), line=True)
            await asyncio.sleep(pause)
    if not as_json:
        say(_summary(name, receipt, stored, again, dropped))


def _summary(
    topic: str, receipt: "Receipt | None", stored: int, again: int, dropped: int = 0
) -> str:
    if dropped:
        return (
            f"Not kept: {dropped:,} of {stored:,} event{'s' * (stored != 1)}, because nobody "
            f"subscribes to '{topic}' (retention interest)"
        )
    if stored == 1 and receipt is not None:
        verb = "Already stored" if receipt.duplicate else "Stored"
        where = f"partition {receipt.partition}, offset {receipt.offset}"
        return f"{verb}: {topic}, {where} ({receipt.durability})"
    repeated = f"; {again:,} were already stored" if again else ""
    return f"Stored {stored - again:,} events in '{topic}'{repeated}"
