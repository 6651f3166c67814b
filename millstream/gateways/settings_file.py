"""The settings of a gateway: from options, the environment, and millstream.toml.

A setting comes from its option, else from its environment variable, MILLSTREAM_KAFKA_PORT for
example, else from the table of the gateway's name, [gateway.kafka] for example. Names are those of
the options, with '_' for '-'.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, Final

from millstream.declared import Declaration, Form, declared_fields
from millstream.errors import ConfigError
from millstream.gateways.protocols import ProtocolEntry
from millstream.gateways.settings import GatewaySettings
from millstream.nearest import one_of
from millstream.settings import (
    environment,
    find_project_file,
    parse_duration,
    parse_size,
    project_table,
)

__all__ = ["chosen_values", "make_settings", "variable_of"]

_TABLE: Final = "gateway"
_YES: Final = ("1", "true", "yes", "on")
_NO: Final = ("0", "false", "no", "off")
_LISTS: Final = (Form.TEXTS, Form.FILES)
_NAME: Final = "name"


def make_settings(entry: ProtocolEntry, values: Mapping[str, Any]) -> GatewaySettings:
    """The checked settings of a gateway, by the names of the settings; others have defaults."""
    declarations = _declarations(entry)
    _check_known(values, declarations, "the gateway")
    known = {
        field: _value(name, declaration, values[name])
        for name, (field, declaration) in declarations.items()
        if name in values
    }
    return entry.settings()(**known)


def chosen_values(entry: ProtocolEntry, given: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that are given, set in the environment, or in the nearest millstream.toml."""
    declarations = _declarations(entry)
    own = {name: value for name, value in given.items() if value is not None}
    for name, (_, declaration) in declarations.items():
        text = environment(variable_of(entry, name))
        if text is not None and name not in own:
            own[name] = _from_variable(variable_of(entry, name), declaration.form, text)
    usual = next(item.default for item in fields(entry.settings()) if item.name == _NAME)
    return {**_from_file(str(own.get(_NAME, usual)), declarations), **own}


def variable_of(entry: ProtocolEntry, name: str) -> str:
    """The environment variable of a setting."""
    return f"MILLSTREAM_{entry.name}_{name}".upper()


Declarations = Mapping[str, tuple[str, Declaration]]  # by the name of the setting: its field


def _declarations(entry: ProtocolEntry) -> Declarations:
    return {
        declaration.name or item.name: (item.name, declaration)
        for item, declaration in declared_fields(entry.settings())
    }


def _from_variable(variable: str, form: Form, text: str) -> Any:
    if form is Form.SWITCH:
        if text.lower() not in (*_YES, *_NO):
            raise ConfigError(f"{variable} is {text!r}; write true or false")
        return text.lower() in _YES
    if form is Form.NUMBER:
        try:
            return int(text)
        except ValueError:
            raise ConfigError(f"{variable} is {text!r}; write a number") from None
    return [part.strip() for part in text.split(",")] if form in _LISTS else text


def _from_file(name: str, declarations: Declarations) -> dict[str, Any]:
    """The table of the gateway in the nearest millstream.toml; paths are relative to the file."""
    project = find_project_file()
    if project is None:
        return {}
    tables = project_table(_TABLE, project)
    for other, table in tables.items():
        if not isinstance(table, dict):
            raise ConfigError(
                f"{project}: the settings of a gateway are in a table of its name, "
                f"[{_TABLE}.{name}]; '{other}' is none"
            )
    found = dict(tables.get(name, {}))
    own = {key: value for key, value in declarations.items() if key != _NAME}
    _check_known(found, own, f"{project}: [{_TABLE}.{name}]")
    return {key: _beside(project, own[key][1].form, value) for key, value in found.items()}


def _beside(project: Path, form: Form, value: Any) -> Any:
    if form is Form.FILE and isinstance(value, str):
        return str(project.parent / value)
    if form is Form.FILES and isinstance(value, list):
        return [str(project.parent / str(one)) for one in value]
    return value


def _check_known(given: Mapping[str, Any], declarations: Declarations, where: str) -> None:
    for name in given:
        if name not in declarations:
            raise ConfigError(f"{where} has no setting '{name}': {one_of(name, declarations)}")


def _value(name: str, declaration: Declaration, value: Any) -> Any:
    """A value as the class of the settings takes it."""
    if value is None:
        return None
    form = declaration.form
    _check_kind(name, form, value)
    if form is Form.SIZE:
        return parse_size(value)
    if form is Form.DURATION:
        return parse_duration(value)
    if form is Form.FILE:
        return Path(value)
    if form is Form.FILES:
        return tuple(Path(str(one)) for one in value)
    return tuple(map(str, value)) if form is Form.TEXTS else value


def _check_kind(name: str, form: Form, value: object) -> None:
    # A switch is a number for Python, and only for Python.
    right = isinstance(value, bool) == (form is Form.SWITCH)
    if not right or not isinstance(value, _KINDS.get(form, (str,))):
        raise ConfigError(f"{name}: {value!r} is no {form}")


_KINDS: Final[Mapping[Form, tuple[type, ...]]] = {
    Form.NUMBER: (int,),
    Form.SIZE: (int, str),
    Form.DURATION: (int, float, str),
    Form.SWITCH: (bool,),
    Form.FILE: (str, Path),
    Form.FILES: (list, tuple),
    Form.TEXTS: (list, tuple),
}
