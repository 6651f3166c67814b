"""Settings as small frozen values; the only module that reads the environment and millstream.toml.

A setting is taken from the first of these that has it: an argument or flag, the environment, the
nearest `millstream.toml`, the default. Environment variables have the names that the `nats` tool
uses (`NATS_URL`, `NATS_USER`, ...) where the meaning is the same; ours start with `MILLSTREAM_`.
`ConnectionSettings.load` says where the address of a broker comes from.
"""

from __future__ import annotations

import json
import math
import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

from millstream.errors import ConfigError, NotRunning
from millstream.nats_context import context_file, read_context
from millstream.nearest import check_known

__all__ = [
    "DATA_FOLDER",
    "DEFAULT_URL",
    "DURABILITY_METADATA",
    "LOST_METADATA",
    "PROJECT_FILE",
    "SCHEMAS_TOPIC",
    "STATE_FILE",
    "ConnectionSettings",
    "Reconnect",
    "Secret",
    "Tls",
    "cache_folder",
    "child_environment",
    "context_path",
    "data_folder",
    "environment",
    "export_environment",
    "find_project_file",
    "hide_password",
    "hold_seconds",
    "names_a_broker",
    "node_tag",
    "parse_duration",
    "parse_size",
    "project_broker",
    "project_table",
    "project_url",
    "read_project_file",
    "read_seconds",
]

DEFAULT_URL: Final = "nats://127.0.0.1:4222"
PROJECT_FILE: Final = "millstream.toml"
DATA_FOLDER: Final = ".millstream"
STATE_FILE: Final = "broker.json"
# The key in `server_metadata`, which any user can read, that says how durable an ack is.
DURABILITY_METADATA: Final = "millstream.durability"
# The tag of each node, followed by its name; topics are spread over the nodes by them.
_NODE_TAG: Final = "millstream-node:"
SCHEMAS_TOPIC: Final = "mill-schemas"  # the table that holds the schemas of an account's topics
LOST_METADATA: Final = "millstream.lost"  # of a stream: what the broker found to be lost in it

_LOGIN: Final = ("user", "password", "token", "nkey_seed", "creds")

_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ns|us|ms|s|m|h|d)", re.ASCII)
_DURATIONS = re.compile(f"(?:{_DURATION.pattern})+", re.ASCII)
_DURATION_SECONDS: Final = {
    "ns": 1e-9,
    "us": 1e-6,
    "ms": 1e-3,
    "s": 1.0,
    "m": 60.0,
    "h": 3600.0,
    "d": 86400.0,
}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]i?B?|B)?", re.IGNORECASE | re.ASCII)
_SIZE_MAX: Final = 2.0**63  # the server's integers are 64 bits wide
_SIZE_POWER: Final = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


class Secret:
    """A text that is never shown: str, repr and format give stars; `.reveal()` returns it."""

    __slots__ = ("_text",)

    def __init__(self, text: str) -> None:
        self._text = text

    def reveal(self) -> str:
        return self._text

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and other._text == self._text

    def __hash__(self) -> int:
        return hash(self._text)

    def __repr__(self) -> str:
        return "Secret('***')"

    def __str__(self) -> str:
        return "***"


def environment(name: str) -> str | None:
    """The value of an environment variable; empty counts as not set."""
    return os.environ.get(name) or None


def child_environment(**changes: str) -> dict[str, str]:
    """This process's environment with some variables changed, for a child process."""
    return {**os.environ, **changes}


def export_environment(**defaults: str) -> None:
    """Set environment variables that are not set yet, for libraries that read nothing else."""
    for name, value in defaults.items():
        os.environ.setdefault(name, value)


