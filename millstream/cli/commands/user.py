"""`millstream user`: the users of a data folder."""

import os
import secrets
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from millstream.cli.options.groups import grouped
from millstream.cli.output import DataOption, JsonOption, print_json, print_table, say
from millstream.cli.session import YesOption, confirm
from millstream.errors import ConfigError, NotRunning
from millstream.settings import Secret, data_folder

if TYPE_CHECKING:
    from millstream.broker import User

__all__ = ["app"]

app = typer.Typer(help="Add, list and remove users of a data folder.", no_args_is_help=True)

NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="Name of the user.")]
_PASSWORD_BYTES = 24  # 192 bits


@dataclass(frozen=True, slots=True)
class _Rights:
    """What the user may do."""

    role: Annotated[str, typer.Option(help="admin, app, reader or trusted.")] = "app"
    account: Annotated[
        str | None, typer.Option(help="Account of the user. (default: the main account)")
    ] = None
    topic: Annotated[
        list[str] | None,
        typer.Option(
            help="Bound an app to this topic; NAME:N if it has N partitions. Repeat it for more."
        ),
    ] = None
    subscription: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TOPIC/NAME",
            help="Existing subscription that a bounded user may pull from; repeat it for more.",
        ),
    ] = None


@app.command()
@grouped
def add(
    rights: _Rights,
    name: NameArgument,
    nkey: Annotated[
        str | None, typer.Option(help="Public key (U...) of the user, instead of a new one.")
    ] = None,
    password: Annotated[
        bool, typer.Option("--password", help="Log in with a generated password, not a key.")
    ] = False,
    *,
    data: DataOption = None,
    json_: JsonOption = False,
) -> None:
    """Add a user; a running broker accepts it at once.

    It logs in with a key of its own. `millstream user creds` hands out what it logs in with.
    """
    from millstream import broker
    from millstream.broker.checks import read_choice
    from millstream.broker.jwt import new_key
    from millstream.cli.options.broker import subscription_pair

    if nkey is not None and password:
        raise ConfigError("give --nkey or --password, not both")
    secret: Secret | None = None
    if password:
        secret = Secret(secrets.token_urlsafe(_PASSWORD_BYTES))
    elif nkey is None:
        key = new_key("user")
        nkey, secret = key.public, key.seed
    user = broker.User(
        name=name,
        password=secret if password else None,
        role=read_choice(broker.Role, rights.role, "--role"),
        account=rights.account or broker.DEFAULT_ACCOUNT,
        topics=tuple(rights.topic or ()),
        subscriptions=tuple(subscription_pair(text) for text in rights.subscription or ()),
        nkey=nkey,
    )
    folder = data_folder(data)
    broker.add_user(folder, user, secret)
    if json_:
        print_json(next(one for one in broker.list_users(folder) if one.name == name))
        return
    say(f"Added {name}, a user of the role {user.role} in the account {user.account}.")
    if secret is not None:
        say(f"Get what it logs in with: millstream user creds {name} --output FILE")
    if _joined(folder):
        say(_for_other_nodes(user))


def _joined(folder: Path) -> bool:
    from millstream import broker

    try:
        return broker.read_state(folder).joined
    except NotRunning:
        return False


def _for_other_nodes(user: "User") -> str:
    """How the other machines of the cluster get to know the user."""
    if user.nkey is None:
        return (
            "Only this node knows its password. A user of the whole cluster has a key: remove it "
            "and add it without --password."
        )
    options = ["--role", user.role, "--account", user.account, "--nkey", user.nkey]
    for topic in user.topics:
        options += ["--topic", topic]
    for topic, subscription in user.subscriptions:
        options += ["--subscription", f"{topic}/{subscription}"]
    words = shlex.join(["millstream", "user", "add", user.name, *options])
    return f"Only this node knows it so far. Run on every other node of the cluster:\n  {words}"


@app.command("ls")
def list_(
    data: DataOption = None,
    account: Annotated[str | None, typer.Option(help="Only users of this account.")] = None,
    json_: JsonOption = False,
) -> None:
    """List the users of the broker; no secrets."""
    from millstream import broker

    users = [
        user
        for user in broker.list_users(data_folder(data))
        if account is None or user.account == account
    ]
    if json_:
        print_json(users)
        return
    print_table(
        "Users",
        ["user", "role", "account", "logs in with", "topics", "added"],
        [
            (
                user.name,
                user.role,
                user.account,
                user.login,
                " ".join(user.topics) or None,
                "yes" if user.added else None,
            )
            for user in users
        ],
    )


@app.command()
def rm(
    name: NameArgument, yes: YesOption = False, data: DataOption = None, json_: JsonOption = False
) -> None:
    """Remove a user that was added; its clients are disconnected."""
    from millstream import broker

    confirm(f"Remove the user '{name}' and disconnect its clients?", yes)
    broker.remove_user(data_folder(data), name)
    if json_:
        print_json({"removed": name})
    else:
        say(f"Removed {name}.")


@app.command()
def creds(
    name: NameArgument,
    output: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write it to this file, not to stdout.")
    ] = None,
    signing_key: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Operator mode: sign a new user with the account's seed in this file.",
        ),
    ] = None,
    role: Annotated[
        str, typer.Option(help="Role of a user that is signed: admin, app or trusted.")
    ] = "app",
    *,
    data: DataOption = None,
    json_: JsonOption = False,
) -> None:
    """Print what a user logs in with: the seed of its key (`nats --nkey FILE`) or its password.

    With --signing-key a new user is signed and its creds file printed (`nats --creds FILE`).
    """
    from millstream import broker

    if signing_key is not None:
        secret = _signed(name, signing_key, role)
    else:
        secret = broker.user_secret(data_folder(data), name).reveal()
    if output is None:
        if json_:
            print_json({"name": name, "secret": secret})
        else:
            say(secret)
        return
    try:
        file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as error:
        raise ConfigError(f"cannot write {output}: {error}") from error
    with os.fdopen(file, "w") as stream:
        stream.write(secret + "\n")
    if json_:
        print_json({"name": name, "file": output})
    else:
        say(f"Wrote it to {output}, readable by you only.")


def _signed(name: str, signing_key: Path, role: str) -> str:
    """The creds file of a new user of the account whose seed is in the file."""
    from millstream import broker
    from millstream.broker.checks import read_choice
    from millstream.broker.roles import boundary_of, permissions_of

    try:
        account = broker.read_key(Secret(signing_key.read_text(encoding="ascii").strip()))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the signing key in {signing_key}: {error}") from error
    if not account.public.startswith("A"):
        raise ConfigError(
            f"{signing_key} is not the seed of an account (SA...): servers accept only users that "
            f"their account has signed"
        )
    key = broker.new_key("user")
    user = broker.User(name, role=read_choice(broker.Role, role, "--role"), nkey=key.public)
    if boundary_of(user) is not None:
        raise ConfigError(
            f"a {role} needs an account of its own: in operator mode define one whose JWT imports "
            f"what it may call"
        )
    denied = permissions_of(user).publish_deny
    claims = broker.user_claims(key.public, name, publish_deny=denied)
    return broker.creds_text(broker.sign(claims, account), key.seed).rstrip("\n")
