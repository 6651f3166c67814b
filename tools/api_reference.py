"""Writes docs/API.md from the docstrings and signatures of the public names.

python -m tools.api_reference            # writes the page
python -m tools.api_reference --check    # fails if it is stale
"""

from __future__ import annotations

import ast
import dataclasses
import enum
import importlib
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from millstream.declared import declaration_of
from millstream.messaging.topics.setting_forms import Setting

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "API.md"

INTRO = """\
# API reference

Written by `python -m tools.api_reference` from the docstrings: change those, then run it again. The
guide with runnable examples is [MESSAGING.md](MESSAGING.md). Everything is imported from
`millstream`, except classes that only calls return; those are named with their module.
`millstream.blocking` has the same calls without `async` and `await` ([BLOCKING.md](BLOCKING.md)).
"""

# Section -> its public names, in reading order. A test checks that every name is in one section.
# `module:Name` is a class that only calls return.
SECTIONS: dict[str, tuple[str, list[str]]] = {
    "Connecting": ("millstream", ["connect", "Connecting", "Mill", "Identity", "IdentitySettings"]),
    "Topics": (
        "millstream",
        [
            "Topic",
            "millstream.messaging.topic_admin:TopicAdmin",
            "TopicSettings",
            "Origin",
            "TopicInfo",
            "EventCount",
        ],
    ),
    "Events": (
        "millstream",
        ["Event", "EventList", "NewEvent", "PublishOptions", "Receipt", "Start", "ReadPlan"],
    ),
    "Producers and writers": (
        "millstream",
        [
            "millstream.messaging.publishing.pack_producer:PackProducer",
            "millstream.messaging.publishing.event_producer:EventProducer",
            "millstream.messaging.publishing.writer:Writer",
            *("ProducerCounters", "Packing", "Columns", "Process", "ProcessSettings"),
            "ProcessInfo",
        ],
    ),
    "Subscriptions": (
        "millstream",
        [
            *("Subscription", "SubscriptionSettings", "Delivery", "Reject"),
            "millstream.messaging.subscriptions.admin:Subscriptions",
            *("SubscriptionInfo", "Lag"),
        ],
    ),
    "Schedules": (
        "millstream",
        ["millstream.messaging.schedules:Schedules", "Schedule"],
    ),
    "Dead letters": (
        "millstream",
        ["DeadLetterQueue", "DeadLetter", "DeadLetterFilter", "RedriveReport"],
    ),
    "Ordered groups": (
        "millstream",
        [
            *("Group", "GroupSettings", "GroupEvent"),
            "millstream.messaging.groups.admin:GroupAdmin",
            "GroupInfo",
        ],
    ),
    "HTTP push": ("millstream", ["HttpPush", "HttpPushSettings"]),
    "Event stores": (
        "millstream",
        [
            *("EventStore", "StoreSettings", "StoredEvent", "Append", "AppendReceipt", "Loaded"),
            *("NamedEvent", "NEW", "ANY", "Unchanged", "Deleted", "Personal", "StoreInfo"),
            *("Projection", "ProjectionView", "ProjectionRecord", "RowDiff"),
        ],
    ),
    "Core subjects": (
        "millstream",
        [
            *("Message", "Subscriber", "SubscriberSettings", "Overload", "Counters"),
            *("millstream.messaging.core.paced_publisher:PacedPublisher", "Service"),
            *("ServiceInfo", "ServiceStats"),
        ],
    ),
    "Tables and schemas": (
        "millstream",
        ["Table", "Registry", "Guard", "GuardSettings"],
    ),
    "The embedded broker": ("millstream", ["Broker", "BrokerSettings", "Cluster"]),
}
ERRORS = "millstream.errors"


