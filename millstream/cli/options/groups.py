"""Options that belong together, as one parameter of a command.

typer wants a parameter for each option. With `grouped` a command takes a dataclass instead, and
every field of it is an option:

    @dataclass(frozen=True)
    class Selection:
        key: KeyOption = None
        partition: PartitionOption = None

    @app.command()
    @grouped
    def tail(name: TopicArgument, selection: Selection, json_: JsonOption = False) -> None: ...

A parameter that is annotated with an `OptionGroup` gets its options from a table, such as the
declared settings of topics. Modules with groups do not postpone annotations (PEP 563): the fields
must be types when the command is created, not texts.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, Final, get_args, get_origin

import typer

from millstream.declared import Declaration, Form, declaration_of

__all__ = ["OptionGroup", "declared_option", "grouped"]

_METAVARS: Final = {
    Form.NUMBER: "NUMBER",
    Form.SIZE: "SIZE",
    Form.DURATION: "DURATION",
    Form.PAIRS: "NAME=TEXT",
    Form.FILE: "FILE",
    Form.FILES: "FILE",
    Form.SECRET: "FILE",
    Form.ORIGIN: "TOPIC[,domain=D][,start=OFFSET|TIME][,filter=PATTERN]",
    Form.ORIGINS: "TOPIC[,domain=D][,start=OFFSET|TIME][,filter=PATTERN]",
}
_TYPES: Final[Mapping[Form, Any]] = {
    Form.NUMBER: int | None,
    Form.SWITCH: bool | None,
    Form.FILE: Path | None,
    Form.FILES: list[Path] | None,
    Form.SECRET: Path | None,
    Form.TEXTS: list[str] | None,
    Form.PAIRS: list[str] | None,
    Form.ORIGINS: list[str] | None,
}


@dataclass(frozen=True, slots=True)
class OptionGroup:
    """Options of one parameter, and what their values are turned into."""

    options: Callable[[], Sequence[inspect.Parameter]]
    build: Callable[[dict[str, Any]], Any]


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """Give typer one parameter for each option, and the command its groups."""
    flat: list[inspect.Parameter] = []
    groups: dict[str, tuple[Callable[[dict[str, Any]], Any], list[str]]] = {}
    signature = inspect.signature(command)
    for parameter in signature.parameters.values():
        group = _group(parameter.annotation)
        if group is None:
            flat.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))
        else:
            options = group.options()
            flat += options
            groups[parameter.name] = group.build, [option.name for option in options]

    @wraps(command)
    def run(**values: Any) -> None:
        for name, (build, options) in groups.items():
            values[name] = build({option: values.pop(option) for option in options})
        command(**values)

    run.__signature__ = signature.replace(parameters=flat)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in flat}
    return run


def declared_option(
    name: str, declaration: Declaration, *, kind: Any = None, default: Any = None
) -> inspect.Parameter:
    """The option of a declared setting; without a default it is None when it is not given."""
    flags = declaration.flags or (f"--{name.replace('_', '-')}",)
    option = typer.Option(
        *flags,
        help=declaration.help,
        metavar=declaration.metavar or _METAVARS.get(declaration.form),
        envvar=declaration.env or None,
        rich_help_panel=declaration.group or None,
    )
    kind = kind or _TYPES.get(declaration.form, str | None)
    return _parameter(name, Annotated[kind, option], default)


def _group(annotation: Any) -> OptionGroup | None:
    if get_origin(annotation) is Annotated:
        return next((item for item in get_args(annotation) if isinstance(item, OptionGroup)), None)
    if not (isinstance(annotation, type) and is_dataclass(annotation)):
        return None
    options = [_field_option(item) for item in fields(annotation)]
    return OptionGroup(lambda: options, lambda values: annotation(**values))


def _field_option(item: Field[Any]) -> inspect.Parameter:
    default = inspect.Parameter.empty if item.default is MISSING else item.default
    declaration = declaration_of(item)
    if declaration is None:
        return _parameter(item.name, item.type, default)
    return declared_option(item.name, declaration, default=default)


def _parameter(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
    )
