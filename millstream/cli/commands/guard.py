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
        from millstream.cli.stopping import until_stopped

        async with mill.guard(topic) as door:
            if json_:
                print_json({"topic": topic, "subject": door.subject}, line=True)
            else:
                say(f"Guarding topic '{topic}': publish to {door.subject}.KEY or {door.subject}")
            await until_stopped(door.run())
        return door

    door = run(work, server)
    if json_:
        print_json({"stored": door.stored, "refused": door.refused}, line=True)
    else:
        say(f"Stored {door.stored:,} and refused {door.refused:,} messages")