def defined_in(cls: type) -> dict[str, str]:
    """Field -> the comment beside or above it in the source of a class: what it means."""
    source = textwrap.dedent(inspect.getsource(cls))
    lines = source.split("\n")
    found: dict[str, str] = {}
    (tree,) = ast.parse(source).body
    if not isinstance(tree, ast.ClassDef):
        return found
    for node in tree.body:
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        beside = re.search(r"  # (.*)$", lines[(node.end_lineno or node.lineno) - 1])
        if beside is None and node.end_lineno != node.lineno:
            inside = "\n".join(lines[node.lineno - 1 : node.end_lineno])
            beside = re.search(r"  # (.*)$", inside, re.MULTILINE)
        above: list[str] = []
        at = node.lineno - 2
        while beside is None and lines[at].strip().startswith("#"):
            above.insert(0, lines[at].strip().lstrip("# "))
            at -= 1
        found[node.target.id] = beside[1] if beside else " ".join(above)
    return found


def shown(text: str) -> str:
    """Text for a cell of a table."""
    return re.sub(r"\s+", " ", text).strip().replace("|", "\\|")


def annotation_of(cls: type, name: str) -> str:
    for base in cls.__mro__:
        found = inspect.get_annotations(base).get(name)
        if found is not None:
            text = found if isinstance(found, str) else getattr(found, "__name__", str(found))
            return given_type(text)
    return ""


def given_type(annotation: str) -> str:
    """The type to give; a field that converts is declared with what it takes and what it holds.

    >>> given_type("Setting[Mapping[str, str], FrozenMetadata]"), given_type("str | None")
    ('Mapping[str, str]', 'str | None')
    """
    tree = ast.parse(annotation, mode="eval").body
    if not isinstance(tree, ast.Subscript) or ast.unparse(tree.value) != Setting.__name__:
        return annotation
    return ast.unparse(tree.slice.elts[0] if isinstance(tree.slice, ast.Tuple) else tree.slice)


def help_of(cls: type, field: dataclasses.Field[Any]) -> str:
    """The help text of a declared setting; "" for any other field."""
    setting = vars(cls).get(field.name)
    declaration = setting.declaration if isinstance(setting, Setting) else declaration_of(field)
    # An option of another name takes something else: the name of a file, or a switch.
    if declaration is None or declaration.name not in {"", field.name}:
        return ""
    text = declaration.help.replace("; repeat it for more", "")  # of options
    default = declaration.default_text
    return f"{text} By default {default}." if default else text


def default_of(field: dataclasses.Field[Any]) -> str:
    if field.default is not dataclasses.MISSING:
        value = field.default
        if isinstance(value, enum.Enum):
            return f"`{value.value!r}`"
        text = repr(value)
        return f"`{text}`" if len(text) < 50 and " object at " not in text else ""
    factory = field.default_factory
    return f"`{factory.__name__}()`" if inspect.isclass(factory) else ""


def fields_table(cls: type) -> Iterator[str]:
    """The fields of a settings class or record."""
    meaning: dict[str, str] = {}
    for base in reversed(cls.__mro__[:-1]):
        meaning.update(defined_in(base))
    rows = []
    for field in dataclasses.fields(cls):
        if field.name.startswith("_"):
            continue
        says = help_of(cls, field) or meaning.get(field.name, "")
        kind = shown(annotation_of(cls, field.name))
        rows.append(f"| `{field.name}` | `{kind}` | {default_of(field)} | {shown(says)} |")
    if rows:
        yield "| field | type | default | |\n| --- | --- | --- | --- |"
        yield from rows
        yield ""


def tuple_table(cls: Any) -> Iterator[str]:
    """The fields of a NamedTuple or a Struct."""
    meaning = defined_in(cls)
    yield "| field | type | |\n| --- | --- | --- |"
    for name in getattr(cls, "_fields", None) or cls.__struct_fields__:
        kind = getattr(cls.__annotations__[name], "__forward_arg__", cls.__annotations__[name])
        yield f"| `{name}` | `{shown(str(kind))}` | {shown(meaning.get(name, ''))} |"
    yield ""


