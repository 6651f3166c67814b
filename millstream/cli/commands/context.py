"""`millstream env` and `context`: connect other clients and the `nats` tool to the broker."""

import json
import os
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from millstream.cli.options.groups import grouped
from millstream.cli.output import DataOption, JsonOption, print_json, say
from millstream.errors import ConfigError
from millstream.settings import data_folder, environment

__all__ = ["app", "connection_facts", "context_file", "exports"]

app = typer.Typer()

# Starts the description of every context that this command wrote, so that it may replace it.
MARK = "millstream broker"

AccountOption = Annotated[
    str | None, typer.Option(help="Account of that user. (default: the main account)")
]
CaOption = Annotated[
    Path | None, typer.Option(help="File with the authorities to trust, if the broker uses TLS.")
]
RoleOption = Annotated[
    str, typer.Option(help="User to connect as, if the broker has users: admin, app or reader.")
]


@app.command()
def env(
    data: DataOption = None,
    role: RoleOption = "app",
    account: AccountOption = None,
    ca: CaOption = None,
    json_: JsonOption = False,
) -> None:
    """Print exports for other clients: eval "$(millstream env)".

    NATS_URL, and with users NATS_USER and NATS_PASSWORD. The password is printed.
    """
    variables = exports(connection_facts(data_folder(data), role, account), ca)
    if json_:
        print_json(variables)
        return
    for name, value in variables.items():
        say(f"export {name}={shlex.quote(value)}")


@dataclass(frozen=True, slots=True)
class _File:
    """What the written context does."""

    tls_first: Annotated[
        bool, typer.Option("--tls-first", help="The broker was started with --tls-first.")
    ] = False
    select: Annotated[bool, typer.Option(help="Select it in the nats tool.")] = True
    force: Annotated[
        bool, typer.Option("--force", help="Replace a context that millstream did not write.")
    ] = False


@app.command()
@grouped
def context(
    options: _File,
    name: Annotated[str, typer.Argument(help="Name of the context.")] = "millstream",
    data: DataOption = None,
    role: RoleOption = "admin",
    account: AccountOption = None,
    *,
    ca: CaOption = None,
    json_: JsonOption = False,
) -> None:
    """Write a context for the `nats` tool, so that `nats stream ls` just works."""
    if not re.fullmatch(r"[A-Za-z0-9_-]+", name):
        raise ConfigError(f"a context name has letters, digits, '-' and '_' only, not {name!r}")
    facts = connection_facts(data_folder(data), role, account)
    file = context_file(name)
    if file.exists() and not options.force and not _is_ours(file):
        raise ConfigError(
            f"the context '{name}' in {file} was not written by millstream. "
            f"Choose another name, or replace it with --force"
        )
    content = {
        "description": f"{MARK} in {facts['data']}",
        "url": facts["url"],
        "user": facts.get("user", ""),
        "password": facts.get("password", ""),
        "ca": str(ca.resolve()) if ca else "",
        "tls_first": options.tls_first,
    }
    write_private(file, json.dumps(content, indent=2) + "\n")
    if options.select:
        _select(file.parents[1], name)
    if json_:
        print_json({"name": name, "file": file, "selected": options.select})
    else:
        use = "it is selected" if options.select else f"use it with 'nats --context {name}'"
        say(f"Wrote the context '{name}' to {file}; {use}.")


def connection_facts(folder: Path, role: str, account: str | None) -> dict[str, str]:
    """Address, data folder and, when the broker or the tenant has users, user and password."""
    from millstream import broker

    state = broker.read_state(folder)
    facts = {"url": state.url, "data": str(state.data)}
    if state.secured or account is not None:
        if role not in set(broker.Role):
            raise ConfigError(f"--role is one of {', '.join(broker.Role)}, not {role!r}")
        found = broker.read_credentials(folder, role, account or broker.DEFAULT_ACCOUNT)
        facts |= {"user": found.user, "password": found.password.reveal()}
    return facts


def exports(facts: dict[str, str], ca: Path | None) -> dict[str, str]:
    """The environment variables that the `nats` tool and our own `connect()` read."""
    names = {"url": "NATS_URL", "user": "NATS_USER", "password": "NATS_PASSWORD"}
    variables = {variable: facts[fact] for fact, variable in names.items() if fact in facts}
    return variables | ({"NATS_CA": str(ca.resolve())} if ca else {})


def context_file(name: str) -> Path:
    """Where the `nats` tool looks for a context of that name."""
    base = environment("XDG_CONFIG_HOME")
    folder = Path(base) if base else Path.home() / ".config"
    return folder / "nats" / "context" / f"{name}.json"


def write_private(file: Path, text: str) -> None:
    """Replace a file in one step; only its owner can read it at any time."""
    file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    draft = file.with_name(f".{file.name}.{os.getpid()}")
    handle = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(handle, "w", encoding="utf-8") as stream:
        stream.write(text)
    draft.replace(file)


def _select(folder: Path, name: str) -> None:
    """Make it the selected context; `nats context previous` undoes it."""
    selected = folder / "context.txt"
    before = selected.read_text(encoding="utf-8").strip() if selected.exists() else ""
    if before and before != name:
        write_private(folder / "previous-context.txt", before)
    write_private(selected, name)


def _is_ours(file: Path) -> bool:
    try:
        content: Any = json.loads(file.read_text(encoding="utf-8"))
        return str(content["description"]).startswith(MARK)
    except (ValueError, KeyError, TypeError):
        return False
