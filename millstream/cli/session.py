"""One connection for one command, closed even when Ctrl-C ends it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Coroutine, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeVar

import typer
from typer.core import TyperOption

from millstream.errors import ConfigError, MillstreamError, NotRunning
from millstream.settings import (
    DEFAULT_URL,
    ConnectionSettings,
    data_folder,
    names_a_broker,
    project_url,
    read_project_file,
)

if TYPE_CHECKING:
    from millstream.broker import State
    from millstream.mill import Mill

__all__ = [
    "ServerOption",
    "YesOption",
    "add_context_option",
    "chosen_context",
    "confirm",
    "connection_settings",
    "local_accounts",
    "local_folder",
    "run",
]

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


_context: Final[ContextVar[str | None]] = ContextVar("context", default=None)


def add_context_option(command: Any) -> None:
    """Give `--context` to a command with `--server`, and to those of a group of commands.

    The two belong together, so no command has to declare or pass on the second one.
    """
    for one in getattr(command, "commands", {}).values():
        add_context_option(one)
    at = next((i for i, one in enumerate(command.params) if "--server" in one.opts), None)
    if at is not None:
        command.params.insert(
            at + 1,
            TyperOption(
                param_decls=["--context"],
                metavar="NAME",
                help="Context of the nats tool to connect with. (env: NATS_CONTEXT)",
                expose_value=False,
                callback=_keep_context,
            ),
        )


def _keep_context(_ctx: typer.Context, _option: Any, name: str | None) -> None:
    _context.set(name)


def chosen_context() -> str | None:
    """The context that --context of the running command names."""
    return _context.get()


def run(
    work: Callable[[Mill], Coroutine[Any, Any, T]],
    server: str | None = None,
    account: str | None = None,
) -> T:
    """Connect, do the work and close; Ctrl-C cancels the work, closes and is exit code 130.

    With an account it is done as the admin of that account of the broker in this folder.
    """
    import asyncio

    from millstream.mill import connect

    if account is None:
        settings = connection_settings(server)
    else:
        settings = _known(local_accounts(server), account)

    async def session() -> T:
        async with connect(settings=settings) as mill:
            return await work(mill)

    return asyncio.run(session())


def _known(accounts: dict[str, ConnectionSettings], account: str) -> ConnectionSettings:
    if not accounts:
        raise ConfigError(
            "--account is for a broker that 'millstream up' started in this folder; elsewhere the "
            "user decides: --server nats://USER:PASSWORD@HOST"
        )
    if account not in accounts:
        raise ConfigError(
            f"this broker has no account '{account}'; it has {', '.join(accounts)}. Start it with "
            f"'millstream up --auth --account {account}' first"
        )
    return accounts[account]


def local_accounts(
    server: str | None, only: Sequence[str] | None = None
) -> dict[str, ConnectionSettings]:
    """How to connect as the admin of each account, if the broker runs in this folder; else none.

    With `only` it is these accounts, and all of them must exist.
    """
    from dataclasses import replace

    from millstream import broker

    state = _local_state(server, ConnectionSettings.load(server, context=chosen_context()))
    found: dict[str, ConnectionSettings] = {}
    if state is not None:
        settings = connection_settings(server)
        for name in broker.account_names(state.data):
            if name == broker.DEFAULT_ACCOUNT and not state.secured:
                found[name] = settings  # it is open
                continue
            admin = broker.read_credentials(state.data, broker.Role.ADMIN, name)
            found[name] = replace(settings, user=admin.user, password=admin.password)
    return found if only is None else {name: _known(found, name) for name in only}


def local_folder(server: str | None) -> Path | None:
    """The data folder of the broker, if it runs in this folder and nothing names another one."""
    state = _local_state(server, ConnectionSettings.load(server, context=chosen_context()))
    return None if state is None else state.data


def connection_settings(server: str | None) -> ConnectionSettings:
    """The address to connect to, and the user.

    If 'millstream up' started the broker on this data folder, with users, commands run as its
    admin: anyone who can run them here can also read its passwords.
    """
    context = chosen_context()
    settings = ConnectionSettings.load(server, context=context, name="millstream command line")
    if not names_a_broker(server, context) and project_url() is None:
        typer.echo(
            f"This folder has no broker; using {DEFAULT_URL}. "
            f"Choose another with --server, or start one with 'millstream up'",
            err=True,
        )
        return settings
    state = _local_state(server, settings)
    if state is None or not state.secured:
        return settings
    from dataclasses import replace

    from millstream import broker

    try:
        admin = broker.read_credentials(data_folder(), broker.Role.ADMIN)
    except MillstreamError:
        return settings  # connecting will report what is wrong
    return replace(settings, user=admin.user, password=admin.password)


def _local_state(server: str | None, settings: ConnectionSettings) -> State | None:
    """The broker of this folder, if nothing names another one or a user."""
    if names_a_broker(server, chosen_context()) or project_url() is None:
        return None
    from millstream import broker

    try:
        state = broker.read_state(data_folder())
    except NotRunning:
        if "url" in read_project_file():
            return None  # a broker that runs elsewhere
        raise  # the address is left from a broker that died; another may have its port now
    chosen = (settings.user, settings.token, settings.nkey_seed, settings.creds)
    if any(chosen) or state.url != ",".join(settings.urls):
        return None
    return state


def confirm(question: str, yes: bool) -> None:
    """Continue only if the user agrees; without a terminal `--yes` is required."""
    if yes:
        return
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise ConfigError(f"{question} There is no terminal to ask on: confirm with --yes")
    typer.confirm(question, abort=True)
