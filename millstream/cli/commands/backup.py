"""`millstream backup` and `millstream restore`: copies of topics or of the whole broker."""

import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from millstream.cli.output import JsonOption, print_json, print_table, say, size
from millstream.cli.session import ServerOption, run

if TYPE_CHECKING:
    from collections.abc import Iterator

    from millstream.backups.manifest import Manifest, Progress
    from millstream.backups.restoring import RestoredStream
    from millstream.mill import Mill

__all__ = ["app"]

app = typer.Typer()

TopicsOption = Annotated[
    list[str] | None,
    typer.Option("--topic", "-t", metavar="TOPIC", help="Only this topic; may be repeated."),
]


@app.command()
def backup(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A new or empty folder.")],
    topic: TopicsOption = None,
    server: ServerOption = None,
    json_: JsonOption = False,
) -> None:
    """Back up topics, or everything that your user's account stores, while it is used.

    A topic comes with its subscriptions, dead letters, groups and schemas. The folder appears when
    the backup is complete. Not in it: users, keys and settings of the broker, and checkpoints of
    Spark queries.
    """

    async def work(mill: "Mill") -> "Manifest":
        from millstream.backups.taking import back_up

        with _progress() as show:
            return await back_up(mill, folder, topic or (), show)

    made = run(work, server)
    if json_:
        print_json(
            {
                "folder": str(folder),
                "account": made.account,
                "whole": made.whole,
                "streams": [
                    {
                        "stream": one.name,
                        "topic": one.topic,
                        "messages": one.state.messages + one.added,
                        "bytes": one.bytes,
                        "sha256": one.sha256,
                    }
                    for one in made.streams
                ],
            }
        )
        return
    say(
        f"Backed up {len(made.streams):,} stream(s) of account '{made.account}' with "
        f"{made.messages:,} messages to {folder} ({size(made.bytes)})"
    )
    if made.whole:
        say("Users, keys and settings are in the broker's own folder: keep a copy of it, too.")


@app.command()
def restore(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="The folder of a backup.")],
    topic: TopicsOption = None,
    server: ServerOption = None,
    json_: JsonOption = False,
) -> None:
    """Restore a backup, or topics of it, and verify every message.

    The backup is checked before anything is created. Nothing is ever replaced: if a stream of the
    same name exists, nothing is restored. If it fails later, what was created is removed.
    Subscriptions and groups continue where they were when the backup began.
    """

    async def work(mill: "Mill") -> "tuple[Manifest, list[RestoredStream]]":
        from millstream.backups.restoring import restore as restore_backup

        with _progress() as show:
            return await restore_backup(mill, folder, topic or (), show)

    made, streams = run(work, server)
    if json_:
        print_json({"folder": str(folder), "began": made.began, "streams": streams})
        return
    rows = [
        (one.stream, f"{one.messages:,}", one.last_offset, one.subscriptions, _verdict(one))
        for one in streams
    ]
    columns = ("stream", "#messages", "#last offset", "#subscriptions", "verified")
    print_table(f"Restored from the backup of {made.began}", columns, rows)


def _verdict(stream: "RestoredStream") -> str:
    parts = ("every message" if stream.compared else "counts only", stream.note)
    return ": ".join(filter(None, parts))


@contextmanager
def _progress() -> "Iterator[Progress]":
    """A progress bar on stderr if that is a terminal: the stream and the bytes that are done."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    quiet = not sys.stderr.isatty()
    with Bar(*columns, console=Console(stderr=True), transient=True, disable=quiet) as bar:
        task = bar.add_task("")

        def show(stream: str, done: int, total: int) -> None:
            bar.update(task, description=stream, completed=done, total=total)

        yield show
