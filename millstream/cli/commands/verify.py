"""`millstream verify`: check a topic and report every gap."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from millstream.cli.exits import Exit
from millstream.cli.output import JsonOption, print_json, say
from millstream.cli.session import ServerOption, chosen_context, run
from millstream.settings import ConnectionSettings, data_folder

if TYPE_CHECKING:
    from millstream.messaging import TopicInfo
    from millstream.messaging.reading.verify import Verification
    from millstream.mill import Mill

__all__ = ["app"]

app = typer.Typer()
FLAWS_SHOWN = 50


@app.command()
def verify(
    topic: Annotated[str, typer.Argument(metavar="TOPIC", help="The topic to check.")],
    server: ServerOption = None,
    json_: JsonOption = False,
) -> None:
    """Check a topic: the checksum of every pack and the sequence of every writer.

    For a broker that 'millstream up' started on this machine, it also reports events that its disk
    lost. Exit code 4 if something is missing or damaged; each flaw is reported with its offset.
    """

    async def work(mill: "Mill") -> "Verification":
        opened = await mill.topic(topic, bytes)
        info = await opened.info()
        report = await _walk(opened.admin.verify(), info.messages, quiet=json_)
        _add_losses(report, info, server)
        return report

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


def _add_losses(report: "Verification", info: "TopicInfo", server: str | None) -> None:
    """Add the losses that the broker has recorded: the stored events do not show them."""
    from millstream import broker
    from millstream.errors import NotRunning
    from millstream.messaging.reading.verify import Flaw

    try:
        state = broker.read_state(data_folder())
    except NotRunning:
        return
    if state.url != ",".join(ConnectionSettings.load(server, context=chosen_context()).urls):
        return  # another broker
    partitions = {part.stream: part.number for part in info.partitions}
    for loss in broker.read_losses(data_folder()):
        if loss.account == broker.DEFAULT_ACCOUNT and loss.stream in partitions:
            report.add(Flaw(partitions[loss.stream], loss.last, "end", loss.text))


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
