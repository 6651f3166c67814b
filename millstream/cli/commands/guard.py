"""`millstream guard`: run the guard of a topic."""

from typing import TYPE_CHECKING, Annotated

import typer

from millstream.cli.output import JsonOption, print_json, say
from millstream.cli.session import ServerOption, run

if TYPE_CHECKING:
    from millstream.mill import Mill
    from millstream.schemas.registry.guard import Guard

__all__ = ["app"]

app = typer.Typer()


@app.command()
def guard(
    topic: Annotated[str, typer.Argument(metavar="TOPIC", help="A guarded topic.")],
    server: ServerOption = None,
    json_: JsonOption = False,
) -> None:
    """Check and store what is published to a guarded topic, until it is stopped.

    A broker of 'millstream up' runs its guards itself; this is for other servers, and for more
    guards that share the load. It needs a user of the role trusted or admin. Clients publish to
    ingress.TOPIC.KEY with any JetStream client and get an ack, or the reason for the refusal.
    SIGTERM ends it with exit code 0 once all messages it took are answered.
    """

    async def work(mill: "Mill") -> "Guard":
        async with mill.guard(topic) as door:
            if json_:
                print_json({"topic": topic, "subject": door.subject}, line=True)
            else:
                say(f"Guarding topic '{topic}': publish to {door.subject}.KEY or {door.subject}")
            await _until_stopped(door)
        return door

    door = run(work, server)
    if json_:
        print_json({"stored": door.stored, "refused": door.refused}, line=True)
    else:
        say(f"Stored {door.stored:,} and refused {door.refused:,} messages")


async def _until_stopped(door: "Guard") -> None:
    """Return on SIGTERM; an error of the guard is raised."""
    import asyncio
    import signal

    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, stopped.set)
    ends = [asyncio.ensure_future(stopped.wait()), asyncio.ensure_future(door.run())]
    try:
        done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        loop.remove_signal_handler(signal.SIGTERM)
        for task in ends:
            task.cancel()
        await asyncio.gather(*ends, return_exceptions=True)
