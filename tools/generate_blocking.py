"""Writes the typed classes of millstream/blocking/generated from the asynchronous ones.

    python -m tools.generate_blocking            # writes the files
    python -m tools.generate_blocking --check    # fails when one of them is stale

Signatures, types and docstrings come from the classes in tools/blocking_plan.py. A new method is
picked up by running this again; for a new kind of attribute or argument it stops and asks.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass, is_dataclass
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import Any

from tools.blocking_plan import CONTEXT_BASES, FILES, HANDLERS, SEVERAL, ClassPlan
from tools.blocking_types import (
    EXISTING,
    ITERATORS,
    Imports,
    Types,
    Undecided,
    names_of,
    twin_in,
)

ROOT = Path(__file__).parents[1]
TARGET = ROOT / "millstream" / "blocking" / "generated"
PLAIN_DEFAULTS = (type(None), bool, int, float, str, bytes)
# Needed because ruff cannot infer this for a file that does not exist yet.
FIRST_PARTY = "lint.isort.known-first-party=['millstream']"
STARS: dict[Any, str] = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
HELPERS = {"in_thread", "in_group", "collected", "given", "unwrapped", "NOT_GIVEN"}


# -- one class ----------------------------------------------------------------------------


@dataclass
class Member:
    """A method or property, as the most derived class defines it."""

    name: str
    module: str
    value: Any


def members_of(cls: type) -> Iterator[Member]:
    """Public methods and properties, and those of an iterator; bases first."""
    seen: dict[str, Member] = {}
    for owner in reversed(cls.__mro__):
        if not owner.__module__.startswith("millstream."):
            continue
        for name, value in vars(owner).items():
            if name.startswith("_") and name not in ("__aiter__", "__anext__"):
                continue
            if inspect.isfunction(value) or isinstance(value, property | cached_property):
                seen[name] = Member(name, owner.__module__, value)
    yield from seen.values()


def attributes_of(cls: type) -> set[str]:
    """Public attributes that the constructors set."""
    found: set[str] = set()
    for owner in cls.__mro__:
        if "__init__" not in vars(owner) or not owner.__module__.startswith("millstream."):
            continue
        tree = ast.parse(textwrap.dedent(inspect.getsource(vars(owner)["__init__"])))
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.Attribute)
                and isinstance(node.ctx, ast.Store)
                and isinstance(node.value, ast.Name)
                and node.value.id == "self"
                and not node.attr.startswith("_")
            ):
                found.add(node.attr)
    return found


class ClassWriter:
    """Writes one twin class."""

    def __init__(self, plan: ClassPlan, imports: Imports, constants: dict[str, str]) -> None:
        self.plan = plan
        self.imports = imports
        self.constants = constants  # defaults that are objects: name -> expression
        self.cls: type = getattr(importlib.import_module(plan.home), plan.name)
        self.members = [m for m in members_of(self.cls) if m.name not in plan.skip]
        self.names = {member.name for member in self.members}
        self.sending = plan.base == "Sending"
        self.inner = f"Async{plan.name}"

    def types(self, module: str) -> Types:
        return Types(module, self.imports, self.names)

    def write(self) -> str:
        plan, inner = self.plan, self.inner
        self.imports.add(plan.home, f"{plan.name} as {inner}")
        bases = self._bases()
        for base in bases[: len(bases) - len(plan.also)]:
            home = "twin" if base == "ContextTwin" else plan.base_home
            self.imports.add(f"millstream.blocking.{home}", base)
        for name in plan.also:
            self.types(plan.home).name(name)
        lines = [f"class {plan.name}({', '.join(bases)}):", _doc(self.cls.__doc__)]
        lines.append(f"    __slots__ = ()\n\n    _inner: {inner}\n")
        undecided = attributes_of(self.cls) - {*plan.fixed, *plan.live, *plan.skip, *self.names}
        if undecided:
            raise Undecided(f"{plan.name}: the plan does not say what {sorted(undecided)} are")
        for name, kind in {**plan.fixed, **plan.live}.items():
            lines.append(self._attribute(name, kind))
        lines += [self._member(member) for member in self.members if member.name != "__anext__"]
        return "\n".join(lines) + "\n"

    def _bases(self) -> list[str]:
        """The base classes; a context has one that enters and leaves it."""
        plan = self.plan
        if not hasattr(self.cls, "__aenter__") or plan.base in CONTEXT_BASES:
            return [plan.base, *plan.also]
        if plan.base == "Twin":
            return ["ContextTwin", *plan.also]
        return [plan.base, "ContextTwin", *plan.also]

    def _attribute(self, name: str, kind: str) -> str:
        read = f"self._inner.{name}"
        if name in self.plan.live:
            read = f"{self._looker}(lambda: self._inner.{name})"
        head = f"@property\ndef {name}(self) -> {self.types(self.plan.home).text(kind)}:"
        return _method(head, self._comment(name), self._give(kind, read))

    def _comment(self, name: str) -> str:
        """The comment beside an attribute, as a sentence."""
        source = inspect.getsource(self.cls.__init__)  # type: ignore[misc]
        found = re.search(rf"self\.{name}\b[^\n=]*=[^\n#]*  # ([^\n]+)", source)
        return f"{found[1][0].upper()}{found[1][1:].rstrip('.')}." if found else ""

    @property
    def _looker(self) -> str:
        return "self._look" if self.sending else "self._loop.invoke"

    # -- members --------------------------------------------------------------------------

    def _member(self, member: Member) -> str:
        try:
            return self._written(member)
        except Undecided as question:
            raise Undecided(f"{self.plan.name}.{member.name}: {question}") from question

    def _written(self, member: Member) -> str:
        if isinstance(member.value, property | cached_property):
            return self._property(member)
        if member.name == "__aiter__":
            raise Undecided(f"{self.plan.name} is an iterator: write it by hand in its base")
        return self._function(member)

    def _property(self, member: Member) -> str:
        value = member.value
        function: Callable[..., Any] = getattr(value, "fget", None) or value.func
        kind = inspect.signature(function).return_annotation
        read = f"self._inner.{member.name}"
        if not self.plan.pure:
            read = f"{self._looker}(lambda: self._inner.{member.name})"
        head = f"@property\ndef {member.name}(self) -> {self.types(member.module).text(kind)}:"
        return _method(head, function.__doc__, self._give(kind, read))

    def _caller(self, member: Member) -> str:
        return "call_last" if member.name in self.plan.last else "call"

    def _function(self, member: Member) -> str:
        signature = inspect.signature(member.value)
        kind = signature.return_annotation
        head, arguments = self._arguments(member, signature)
        opens = re.fullmatch(r"Opening\[(\w+)\]", kind)
        returns = self.types(member.module).text(opens[1] if opens else kind)
        if opens:
            call = f"self._inner.{member.name}({', '.join(arguments)})"
            body = self._give(opens[1], f"self._loop.call({call}.open())")
        else:
            body = self._body(member, kind, arguments)
        header = f"def {member.name}({', '.join(['self', *head])}) -> {returns}:"
        return _method(header, member.value.__doc__, body)

    def _body(self, member: Member, kind: str, arguments: list[str]) -> str:
        plan, target = self.plan, f"self._inner.{member.name}"
        passed = ", ".join([target, *arguments])
        called = f"{target}({', '.join(arguments)})"
        if member.name in plan.posted:
            return f"self._loop.post({passed})"
        if member.name in plan.lots:
            return f"self._send_lots({passed})"
        if member.name in plan.queued:
            if kind.startswith("asyncio.Future"):
                return f"return self._send_pending({passed})"
            return f"self._send({passed})"
        if inspect.isasyncgenfunction(member.value):
            return self._give(kind, called, member.name)
        if inspect.iscoroutinefunction(member.value):
            work = f"self._loop.{self._caller(member)}({called})"
            if self.sending:
                work = f"self.{'_end' if member.name in plan.ends else '_after'}({passed})"
        elif self.sending:
            work = f"self._look(lambda: {called})"
        else:
            work = f"self._loop.invoke({passed})"
        return self._give(kind, work, member.name)

    def _give(self, kind: str, work: str, name: str = "") -> str:
        """The statements that return a value of this type, wrapped where it has a twin."""
        if kind == "None":
            return work
        if kind == "Self":
            self.imports.add("typing", "Self")
            return f"{work}\nreturn self"
        found = twin_in(kind)
        if kind.startswith(tuple(ITERATORS)):
            ahead = f", {self.plan.ahead[name]}" if name in self.plan.ahead else ""
            work = f"self._loop.iterate({work}{ahead})"
        if found is None:
            return f"return {work}"
        shape, name = found
        first = self.imports.twin(name, used_at_once=True)
        return (
            first
            + {
                "one": f"return {name}(self._loop, {work})",
                "optional": f"found = {work}\n"
                f"return None if found is None else {name}(self._loop, found)",
                "list": f"return [{name}(self._loop, item) for item in {work}]",
                "iterator": f"return ({name}(self._loop, item) for item in {work})",
            }[shape]
        )

    # -- arguments ------------------------------------------------------------------------

    def _arguments(
        self, member: Member, signature: inspect.Signature
    ) -> tuple[list[str], list[str]]:
        """The parameters as declared, and as they are passed on."""
        defaults = _default_texts(member.value)
        types = self.types(member.module)
        head: list[str] = []
        passed: list[str] = []
        unknown: list[str] = []
        starred = False
        for name, parameter in list(signature.parameters.items())[1:]:
            star = STARS.get(parameter.kind, "")
            if parameter.kind is parameter.KEYWORD_ONLY and not starred:
                head.append("*")
                starred = True
            starred = starred or star == "*"
            text = f"{star}{name}: {types.text(parameter.annotation)}"
            if parameter.default is not parameter.empty:
                default = self._default(member, parameter, defaults[name])
                text += f" = {default}"
                if default == "NOT_GIVEN":
                    unknown.append(f"{name}={name}")
            head.append(text)
            if f"{name}={name}" in unknown:
                continue
            plain = star or member.name in self.plan.lots
            value = f"{star}{name}" if plain else self._passed(name, parameter.annotation)
            by_name = parameter.kind is parameter.KEYWORD_ONLY or unknown
            passed.append(f"{name}={value}" if by_name and not star else value)
        if unknown:
            passed.append(f"**given({', '.join(unknown)})")
        return head, passed

    def _default(self, member: Member, parameter: inspect.Parameter, text: str) -> str:
        value = parameter.default
        if isinstance(value, PLAIN_DEFAULTS) or value == ():
            return repr(value)
        owner = text.partition(".")[0]
        if "." in text and owner in names_of(member.module) and not owner.startswith("_"):
            self.types(member.module).name(owner)
            return text
        kind = type(value)
        if isinstance(value, Enum) and text.isidentifier():
            return self.types(member.module).name(text)
        if is_dataclass(kind) and text.isidentifier() and value == kind():
            self.types(member.module).name(kind.__name__)
            self.constants[text] = f"{kind.__name__}()"
            return text
        return "NOT_GIVEN"

    def _passed(self, name: str, annotation: str) -> str:
        """How an argument is given to the asynchronous call."""
        optional = annotation.endswith(" | None")
        kind = annotation.removesuffix(" | None")
        if kind in HANDLERS:
            value = HANDLERS[kind][1].format(name)
            if "partial" in value:
                self.imports.add("functools", "partial")
        elif kind in SEVERAL:
            value = f"unwrapped({name})"
        elif kind in EXISTING:
            value = f"{name}._inner"
        elif all(part in EXISTING for part in kind.split(" | ")):
            value = f"unwrapped({name})"
        elif kind == "Event":
            value = f"unwrapped({name})"  # a delivery, or an event without a twin
        elif re.fullmatch(r"Iterable\[[^\]]*\]", kind):
            value = f"list({name})"  # it may block or call the twin: not on the loop
        elif "Callable" in kind or "Awaitable" in kind:
            raise Undecided(f"{self.plan.name}: how is {name}: {annotation} called?")
        else:
            return name
        return f"None if {name} is None else {value}" if optional else value


def _default_texts(function: Callable[..., Any]) -> dict[str, str]:
    tree = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    if not isinstance(tree, ast.FunctionDef | ast.AsyncFunctionDef):
        raise Undecided(f"{function} is not a function")
    positional = [*tree.args.posonlyargs, *tree.args.args]
    texts = {
        arg.arg: ast.unparse(default)
        for arg, default in zip(reversed(positional), reversed(tree.args.defaults), strict=False)
    }
    for arg, default in zip(tree.args.kwonlyargs, tree.args.kw_defaults, strict=True):
        if default is not None:
            texts[arg.arg] = ast.unparse(default)
    return texts


def _doc(text: str | None) -> str:
    """A docstring for blocking code, indented for a class."""
    cleaned = inspect.cleandoc(text or "")
    for old, new in {
        "`async with": "`with",
        "`async for": "`for",
        "async with ": "with ",
        "async for ": "for ",
        "async def": "def",
        "await ": "",
    }.items():
        cleaned = cleaned.replace(old, new)
    cleaned = cleaned.partition("\n\n>>>")[0]
    end = "\n" if "\n" in cleaned else ""
    return textwrap.indent(f'"""{cleaned}{end}"""\n', "    ")


def _method(head: str, doc: str | None, body: str) -> str:
    lines = [textwrap.indent(head, "    ")]
    if doc:
        lines.append(textwrap.indent(_doc(doc).rstrip("\n"), "    "))
    lines.append(textwrap.indent(body, "        "))
    return "\n".join(lines) + "\n"


# -- files --------------------------------------------------------------------------------


def render(file: str) -> str:
    """The text of one generated module, before it is formatted."""
    plans = [plan for plan in EXISTING.values() if plan.file == file]
    imports = Imports(file)
    constants: dict[str, str] = {}
    classes = [ClassWriter(plan, imports, constants).write() for plan in plans]
    body = "\n\n".join(classes)
    used = used_at_runtime(body, constants)
    for helper in used & HELPERS:
        imports.add("millstream.blocking.twin", helper)
    if constants:
        imports.add("typing", "Final")
    names = ", ".join(f'"{plan.name}"' for plan in sorted(plans, key=lambda plan: plan.name))
    parts = [
        f'"""{FILES[file]}\n\nGenerated by tools/generate_blocking.py: change the asynchronous '
        'class and run it again.\n"""',
        "from __future__ import annotations",
        imports.render(used),
        f"__all__ = [{names}]",
        "\n".join(f"{name}: Final = {value}" for name, value in constants.items()),
        body,
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def used_at_runtime(body: str, constants: dict[str, str]) -> set[str]:
    """The names that the code needs when it runs; those in annotations are for type checkers."""
    tree = ast.parse(body + "\n".join(constants.values()))
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            node.returns = None
        elif isinstance(node, ast.arg):
            node.annotation = None
        elif isinstance(node, ast.AnnAssign):
            node.annotation = ast.Constant(None)
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}


def generate() -> dict[str, str]:
    """The text of every generated module by file name, as the formatter leaves it."""
    return {f"{file}.py": _formatted(TARGET / f"{file}.py", render(file)) for file in FILES}


def _formatted(path: Path, text: str) -> str:
    ruff = [sys.executable, "-m", "ruff"]
    sort = ["check", "--fix", "--select", "I", "--config", FIRST_PARTY]
    for command in (sort, ["format"]):
        done = subprocess.run(
            [*ruff, *command, "--quiet", "--stdin-filename", str(path), "-"],
            input=text,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            check=True,
        )
        text = done.stdout
    return text


def main() -> None:
    made = generate()
    stale = [
        name
        for name, text in made.items()
        if not (TARGET / name).exists() or (TARGET / name).read_text() != text
    ]
    if "--check" in sys.argv:
        sys.exit(
            f"stale: {', '.join(stale)}. Run python -m tools.generate_blocking" if stale else 0
        )
    for name, text in made.items():
        (TARGET / name).write_text(text)
    sys.stdout.write(f"{len(stale)} file(s) changed: {', '.join(stale)}\n" if stale else "")


if __name__ == "__main__":
    main()
