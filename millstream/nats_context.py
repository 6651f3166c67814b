"""Contexts of the `nats` tool: named files that say where a broker is and who connects.

Only a context that is named is used. The one that is selected in the tool would silently lead the
commands of a project to another broker.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any, Final

from millstream.errors import ConfigError
from millstream.nearest import did_you_mean

__all__ = ["context_file", "read_context"]

_FILES: Final = ("creds", "nkey", "cert", "key", "ca")
_TEXTS: Final = ("url", "user", "password", "token", "jetstream_domain", "inbox_prefix")
_IGNORED: Final = ("name", "description", "color_scheme")  # of the tool itself
# A reference to a secret that the tool fetches: op://..., nsc://..., env://..., data:...
_REFERENCE: Final = re.compile(r"(op|nsc|env)://|data:")


def context_file(folder: Path, name: str) -> Path:
    """Where the `nats` tool keeps a context of that name, below its folder."""
    if not re.fullmatch(r"[^\s/\\]+", name) or ".." in name:
        raise ConfigError(f"not the name of a context: {name!r}")
    return folder / "context" / f"{name}.json"


def read_context(folder: Path, name: str) -> dict[str, Any]:
    """The fields of a context that are set: texts, complete paths and `tls_first`.

    A field that this client cannot honour is refused: what it changes would silently be missing.
    """
    file = context_file(folder, name)
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        fields = {key: value for key, value in content.items() if value}
    except FileNotFoundError:
        raise ConfigError(f"there is no context '{name}': {_instead(file, name)}") from None
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(f"cannot read the context '{name}' in {file}: {error}") from error
    unknown = sorted(set(fields) - {*_FILES, *_TEXTS, *_IGNORED, "tls_first"})
    if unknown:
        raise ConfigError(
            f"the context '{name}' in {file} sets '{unknown[0]}', which Millstream cannot honour. "
            f"Use a context without it"
        )
    for field in (*_FILES, *_TEXTS):
        value = fields.get(field, "")
        if not isinstance(value, str) or _REFERENCE.match(value):
            raise ConfigError(
                f"the context '{name}' in {file}: '{field}' refers to a secret elsewhere, which "
                f"only the nats tool can fetch. Write it to a file, or set its NATS_ variable"
            )
        if field in _FILES and value:
            path = os.path.expandvars(value.removeprefix("file://"))
            fields[field] = str(Path(path).expanduser())
    return {key: value for key, value in fields.items() if key not in _IGNORED}


def _instead(file: Path, name: str) -> str:
    known = sorted(other.stem for other in file.parent.glob("*.json"))
    if not known:
        return f"{file.parent} has none. 'millstream context {name}' or 'nats context add' make one"
    near = did_you_mean(name, known)
    return f"{near} There are: {', '.join(known)}".strip()
