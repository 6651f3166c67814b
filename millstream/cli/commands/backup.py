"""`millstream backup` and `millstream restore`: copies of topics or of the whole broker."""

import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from millstream.cli.output import JsonOption, print_json, print_table, say, size
from millstream.cli.session import ServerOption, local_accounts, run
from millstream.errors import ConfigError
from millstream.settings import data_folder, find_project_file

if TYPE_CHECKING:
    from collections.abc import Iterator

    from millstream.backups.broker import BrokerManifest
    from millstream.backups.manifest import Manifest, Progress
    from millstream.backups.restoring import RestoredStream
    from millstream.mill import Mill
    from millstream.settings import ConnectionSettings

__all__ = ["app"]

app = typer.Typer()

TopicsOption = Annotated[
    list[str] | None,
    typer.Option("--topic", "-t", metavar="TOPIC", help="Only this topic; may be repeated."),
]


AccountOption = Annotated[
    str | None,
    typer.Option(
        "--account",
        metavar="NAME",
        help="Only this account of the broker in this folder. (default: all, with --topic main)",
    ),
]


@app.command()
def backup(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A new or empty folder.")],
    topic: TopicsOption = None,
    account: AccountOption = None,
    server: ServerOption = None,
    json_: JsonOption = False,
) -> None:
    """Back up topics, or the whole broker, while it is used.

    Where 'millstream up' started the broker: all its accounts, and the files of its users. Through
    --server: the account of your user. A topic comes with its subscriptions, dead letters, groups
    and schemas. The folder appears when the backup is complete. Not in it: the encryption key, TLS
    files, and checkpoints of Spark queries.
    """
    if not topic and (accounts := local_accounts(server, [account] if account else None)):
        _back_up_broker(folder, accounts, limited=account is not None, json_=json_)
        return

    async def work(mill: "Mill") -> "Manifest":
        from millstream.backups.taking import back_up

        with _progress() as show:
            return await back_up(mill, folder, topic or (), show)

    made = run(work, server, account)
    if json_:
        covers = "account" if made.whole else "topics"
        print_json({"folder": str(folder), "covers": covers, **_facts(made)})
        return
    _say_account(made, folder)
    if made.whole:
        say(
            f"Only account '{made.account}', that of your user, is in it: no other account, and no "
            f"users. Run it where 'millstream up' started the broker to back up all of it."
        )


def _back_up_broker(
    folder: Path, accounts: "dict[str, ConnectionSettings]", limited: bool, json_: bool
) -> None:
    import asyncio

    from millstream import broker
    from millstream.backups.broker import FILES, back_up_broker

    data = data_folder()
    project = find_project_file()
    files = [] if limited else [*broker.user_files(data), *([project] if project else [])]
    with _progress() as show:
        made = asyncio.run(back_up_broker(accounts, files, folder, show))
    key = data / broker.KEY_FILE
    copied = sorted(file.name for file in (folder / FILES).iterdir())
    if json_:
        print_json(
            {
                "folder": str(folder),
                "covers": "account" if limited else "broker",
                "accounts": [_facts(one) for one in made.values()],
                "files": copied,
                "encryption_key": str(key) if key.exists() else None,
            }
        )
        return
    for one in made.values():
        _say_account(one, folder)
    if copied:
        say(f"Files of the broker, with passwords, are in {folder / FILES}: {', '.join(copied)}")
    if key.exists():
        say(f"Not in it: the encryption key {key}. Keep a copy of it apart from backups.")


def _facts(made: "Manifest") -> "dict[str, Any]":
    return {
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


def _say_account(made: "Manifest", folder: Path) -> None:
    say(
        f"Backed up {len(made.streams):,} stream(s) of account '{made.account}' with "
        f"{made.messages:,} messages to {folder} ({size(made.bytes)})"
    )


@app.command()
def restore(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="The folder of a backup.")],
    topic: TopicsOption = None,
    account: AccountOption = None,
    server: ServerOption = None,
    json_: JsonOption = False,
) -> None:
    """Restore a backup, or topics of it, and verify every message.

    The backup is checked before anything is created. Nothing is ever replaced: if a stream of the
    same name exists, nothing is restored. If it fails later, what was created is removed.
    Subscriptions and groups continue where they were when the backup began. Users come back with
    their files, before the broker starts.
    """
    from millstream.backups.broker import account_folder, is_of_a_broker, read_broker

    if is_of_a_broker(folder):
        manifest = read_broker(folder)
        if account is not None and account not in manifest.accounts:
            raise ConfigError(
                f"{folder} has no account '{account}'; it has {', '.join(manifest.accounts)}"
            )
        chosen = [account] if account else list(manifest.accounts)
        local = bool(local_accounts(server))
        if local and not topic:
            _restore_broker(folder, manifest, local_accounts(server, chosen), json_)
            return
        if len(chosen) > 1:
            raise ConfigError(
                f"{folder} has the accounts {', '.join(chosen)}: choose one with --account. All "
                f"are restored where 'millstream up' started the broker, without --topic"
            )
        folder = account_folder(folder, chosen[0])
        account = chosen[0] if local else None  # else the user decides where it goes

    async def work(mill: "Mill") -> "tuple[Manifest, list[RestoredStream]]":
        from millstream.backups.restoring import restore as restore_backup

        with _progress() as show:
            return await restore_backup(mill, folder, topic or (), show)

    made, streams = run(work, server, account)
    if json_:
        print_json({"folder": str(folder), "began": made.began, "streams": streams})
        return
    _show_restored(f"Restored from the backup of {made.began}", streams)


def _restore_broker(
    folder: Path,
    manifest: "BrokerManifest",
    accounts: "dict[str, ConnectionSettings]",
    json_: bool,
) -> None:
    import asyncio

    from millstream.backups.broker import FILES, restore_broker

    with _progress() as show:
        restored = asyncio.run(restore_broker(accounts, folder, show))
    if json_:
        found = [{"account": name, "streams": streams} for name, streams in restored.items()]
        print_json({"folder": str(folder), "began": manifest.began, "accounts": found})
        return
    for name, streams in restored.items():
        _show_restored(f"Account '{name}', restored from the backup of {manifest.began}", streams)
    if manifest.files:
        say(
            f"Users are not changed by a restore. To have those of the backup: 'millstream down', "
            f"copy users.json (if it is there) and credentials.json from {folder / FILES} to "
            f"{data_folder()}, and start the broker as before."
        )


def _show_restored(title: str, streams: "list[RestoredStream]") -> None:
    rows = [
        (one.stream, f"{one.messages:,}", one.last_offset, one.subscriptions, _verdict(one))
        for one in streams
    ]
    columns = ("stream", "#messages", "#last offset", "#subscriptions", "verified")
    print_table(title, columns, rows)


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
