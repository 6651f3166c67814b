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
from millstream.settings import context_path, data_folder

__all__ = ["app", "connection_facts", "exports"]

app = typer.Typer()

# Starts the description of every context that this command wrote, so that it may replace it.
MARK = "millstream broker"

AccountOption = Annotated[
    str | None, typer.Option(help="Account of that user. (default: the main account)")
]
CaOption = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="File with the authorities to trust, if the broker uses TLS. "
        "(default: --tls-ca if it signed the broker's certificate, else that certificate)",
    ),
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

    NATS_URL, with users NATS_USER and NATS_PASSWORD, and with TLS what a client on this machine
    needs: NATS_CA, NATS_CERT and NATS_KEY, NATS_TLS_FIRST. The password is printed.
    """
    variables = exports(connection_facts(data_folder(data), role, account, ca))
    if json_:
        print_json(variables)
        return
    for name, value in variables.items():
        say(f"export {name}={shlex.quote(value)}")


@dataclass(frozen=True, slots=True)
class _File:
    """What the written context does."""

    tls_first: Annotated[
        bool | None,
        typer.Option(
            help="Start TLS before the server's greeting. (default: as the broker was started)"
        ),
    ] = None
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
    facts = connection_facts(data_folder(data), role, account, ca)
    file = context_path(name)
    if file.exists() and not options.force and not _is_ours(file):
        raise ConfigError(
            f"the context '{name}' in {file} was not written by millstream. "
            f"Choose another name, or replace it with --force"
        )
    content = {
        "description": f"{MARK} in {facts['data']}",
        "url": facts["url"],
        **{name: facts.get(name, "") for name in ("user", "password", "ca", "cert", "key")},
        "tls_first": "tls_first" in facts if options.tls_first is None else options.tls_first,
    }
    write_private(file, json.dumps(content, indent=2) + "\n")
    if options.select:
        _select(file.parents[1], name)
    if json_:
        print_json({"name": name, "file": file, "selected": options.select})
    else:
        use = "it is selected" if options.select else f"use it with 'nats --context {name}'"
        say(f"Wrote the context '{name}' to {file}; {use}.")


def connection_facts(
    folder: Path, role: str, account: str | None, ca: Path | None
) -> dict[str, str]:
    """Address, data folder; user and password if there are users, and files if it uses TLS."""
    from millstream import broker

    state = broker.read_state(folder)
    facts = {"url": state.url, "data": str(state.data)}
    if ca is not None:
        facts["ca"] = str(ca.resolve())
    if (tls := state.client_tls) is not None:
        facts["url"] = _certified(state.url, state.tls_names)
        files = {"ca": facts.get("ca") or state.tls_trusted, "cert": tls.cert, "key": tls.key}
        facts |= {name: file for name, file in files.items() if file is not None}
        facts |= {"tls_first": "true"} if tls.handshake_first else {}
    if state.secured or account is not None:
        if role not in set(broker.Role):
            raise ConfigError(f"--role is one of {', '.join(broker.Role)}, not {role!r}")
        found = broker.read_credentials(folder, role, account or broker.DEFAULT_ACCOUNT)
        facts |= {"user": found.user, "password": found.password.reveal()}
    return facts


def _certified(url: str, names: tuple[str, ...]) -> str:
    """The address with a host that the broker's certificate is for, if this machine has one.

    Our own commands accept the certificate under any name; clients that only know its file do not.
    """
    host = url.rpartition("://")[2].split(",")[0].rpartition(":")[0].strip("[]")
    if host in names:
        return url
    if "localhost" in names:
        return re.sub(r"//(\[[^]]*]|[^:,]*):", "//localhost:", url)
    listed = f"for {', '.join(names)}, not" if names else "not"
    typer.echo(
        f"The broker's certificate is {listed} for {host}: other clients must connect to a name in "
        f"it. Commands in this folder need none",
        err=True,
    )
    return url


def exports(facts: dict[str, str]) -> dict[str, str]:
    """The environment variables that the `nats` tool and our own `connect()` read."""
    names = ("url", "user", "password", "ca", "cert", "key", "tls_first")
    return {f"NATS_{name.upper()}": facts[name] for name in names if name in facts}


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
