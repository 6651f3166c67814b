"""The options of `topic create` and `topic edit`, from the declared settings of topics."""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

from millstream.cli.options.groups import OptionGroup, declared_option
from millstream.declared import Form
from millstream.errors import ConfigError
from millstream.messaging.topics.setting_forms import OneWay, Setting
from millstream.messaging.topics.settings import TOPIC_SETTINGS

if TYPE_CHECKING:
    from millstream.messaging import Origin

__all__ = ["ChangedSettings", "NewSettings", "flag", "settings_from"]


def _new_options() -> Sequence[inspect.Parameter]:
    return [_option(item, item.default_text) for item in TOPIC_SETTINGS.values() if not item.set_by]


def _change_options() -> Sequence[inspect.Parameter]:
    return [
        _option(item) for item in TOPIC_SETTINGS.values() if not item.set_by and not item.is_fixed
    ]


def _option(item: Setting[Any, Any], default: str = "") -> inspect.Parameter:
    declaration = item.declaration
    if default:
        declaration = replace(declaration, help=f"{declaration.help} (default: {default})")
    if item.kind.form is Form.SWITCH:
        declaration = replace(declaration, flags=(_switch_flags(item),))
    # A limit is a number or 'none', so its option is a text.
    limit = item.kind.form is Form.NUMBER and item.default is None
    return declared_option(item.name, declaration, kind=str | None if limit else None)


def _switch_flags(item: Setting[Any, Any]) -> str:
    """`--x/--no-x`; a switch that cannot be turned off again has no `--no-x`."""
    name = item.name.replace("_", "-")
    once = isinstance(item.change, OneWay) and item.default is False
    return f"--{name}" if once else f"--{name}/--no-{name}"


def flag(item: Setting[Any, Any]) -> str:
    """The option of a setting, such as --max-age."""
    return item.declaration.flags[0] if item.declaration.flags else _long_flag(item.name)


def _long_flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def settings_from(options: Mapping[str, Any]) -> dict[str, Any]:
    """The topic settings that were given, in the forms that TopicSettings takes."""
    return {
        name: _value(TOPIC_SETTINGS[name], value)
        for name, value in options.items()
        if value not in (None, (), [])
    }


def _value(item: Setting[Any, Any], value: Any) -> Any:
    form = item.kind.form
    if form is Form.PAIRS:
        return _pairs(flag(item), value)
    if form is Form.ORIGINS:
        return [parse_origin(flag(item), text) for text in value if text != "none"]
    if value == "none" and item.default is None:
        return None
    if form is Form.ORIGIN:
        return parse_origin(flag(item), value)
    if form is Form.NUMBER and isinstance(value, str):
        if not value.isdigit():
            raise ConfigError(f"{flag(item)}: {value!r} is not a number. Give one, or 'none'")
        return int(value)
    return value


def _pairs(option: str, texts: list[str]) -> dict[str, str]:
    pairs = {}
    for pair in texts:
        key, equals, text = pair.partition("=")
        if not equals or not key:
            raise ConfigError(f"{option}: {pair!r} is not of the form NAME=TEXT")
        pairs[key] = text
    return pairs


def parse_origin(option: str, text: str) -> "Origin":
    """A topic to copy from: `orders`, `orders,domain=edge,start=17,filter=eu`."""
    from millstream.cli.options.times import moment
    from millstream.messaging import Origin

    topic, *details = text.split(",")
    values: dict[str, Any] = {}
    for detail in details:
        key, equals, value = detail.partition("=")
        if not equals or key not in ("domain", "start", "filter"):
            raise ConfigError(f"{option}: {detail!r} is not one of domain=, start=, filter=")
        if key == "start":
            values[key] = int(value) if value.isdigit() else moment(value)
        else:
            values[key] = value
    return Origin(topic, **values)


NewSettings = Annotated[dict[str, Any], OptionGroup(_new_options, settings_from)]
ChangedSettings = Annotated[dict[str, Any], OptionGroup(_change_options, settings_from)]