class AsWritten:
    """Shows itself in a signature as the given text, without quotes."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


def shown_parameter(parameter: inspect.Parameter) -> inspect.Parameter:
    """A parameter whose annotation and default are shown as a user would write them."""
    if isinstance(parameter.annotation, str):
        parameter = parameter.replace(annotation=AsWritten(parameter.annotation))
    if isinstance(parameter.default, enum.Enum):
        parameter = parameter.replace(default=parameter.default.value)
    return parameter


def signature_of(function: Any) -> str:
    signature = inspect.signature(function)
    parameters = [
        shown_parameter(p) for p in signature.parameters.values() if p.name not in {"self", "cls"}
    ]
    returned = signature.return_annotation
    if isinstance(returned, str):
        returned = AsWritten(returned)
    text = str(signature.replace(parameters=parameters, return_annotation=returned))
    return re.sub(r"<[\w. ]+ at 0x[0-9a-f]+>", "...", text)


def members_of(cls: type) -> Iterator[str]:
    """The public methods and properties of a class."""
    own = [base for base in cls.__mro__ if base.__module__.startswith("millstream")]
    seen: set[str] = set()
    for base in own:
        for name, member in vars(base).items():
            if name.startswith("_") or name in seen:
                continue
            seen.add(name)
            inner = member.__func__ if isinstance(member, classmethod | staticmethod) else member
            if isinstance(inner, property):
                yield f"- **`{name}`** {sentence(inner.fget)}"
            elif inspect.isfunction(inner):
                awaited = "await " if inspect.iscoroutinefunction(inner) else ""
                yield f"- **`{awaited}{name}{signature_of(inner)}`** {sentence(inner)}"


def sentence(thing: Any) -> str:
    """A docstring as one paragraph, without its doctest."""
    text = inspect.getdoc(thing) or ""
    return re.sub(r"\s+", " ", text.partition("\n>>>")[0].partition(">>>")[0]).strip()


def described(home: str, name: str) -> Iterator[str]:
    """One public name: what it is, its fields or members."""
    module, _, name = name.rpartition(":")
    value = getattr(importlib.import_module(module or home), name)
    yield f"### {name}\n"
    if module:
        yield f"In `{module}`.\n"
    if inspect.isfunction(value):
        yield f"```text\n{name}{signature_of(value)}\n```\n"
        yield (inspect.getdoc(value) or "").partition("\n>>>")[0].strip() + "\n"
        return
    text = (inspect.getdoc(value) or "").partition("\n>>>")[0].partition("\n    >>>")[0].strip()
    yield text + "\n"
    if dataclasses.is_dataclass(value) and isinstance(value, type):
        yield from fields_table(value)
    elif inspect.isclass(value) and hasattr(value, "_fields"):
        yield from tuple_table(value)
        return
    elif inspect.isclass(value) and hasattr(value, "__struct_fields__"):
        yield from tuple_table(value)
    if inspect.isclass(value) and issubclass(value, enum.Enum):
        yield "Values: " + ", ".join(f"`{item.name}`" for item in value) + ".\n"
    elif inspect.isclass(value):
        members = list(members_of(value))
        if members:
            yield from members
            yield ""


def render() -> str:
    """The page."""
    parts = [INTRO]
    for title, (home, names) in SECTIONS.items():
        parts.append(f"## {title}\n")
        for name in names:
            parts.extend(described(home, name))
    tree = inspect.getdoc(importlib.import_module(ERRORS)) or ""
    tree = tree.partition("\n\n")[2].rstrip()
    parts.append(f"## Errors\n\nIn `millstream.errors`:\n\n```text\n{tree}\n```\n")
    text = re.sub(r" +$", "", "\n".join(parts), flags=re.MULTILINE)
    return re.sub(r"\n{3,}", "\n\n", text)


def main() -> None:
    page = render()
    if "--check" in sys.argv:
        stale = not PAGE.exists() or PAGE.read_text() != page
        sys.exit("stale: run python -m tools.api_reference" if stale else 0)
    PAGE.write_text(page)


if __name__ == "__main__":
    main()
