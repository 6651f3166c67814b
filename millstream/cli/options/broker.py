"""The options of `up`, from the declared settings of a broker.

A setting comes from its option, else from its environment variable, else from the [broker] table of
millstream.toml. What is not given has the default of `BrokerSettings`.
"""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

from millstream.broker.config import (
    CLUSTER,
    AuthCallout,
    BrokerSettings,
    ClusterSettings,
    Encryption,
    LeafSettings,
    Limits,
    OperatorSettings,
    ServerTls,
)
from millstream.cli.options.groups import OptionGroup, declared_option
from millstream.declared import Declaration, Form, declared, declared_fields, default_text
from millstream.errors import ConfigError
from millstream.settings import (
    Secret,
    data_folder,
    environment,
    find_project_file,
    parse_duration,
    parse_size,
    project_table,
)

if TYPE_CHECKING:
    from millstream.broker import Account, User

__all__ = [
    "BROKER_OPTIONS",
    "TABLES",
    "BrokerOption",
    "BrokerValues",
    "LaunchOptions",
    "broker_settings",
    "encryption_of",
    "project_defaults",
    "settable_options",
    "subscription_pair",
]

# Fields of BrokerSettings that are settings classes themselves; "" is BrokerSettings.
_PARTS: Final[Mapping[str, Any]] = {
    "": BrokerSettings,
    "cluster": ClusterSettings,
    "encryption": Encryption,
    "tls": ServerTls,
    "limits": Limits,
    "leaf": LeafSettings,
    "operator": OperatorSettings,
    "callout": AuthCallout,
}


@dataclass(frozen=True, slots=True)
class BrokerOption:
    """One setting of a broker: where it is held, and its declaration."""

    part: str  # field of BrokerSettings that holds it; "" for BrokerSettings itself
    field: str
    declaration: Declaration
    default: Any  # of the field

    @property
    def name(self) -> str:
        """Of the option, with '-' for '_', and of the key in millstream.toml."""
        return self.declaration.name or self.field

    @property
    def default_text(self) -> str:
        """What holds when it is not given."""
        return default_text(self.declaration, self.default)


def _declared() -> Iterator[BrokerOption]:
    for part, cls in _PARTS.items():
        for item, declaration in declared_fields(cls):
            yield BrokerOption(part, item.name, declaration, item.default)


_ALL: Final = tuple(_declared())
BROKER_OPTIONS: Final = tuple(item for item in _ALL if item.declaration.form is not Form.TABLES)
# Parts of [broker] that are lists of tables and have no option of their own.
TABLES: Final = (
    "accounts",  # with limits; without, there is --account
    *(item.name for item in _ALL if item.declaration.form is Form.TABLES),
)


@dataclass(frozen=True, slots=True)
class LaunchOptions:
    """How `up` starts a broker: options that are not settings of the broker itself."""

    nodes: int = declared(
        1,
        Declaration(
            "Run a cluster of N nodes on this machine.",
            Form.NUMBER,
            CLUSTER,
            env="MILLSTREAM_NODES",
        ),
    )
    standby: bool = declared(
        False,
        Declaration("Wait while another broker owns the data folder, then take over.", Form.SWITCH),
    )
    timeout: str = declared(
        "30s", Declaration("How long to wait until the broker is ready.", Form.DURATION)
    )
    foreground: bool = declared(
        False,
        Declaration(
            "Stay in the foreground until stopped.", Form.SWITCH, flags=("--foreground", "-f")
        ),
    )
    set_aside: tuple[str, ...] = declared(
        (),
        Declaration(
            "Start without a stream whose files are damaged, and keep them in the folder set-aside "
            "of the data folder; repeat it for more.",
            Form.TEXTS,
            metavar="[ACCOUNT/]STREAM",
        ),
    )


_THIS_CALL_ONLY: Final = frozenset({"foreground", "set_aside"})  # cannot be set in millstream.toml


# -- options ------------------------------------------------------------------------------


def _options() -> Sequence[inspect.Parameter]:
    return [_option(item) for item in BROKER_OPTIONS]


def _option(item: BrokerOption) -> inspect.Parameter:
    declaration = item.declaration
    text = declaration.help
    if _env_is_the_secret(declaration):
        text += f" (env: {declaration.env}, the secret itself)"
        declaration = replace(declaration, env="")
    if item.default_text:
        text += f" (default: {item.default_text})"
    return declared_option(item.name, replace(declaration, help=text))


def _env_is_the_secret(declaration: Declaration) -> bool:
    """Whether the variable holds a secret and not, as the option does, the path of its file."""
    return bool(declaration.env) and declaration.form in (Form.SECRET, Form.FILE)


BrokerValues = Annotated[dict[str, Any], OptionGroup(_options, dict)]


# -- millstream.toml ----------------------------------------------------------------------