def cache_folder() -> Path:
    """The cache folder of this user: in `XDG_CACHE_HOME`, or in ~/.cache."""
    base = environment("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "millstream"


def node_tag(server: str) -> str:
    """The tag by which topics are placed on a node of a cluster, or kept off it."""
    return f"{_NODE_TAG}{server.lower()}"  # as the server keeps tags


def parse_duration(text: str | float) -> float:
    """Seconds from "1m30s", "250ms", "7d", or from a number, which is seconds.

    A text needs a unit, because `7` may be meant as days; only zero is the same in every unit.

    >>> parse_duration("1m30s"), parse_duration("250ms"), parse_duration(5), parse_duration("0")
    (90.0, 0.25, 5.0, 0.0)
    """
    if isinstance(text, int | float):
        if not 0 <= text < math.inf:
            raise ConfigError(f"not a duration: {text!r}. It needs zero seconds or more")
        return float(text)
    compact = text.strip().replace(" ", "")
    if re.fullmatch(r"[0-9]+(\.[0-9]+)?", compact):
        if float(compact) == 0:
            return 0.0
        advice = f"Write {compact:.20}s for seconds or {compact:.20}d for days"
        raise ConfigError(f"not a duration: {text!r:.60} has no unit. {advice}")
    # Match the complete text first: searching a long text for parts takes quadratic time.
    if not _DURATIONS.fullmatch(compact):
        advice = "Write it like 250ms, 10s, 1m30s, 12h or 7d"
        raise ConfigError(f"not a duration: {text!r:.60}. {advice}")
    parts = _DURATION.findall(compact)
    return parse_duration(sum(float(number) * _DURATION_SECONDS[unit] for number, unit in parts))


def read_seconds(name: str, value: str | float | timedelta) -> float:
    """The seconds of a duration that is the value of a setting: 30, "30s" or a timedelta."""
    try:
        return parse_duration(value.total_seconds() if isinstance(value, timedelta) else value)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from error
    except (TypeError, AttributeError, OverflowError) as error:
        raise ConfigError(
            f"{name}: {value!r} is not a duration. Write it like '10s', '12h' or '7d'"
        ) from error


def hold_seconds(settings: object, *names: str) -> None:
    """Convert fields of frozen settings, a duration or several, to seconds as they are held."""
    for name in names:
        value = getattr(settings, name)
        if isinstance(value, list | tuple):
            held: object = tuple(read_seconds(name, one) for one in value)
        else:
            held = None if value is None else read_seconds(name, value)
        object.__setattr__(settings, name, held)


def parse_size(text: str | int) -> int:
    """Bytes from "64MiB", "8MB", "1G" or a plain number. K, M, G, T count in 1024s.

    >>> parse_size("64MiB"), parse_size("1k"), parse_size(10)
    (67108864, 1024, 10)
    """
    if isinstance(text, int):
        if text < 0:
            raise ConfigError(f"not a size: {text!r}. It needs zero bytes or more")
        return text
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ConfigError(f"not a size: {text!r}. Write it like 512KiB, 64MiB or 10GiB")
    unit = (match[2] or "").upper().removesuffix("B").removesuffix("I")
    size = float(match[1]) * 1024 ** _SIZE_POWER[unit]
    if size > _SIZE_MAX:
        raise ConfigError(f"not a size: {text[:50]!r}... No disk is that large")
    return int(size)


def find_project_file(start: Path | None = None) -> Path | None:
    """The nearest millstream.toml in this folder or one above it."""
    here = (start or Path.cwd()).resolve()
    for folder in (here, *here.parents):
        if (folder / PROJECT_FILE).is_file():
            return folder / PROJECT_FILE
    return None


def read_project_file(path: Path | None = None) -> Mapping[str, Any]:
    """The content of millstream.toml; empty if there is none."""
    path = path or find_project_file()
    if path is None:
        return {}
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:  # also TOML and decoding errors
        raise ConfigError(f"cannot read {path}: {error}") from error


def project_table(name: str, path: Path | None = None) -> Mapping[str, Any]:
    """One table of millstream.toml, such as `[broker]`; empty if it is missing."""
    table = read_project_file(path).get(name, {})
    if not isinstance(table, dict):
        raise ConfigError(f"{PROJECT_FILE}: '{name}' must be a table, [{name}], not {table!r}")
    return table


def data_folder(given: str | Path | None = None, start: Path | None = None) -> Path:
    """The broker's data folder: given, `MILLSTREAM_DATA`, `[broker] data`, or ./.millstream.

    `start` is the folder where the search starts; by default the working directory.
    """
    return _named_folder(given, start) or ((start or Path()) / DATA_FOLDER).resolve()


def _named_folder(given: str | Path | None, start: Path | None) -> Path | None:
    """The data folder that was chosen; None if nothing names one."""
    named = given or environment("MILLSTREAM_DATA")
    if named is not None:
        return Path(named).resolve()
    project = find_project_file(start)
    listed = None if project is None else project_table("broker", project).get("data")
    return None if project is None or listed is None else (project.parent / str(listed)).resolve()


def project_broker(start: Path | None = None) -> tuple[str | None, Tls | None]:
    """The address in the nearest millstream.toml, else that of the broker that `up` runs there.

    With it, how a client on this machine secures the connection to that broker. No address if no
    data folder is named and none exists. A named or existing folder without a broker raises
    NotRunning: the caller means its broker, not another one that happens to run.
    """
    file = find_project_file(start)
    listed = None if file is None else read_project_file(file).get("url")
    if not isinstance(listed, str | None):
        raise ConfigError(f"{PROJECT_FILE}: url must be a string, not {listed!r}")
    return _broker_of_folder(start) if listed is None else (listed, None)


def project_url(start: Path | None = None) -> str | None:
    """The address of `project_broker`."""
    return project_broker(start)[0]


def names_a_broker(url: str | None = None, context: str | None = None) -> bool:
    """Whether an argument or the environment says which broker is meant, not the project."""
    named = (url, context, environment("NATS_URL"), environment("NATS_CONTEXT"))
    return any(name is not None for name in named)


def context_path(name: str) -> Path:
    """Where the `nats` tool looks for a context of that name."""
    return context_file(_nats_folder(), name)


def _nats_folder() -> Path:
    base = environment("XDG_CONFIG_HOME")
    return (Path(base) if base else Path.home() / ".config") / "nats"


def hide_password(url: str) -> str:
    """An address for people and logs: without a user and password in it.

    >>> hide_password("nats://ann:secret@host:4222")
    'nats://***@host:4222'
    """
    return re.sub(r"^(\w*://)?.*@", r"\1***@", url, flags=re.DOTALL)


@dataclass(frozen=True, slots=True)
class Tls:
    """Certificates of one side of a TLS connection."""

    ca: str | None = None  # file with the certificate authorities to trust; None: the system's
    cert: str | None = None  # file with this side's certificate
    key: str | None = None  # file with its private key
    handshake_first: bool = False  # TLS before the server's greeting (server: handshake_first)
    pin: str | None = None  # file with the server's own certificate: no other is accepted, and its
    # names and authority do not matter. Not combined with `ca`


@dataclass(frozen=True, slots=True)
class Reconnect:
    """How often, and for how long, to try to reconnect."""

    wait: float = 0.05  # seconds before the second attempt; doubles each time
    wait_max: float = 2.0  # seconds; the longest pause
    # Seconds without a connection, then it is closed; a pause of the process starts them again.
    give_up_after: float = 120.0
    buffer_bytes: int = 8 * 1024 * 1024  # core publishes kept while disconnected


@dataclass(frozen=True, slots=True)
class ConnectionSettings:
    """The broker's address and this client's credentials."""

    urls: tuple[str, ...] = (DEFAULT_URL,)
    name: str = "millstream"  # shown in the server's connection list
    user: str | None = None
    password: Secret | None = None
    token: Secret | None = None
    nkey_seed: Secret | None = None  # "SU..."
    creds: str | None = None  # file with user JWT and seed
    tls: Tls | None = None
    inbox_prefix: str = "_INBOX"
    domain: str | None = None  # JetStream domain to talk to
    connect_timeout: float = 5.0  # seconds for the first connection, for all servers together
    request_timeout: float = 5.0  # seconds for an answer
    ping_interval: float = 20.0  # seconds between our pings; two unanswered: reconnect
    reconnect: Reconnect = field(default_factory=Reconnect)

    def __repr__(self) -> str:
        """All settings, without the user and password in an address."""
        urls = tuple(map(hide_password, self.urls))
        rest = (f"{f.name}={getattr(self, f.name)!r}" for f in fields(self) if f.name != "urls")
        return f"ConnectionSettings({', '.join((f'urls={urls!r}', *rest))})"

    @classmethod
    def load(
        cls, url: str | None = None, *, context: str | None = None, **changes: Any
    ) -> ConnectionSettings:
        """Settings from arguments, contexts, `NATS_*` variables, millstream.toml, a running `up`.

        The address is the first of: `url`, that of the context named `context` (of the `nats`
        tool), `NATS_URL`, that of the context named by `NATS_CONTEXT`, `url` in millstream.toml,
        the broker that `millstream up` runs on the data folder, the default. The login comes, as a
        whole, from the first of those that were looked at and have one; so do the TLS files.
        """
        base = _merged(_sources(url, context))
        given = {name: value for name, value in changes.items() if value is not None}
        for name in ("password", "token", "nkey_seed"):
            if isinstance(given.get(name), str):
                given[name] = Secret(given[name])
        check_known(given, cls.__dataclass_fields__)
        return replace(base, **given)


def _secret(text: str | None) -> Secret | None:
    return None if text is None else Secret(text)


def _seed(file_or_seed: str | None, where: str) -> Secret | None:
    """An nkey is named by a file, as for the `nats` tool; a seed itself works as well."""
    if file_or_seed is None or file_or_seed.startswith("SU"):
        return _secret(file_or_seed)
    try:
        return Secret(Path(file_or_seed).read_text(encoding="utf-8").strip())
    except OSError as error:
        raise ConfigError(f"{where}: cannot read {file_or_seed}: {error}") from error


def _switch(name: str) -> bool:
    text = (environment(name) or "false").lower()
    if text not in ("1", "true", "yes", "0", "false", "no"):
        raise ConfigError(f"{name} is {text!r}; write true or false")
    return text in ("1", "true", "yes")


# -- where connection settings come from --------------------------------------------------

_Source = dict[str, Any]  # fields of ConnectionSettings that are set in one of them


def _sources(url: str | None, context: str | None) -> list[_Source]:
    """What each source says that is to be looked at, the most important first.

    A context of the environment is not looked at when something else gives the address: its login
    is not meant for that server.
    """
    own = _from_environment()
    asked: list[_Source] = [{"urls": _urls(url)}] if url else []
    if context is not None:
        return [*asked, _from_context(context), own]
    if asked or "urls" in own:
        return [*asked, own]
    named = environment("NATS_CONTEXT")
    return [own, _from_project() if named is None else _from_context(named)]


def _merged(sources: list[_Source]) -> ConnectionSettings:
    """Each setting from the first source that has it; a login is never mixed from two."""
    tls = [source.pop("tls") for source in sources if "tls" in source]
    names = {name for source in sources for name in source}
    result: _Source = {"tls": _merged_tls(tls)}
    for group in (_LOGIN, *((name,) for name in names.difference(_LOGIN))):
        result |= next((found for one in sources if (found := _part(one, group))), {})
    return ConnectionSettings(**result)


def _part(source: _Source, names: tuple[str, ...]) -> _Source:
    return {name: source[name] for name in names if name in source}


def _merged_tls(sources: list[Tls]) -> Tls | None:
    """Whom to trust and what to show, each from the first that says so; TLS first if any does."""
    if not sources:
        return None
    trust = next((tls for tls in sources if tls.ca or tls.pin), Tls())
    shown = next((tls for tls in sources if tls.cert or tls.key), Tls())
    first = any(tls.handshake_first for tls in sources)
    return Tls(trust.ca, shown.cert, shown.key, first, trust.pin)


def _source(**fields: Any) -> _Source:
    return {name: value for name, value in fields.items() if value is not None}


def _from_environment() -> _Source:
    timeout, listed = environment("NATS_TIMEOUT"), environment("NATS_URL")
    files = (environment("NATS_CA"), environment("NATS_CERT"), environment("NATS_KEY"))
    return _source(
        urls=None if listed is None else _urls(listed),
        user=environment("NATS_USER"),
        password=_secret(environment("NATS_PASSWORD")),
        token=_secret(environment("NATS_TOKEN")),
        nkey_seed=_seed(environment("NATS_NKEY"), "NATS_NKEY"),
        creds=environment("NATS_CREDS"),
        tls=_tls(Tls(*files, _switch("NATS_TLS_FIRST"))),
        request_timeout=None if timeout is None else parse_duration(timeout),
    )


def _from_context(name: str) -> _Source:
    fields = read_context(_nats_folder(), name)
    files = (fields.get("ca"), fields.get("cert"), fields.get("key"))
    return _source(
        urls=_urls(fields.get("url", DEFAULT_URL)),
        user=fields.get("user"),
        password=_secret(fields.get("password")),
        token=_secret(fields.get("token")),
        nkey_seed=_seed(fields.get("nkey"), f"context '{name}'"),
        creds=fields.get("creds"),
        tls=_tls(Tls(*files, bool(fields.get("tls_first")))),
        domain=fields.get("jetstream_domain"),
        inbox_prefix=fields.get("inbox_prefix"),
    )


def _from_project() -> _Source:
    url, tls = project_broker()
    return _source(urls=_urls(url or DEFAULT_URL), tls=tls)


def _tls(tls: Tls) -> Tls | None:
    return None if tls == Tls() else tls


def _urls(listed: str) -> tuple[str, ...]:
    if not isinstance(listed, str):
        raise ConfigError(f"a server address is text, found {listed!r}. Write nats://host:port")
    urls = tuple(part.strip() for part in listed.split(",") if part.strip())
    if not urls:
        raise ConfigError(f"no server address in {listed!r}. Write nats://host:port")
    return urls


def _broker_of_folder(start: Path | None) -> tuple[str | None, Tls | None]:
    """What `millstream up` wrote next to its data: `connect()` needs nothing else."""
    folder = data_folder(start=start)
    try:
        state = json.loads((folder / STATE_FILE).read_text(encoding="utf-8"))
        tls = state.get("client_tls")
        return str(state["url"]), None if tls is None else Tls(**tls)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        if _named_folder(None, start) is None and not folder.exists():
            return None, None
        raise NotRunning(str(folder)) from error
