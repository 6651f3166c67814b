"""`millstream verify`: walk a topic's log and name every hole."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from millstream.cli.exits import Exit
from millstream.cli.output import JsonOption, print_json, say
from millstream.cli.session import ServerOption, run

if TYPE_CHECKING:
    from millstream.messaging.verify import Verification
    from millstream.mill import Mill

__all__ = ["app"]

app = typer.Typer()
FLAWS_SHOWN = 50


@app.command()
def verify(
    topic: Annotated[str, typer.Argument(metavar="TOPIC", help="The topic to walk.")],
    server: ServerOption = None,
    json_: JsonOption = False,
) -> None:
    """Walk a topic's log: check every pack's checksum and every writer's chain.

    Exit code 4 when something is missing or damaged; each flaw is named with its offset.
    """

    async def work(mill: "Mill") -> "Verification":
        opened = await mill.topic(topic, bytes)
        total = (await opened.info()).messages
        return await _walk(opened.verify(), total, quiet=json_)

    report = run(work, server)
    if json_:
        print_json({**asdict(report), "sound": report.sound})
    else:
        _show(report)
    if not report.sound:
        raise typer.Exit(Exit.UNHEALTHY)


async def _walk(reports: Any, total: int, quiet: bool) -> "Verification":
    from rich.console import Console
    from rich.progress import Progress

    found: Any = None
    with Progress(console=Console(stderr=True), transient=True, disable=quiet) as progress:
        task = progress.add_task("verifying", total=total)
        async for found in reports:
            progress.update(task, completed=found.messages)
    report: Verification = found
    return report


def _show(report: "Verification") -> None:
    say(
        f"{report.topic}: {report.messages:,} messages, {report.events:,} events, "
        f"{report.packs:,} packs, {report.writers:,} writers, {report.deleted:,} deleted"
    )
    for flaw in report.flaws[:FLAWS_SHOWN]:
        say(f"  partition {flaw.partition}, offset {flaw.offset}: {flaw.text}")
    if report.flaw_count > FLAWS_SHOWN:
        say(f"  and {report.flaw_count - FLAWS_SHOWN:,} more (--json lists them)")
    say("sound" if report.sound else f"{report.flaw_count:,} flaws")
