"""One connection for one command, closed even when Ctrl-C ends it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from millstream.errors import ConfigError, MillstreamError
from millstream.settings import STATE_FILE, ConnectionSettings, data_folder, environment

if TYPE_CHECKING:
    from millstream.mill import Mill

__all__ = ["ServerOption", "YesOption", "confirm", "connection_settings", "run"]

T = TypeVar("T")

ServerOption = Annotated[
    str | None,
    typer.Option(
        "--server",
        "-s",
        metavar="URL",
        help="Address of the broker. (env: NATS_URL) (default: the one 'millstream up' started)",
    ),
]
YesOption = Annotated[
    bool,
    typer.Option("--yes", "-y", help="Do not ask for confirmation; required without a terminal."),
]


def run(work: Callable[[Mill], Coroutine[Any, Any, T]], server: str | None = None) -> T:
    """Connect, do the work and close; Ctrl-C cancels the work, closes and is exit code 130."""
    import asyncio

    from millstream.mill import connect

    settings = connection_settings(server)

    async def session() -> T:
        async with connect(settings=settings) as mill:
            return await work(mill)

    return asyncio.run(session())


def connection_settings(server: str | None) -> ConnectionSettings:
    """The address to connect to, and the user.

    If 'millstream up' started the broker on this data folder, with users, commands run as its
    admin: anyone who can run them here can also read its passwords.
    """
    settings = ConnectionSettings.load(server, name="millstream command line")
    chosen = (settings.user, settings.token, settings.nkey_seed, settings.creds)
    if server or environment("NATS_URL") or any(chosen):
        return settings
    if not (data_folder() / STATE_FILE).exists():
        return settings
    from dataclasses import replace

    from millstream import broker

    try:
        state = broker.read_state(data_folder())
        if not state.secured or state.url != ",".join(settings.urls):
            return settings
        admin = broker.read_credentials(data_folder(), broker.Role.ADMIN)
    except MillstreamError:
        return settings  # connecting will report what is wrong
    return replace(settings, user=admin.user, password=admin.password)


def confirm(question: str, yes: bool) -> None:
    """Continue only if the user agrees; without a terminal `--yes` is required."""
    if yes:
        return
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise ConfigError(f"{question} There is no terminal to ask on: confirm with --yes")
    typer.confirm(question, abort=True)