def settable_options() -> dict[str, bool]:
    """Keys of [broker] that set an option of `up`, and whether each is a path."""
    launch = [
        item.name for item, _ in declared_fields(LaunchOptions) if item.name not in _THIS_CALL_ONLY
    ]
    paths = (Form.FILE, Form.FILES, Form.SECRET)
    return {
        **{item.name: item.declaration.form in paths for item in BROKER_OPTIONS},
        **dict.fromkeys(launch, False),
    }


def project_defaults() -> dict[str, Any]:
    """The options of `up` that the project file sets.

    Paths in the file are relative to the file. An unknown key is refused: a misspelt setting that
    silently does nothing is how a broker ends up without its password.
    """
    project = find_project_file()
    if project is None:
        return {}
    options = settable_options()
    table = dict(project_table("broker", project))
    unknown = sorted(set(table) - set(options) - {"data", *TABLES})
    if unknown:
        known = ", ".join(sorted(["data", *options, *TABLES]))
        raise ConfigError(f"{project}: [broker] has no setting '{unknown[0]}'. It has: {known}")
    return {
        name: _beside(project, value) if options[name] else value
        for name, value in table.items()
        if name in options  # `data` is read by data_folder(), for every command
    }


def _beside(project: Path, value: Any) -> str | list[str]:
    """A path in the project file, or a list of them, relative to the file."""
    if isinstance(value, list):
        return [str(project.parent / str(one)) for one in value]
    return str(project.parent / str(value))


# -- from options to settings -------------------------------------------------------------


def broker_settings(data: Path | None, given: Mapping[str, Any]) -> BrokerSettings:
    """The settings of a broker from the options that were given; the others are None."""
    parts: dict[str, dict[str, Any]] = {part: {} for part in _PARTS}
    for item in BROKER_OPTIONS:
        value = given.get(item.name)
        value = item.declaration.default if value is None else value
        if value is not None:
            parts[item.part][item.field] = _value(item, value)
    own = parts[""]
    tls = _tls(parts["tls"])
    own["encryption"] = encryption_of(own.pop("encryption", False), **parts["encryption"])
    own["accounts"] = _accounts(own.pop("accounts", ()))
    own["raw"] = _read_config(own.pop("raw", None))
    return BrokerSettings(
        data=data_folder(data),
        users=_users(),
        limits=Limits(**parts["limits"]),
        tls=tls,
        cluster=_cluster(parts["cluster"], own.get("host"), tls),
        leaf=_leaf(parts["leaf"]),
        operator=_operator(parts["operator"]),
        callout=_callout(parts["callout"]),
        **own,
    )


def _value(item: BrokerOption, value: Any) -> Any:
    match item.declaration.form:
        case Form.SIZE:
            return parse_size(value)
        case Form.DURATION:
            return parse_duration(value)
        case Form.TEXTS | Form.FILES:
            return tuple(value)
    return value


def _secret(file: Path) -> Secret:
    try:
        text = file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the secret in {file}: {error}") from error
    if not text:
        raise ConfigError(f"the file {file} is empty; it should contain a secret")
    return Secret(text)


def _secret_variable(cls: Any, field: str) -> Secret | None:
    """A secret from the environment variable that is declared for it."""
    variable = next(d.env for item, d in declared_fields(cls) if item.name == field)
    text = environment(variable)
    return None if text is None else Secret(text)


def encryption_of(
    encrypt: bool = False, key_file: Path | None = None, previous: Path | None = None
) -> Encryption | None:
    """Encryption at rest if it was asked for in any way, None otherwise."""
    key = None if key_file is not None else _secret_variable(Encryption, "key_file")
    if not encrypt and key_file is None and key is None:
        if previous is not None:
            raise ConfigError("--previous-key-file needs the new key: --encrypt or --key-file FILE")
        return None
    old_key = None if previous is None else _secret(previous)
    return Encryption(key=key, key_file=key_file, previous=old_key)


def _tls(given: dict[str, Any]) -> ServerTls | None:
    """TLS of the client listener, or None without a certificate."""
    if not any(given.values()):
        return None
    if "cert" not in given or "key" not in given:
        raise ConfigError("TLS needs both --tls-cert FILE and --tls-key FILE")
    return ServerTls(**given)


def _operator(given: dict[str, Any]) -> OperatorSettings | None:
    """Operator mode, or None without its JWT."""
    if not given:
        return None
    if len(given) < len(fields(OperatorSettings)):
        raise ConfigError("operator mode needs --operator-jwt, --account-jwts and --system-creds")
    return OperatorSettings(**given)


def _callout(given: dict[str, Any]) -> AuthCallout | None:
    """Auth callout, or None without an issuer."""
    if given and len(given) < len(fields(AuthCallout)):
        raise ConfigError("auth callout needs --callout-issuer KEY and --callout-account NAME")
    return AuthCallout(**given) if given else None


def _cluster(
    given: dict[str, Any], host: str | None, tls: ServerTls | None
) -> ClusterSettings | None:
    """This node in a cluster over several machines, or None without --join."""
    if not given.get("routes"):
        if "node" in given or "secret" in given or given.get("tls"):
            raise ConfigError(
                "--node-name, --cluster-secret-file and --cluster-tls need --join HOST:PORT"
            )
        return None
    if given.get("tls") and tls is None:
        raise ConfigError(
            "--cluster-tls needs --tls-cert FILE and --tls-key FILE: "
            "without them the nodes would send every event unencrypted"
        )
    if "node" not in given:
        raise ConfigError(
            "--join needs --node-name NAME: unique in the cluster and the same at every start"
        )
    if "secret" in given:
        secret: Secret | None = _secret(given["secret"])
    else:
        secret = _secret_variable(ClusterSettings, "secret")
    if secret is None:
        raise ConfigError(
            "--join needs a secret that all nodes share: write 16 or more random characters into "
            "a file, copy it to every machine and give --cluster-secret-file FILE, "
            "or set MILLSTREAM_CLUSTER_SECRET"
        )
    defaults = {} if host is None else {"host": host}
    own = {"secret": secret, "tls": tls if given.get("tls") else None}
    return ClusterSettings(**{**defaults, **given, **own})


def _leaf(given: dict[str, Any]) -> LeafSettings | None:
    """Leaf nodes: the listener of the options and the hubs of [[broker.leaf_remotes]]."""
    from millstream.broker import LeafRemote

    remotes = []
    for entry in _tables("leaf_remotes", {"url", "user", "password_file", "account"}):
        password = entry.pop("password_file", None)
        secret = _secret(_beside_project(password)) if password is not None else None
        remotes.append(LeafRemote(**{**entry, "password": secret}))
    if "port" not in given and not remotes:
        return None
    return LeafSettings(**given, remotes=tuple(remotes))


def _accounts(names: Sequence[str]) -> "tuple[Account, ...]":
    """Tenants: those of the options and those of [[broker.accounts]]."""
    from millstream.broker import Account

    allowed = {"name", "max_file", "max_memory", "max_streams", "max_consumers"}
    listed = []
    for entry in _tables("accounts", allowed):
        for key in ("max_file", "max_memory"):
            if key in entry:
                entry[key] = parse_size(entry[key])
        listed.append(Account(**entry))
    known = {account.name for account in listed}
    return (*listed, *(Account(name) for name in names if name not in known))


def _users() -> "tuple[User, ...]":
    """The users of [[broker.users]]; their passwords are in files, never in millstream.toml."""
    from millstream.broker import User

    users = []
    allowed = {"name", "role", "account", "password_file", "nkey", "topics", "subscriptions"}
    for entry in _tables("users", allowed):
        file = entry.pop("password_file", None)
        if file is None and "nkey" not in entry:
            raise ConfigError(
                f"[[broker.users]] '{entry.get('name')}' needs a password_file or an nkey"
            )
        password = None if file is None else _secret(_beside_project(file))
        topics = tuple(_texts(entry, "topics"))
        pairs = tuple(subscription_pair(text) for text in _texts(entry, "subscriptions"))
        own = {"password": password, "topics": topics, "subscriptions": pairs}
        users.append(User(**{**entry, **own}))
    return tuple(users)


def _texts(entry: dict[str, Any], key: str) -> list[str]:
    """A list of texts in an entry of [[broker.users]]."""
    value = entry.get(key, [])
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
        raise ConfigError(f"[[broker.users]] '{entry.get('name')}': {key} is a list of texts")
    return value


def subscription_pair(text: str) -> tuple[str, str]:
    """A subscription that a user is given, from `topic/name`."""
    topic, slash, name = text.partition("/")
    if not slash:
        raise ConfigError(f"write a subscription as topic/name, not {text!r}")
    return topic, name


def _read_config(file: Path | None) -> str:
    if file is None:
        return ""
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the server configuration {file}: {error}") from error


def _beside_project(file: str) -> Path:
    project = find_project_file()
    return (project.parent if project else Path()) / file


def _tables(name: str, allowed: set[str]) -> list[dict[str, Any]]:
    """The entries of [[broker.<name>]], each with a known set of keys."""
    entries = project_table("broker").get(name, [])
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise ConfigError(f"millstream.toml: write each entry of {name} as [[broker.{name}]]")
    first = "url" if name == "leaf_remotes" else "name"
    for entry in entries:
        unknown = sorted(set(entry) - allowed)
        if unknown:
            raise ConfigError(
                f"millstream.toml: [[broker.{name}]] has no setting '{unknown[0]}'. "
                f"It has: {', '.join(sorted(allowed))}"
            )
        if not isinstance(entry.get(first), str):
            raise ConfigError(f"millstream.toml: every [[broker.{name}]] needs a {first}")
    return [dict(entry) for entry in entries]
