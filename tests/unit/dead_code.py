"""Finds code that nothing uses: modules, names of modules, methods and private attributes.

A name of a module is followed through the imports; a method or attribute counts as used when its
name is read anywhere, because the class of an object is not known here.
"""

from __future__ import annotations

import ast
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

Function = ast.FunctionDef | ast.AsyncFunctionDef

# Decorators that leave a function where it is. Any other hands it to somebody who calls it:
# a command line, a test framework, a library.
PASSIVE = {
    "abstractmethod", "asynccontextmanager", "cache", "cached_property", "classmethod",
    "contextmanager", "dataclass", "final", "lru_cache", "overload", "override", "property",
    "runtime_checkable", "setter", "staticmethod", "total_ordering",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Defined:
    """A name and where it gets its meaning."""

    module: str
    owner: str  # the class it belongs to; "" for a name of the module
    name: str
    inside: int = 0  # mentions within its own definition: a function that calls itself

    def __str__(self) -> str:
        return ".".join(part for part in (self.module, self.owner, self.name) if part)


class Code:
    """The modules of a package, or of programs that use it."""

    def __init__(self, sources: Mapping[str, str]) -> None:
        self.trees = {module: ast.parse(text) for module, text in sources.items()}

    @cached_property
    def nodes(self) -> dict[str, list[ast.AST]]:
        return {module: list(ast.walk(tree)) for module, tree in self.trees.items()}

    @cached_property
    def mentions(self) -> dict[str, Counter[str]]:
        """How often each module reads each name or attribute."""
        return {module: Counter(mentioned(nodes)) for module, nodes in self.nodes.items()}

    @cached_property
    def read_anywhere(self) -> Counter[str]:
        total: Counter[str] = Counter()
        for counts in self.mentions.values():
            total.update(counts)
        return total

    @cached_property
    def imports(self) -> dict[str, dict[str, set[str]]]:
        """What the names that each module imports stand for, as dotted names."""
        found: dict[str, dict[str, set[str]]] = {}
        for module, nodes in self.nodes.items():
            names = found[module] = defaultdict(set)
            for name, full in _imported(nodes):
                names[name].add(full)
        return found

    @cached_property
    def classes(self) -> dict[str, ast.ClassDef]:
        return {
            node.name: node
            for nodes in self.nodes.values()
            for node in nodes
            if isinstance(node, ast.ClassDef)
        }

    def used_names(self, package: Code) -> set[str]:
        """Dotted names that these modules read of the package's modules."""
        found: set[str] = set()
        for module, nodes in self.nodes.items():
            local = self.imports[module]
            for node in nodes:
                first, _, rest = _dotted(node).partition(".")
                for full in local.get(first, ()):
                    found.update(package.origins(f"{full}.{rest}".rstrip(".")))
        return found

    def origins(self, full: str) -> Iterator[str]:
        """A dotted name, and where the packages that pass it on have it from."""
        parts = full.split(".")
        for end in range(len(parts) - 1, 0, -1):
            module, name = ".".join(parts[:end]), parts[end]
            if module in self.trees:
                yield f"{module}.{name}"
                for passed_on in self.imports[module].get(name, ()):
                    if passed_on != full:
                        yield from self.origins(passed_on)
                return

    def loaded_modules(self) -> set[str]:
        """Modules that these import, or name in a text (to load them later, or to run them)."""
        found: set[str] = set()
        for nodes in self.nodes.values():
            for node in nodes:
                if isinstance(node, ast.Import):
                    found.update(alias.name for alias in node.names)
                elif isinstance(node, ast.ImportFrom) and node.module:
                    found.add(node.module)
                    found.update(f"{node.module}.{alias.name}" for alias in node.names)
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found.add(node.value)
        return found

    def defined(self) -> Iterator[Defined]:
        """Functions, classes and constants of modules, methods, and private attributes."""
        for module, tree in self.trees.items():
            for node in tree.body:
                yield from _definitions(module, "", node)
            for found in self.nodes[module]:
                if isinstance(found, ast.ClassDef):
                    for item in found.body:
                        if isinstance(item, Function):
                            yield from _definitions(module, found.name, item)
                    yield from _attributes(module, found)

    def may_be_called_by_a_library(self, owner: str) -> bool:
        """Whether a class has one above it that this code does not define."""
        if owner not in self.classes:
            return owner not in {"object", "Generic", "Protocol"}
        bases = (_last(base) for base in self.classes[owner].bases)
        return any(self.may_be_called_by_a_library(base) for base in bases if base != owner)


def unused(code: Code, users: Code, public: Iterable[str]) -> Iterator[Defined]:
    """What is defined and used nowhere.

    `users` are other programs whose use counts. `public` are dotted names that people import:
    these, and the public methods of such classes, count as used.
    """
    offered = {origin for name in public for origin in code.origins(name)}
    used = code.used_names(code) | users.used_names(code) | offered
    for one in code.defined():
        if one.name.startswith("__"):
            continue
        if not one.owner:
            if str(one) not in used and code.mentions[one.module][one.name] <= one.inside:
                yield one
        elif code.read_anywhere[one.name] <= one.inside and not users.read_anywhere[one.name]:
            private = one.name.startswith("_")
            owner = f"{one.module}.{one.owner}"
            if private or not (owner in offered or code.may_be_called_by_a_library(one.owner)):
                yield one


def unused_modules(code: Code, users: Code, entry_points: Iterable[str]) -> set[str]:
    """Modules that neither the package nor its users import."""
    loaded = code.loaded_modules() | users.loaded_modules() | set(entry_points)
    packages = {name.rpartition(".")[0] for name in code.trees}
    return set(code.trees) - loaded - packages


def mentioned(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Names and attributes that are read, and texts given to `getattr`."""
    for node in nodes:
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            yield node.attr
        elif isinstance(node, ast.Call) and _last(node.func) in {"getattr", "attrgetter"}:
            for argument in node.args:
                if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                    yield argument.value


def _imported(nodes: Iterable[ast.AST]) -> Iterator[tuple[str, str]]:
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.asname:
                    yield alias.asname, alias.name
                else:
                    first = alias.name.partition(".")[0]
                    yield first, first
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                yield alias.asname or alias.name, f"{node.module}.{alias.name}"


def _definitions(module: str, owner: str, node: ast.stmt) -> Iterator[Defined]:
    if isinstance(node, Function | ast.ClassDef):
        if all(_last(item) in PASSIVE for item in node.decorator_list):
            inside = sum(name == node.name for name in mentioned(ast.walk(node)))
            yield Defined(module, owner, node.name, inside)
    elif isinstance(node, ast.Assign | ast.AnnAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        for target in targets:
            for item in target.elts if isinstance(target, ast.Tuple) else [target]:
                if isinstance(item, ast.Name):
                    yield Defined(module, owner, item.id)
    elif isinstance(node, ast.If | ast.Try):
        for inner in node.body:
            yield from _definitions(module, owner, inner)


def _attributes(module: str, node: ast.ClassDef) -> Iterator[Defined]:
    """Private attributes that the class or its methods assign."""
    names: dict[str, None] = {}
    for item in node.body:
        if isinstance(item, ast.Assign | ast.AnnAssign):
            names.update((one.name, None) for one in _definitions(module, "", item))
    for inner in ast.walk(node):
        if (
            isinstance(inner, ast.Attribute)
            and isinstance(inner.ctx, ast.Store)
            and _last(inner.value) == "self"
        ):
            names[inner.attr] = None
    for name in names:
        if name.startswith("_"):
            yield Defined(module, node.name, name)


def _dotted(node: ast.AST) -> str:
    """`a.b.c` of names and attributes that are read, "" for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        before = _dotted(node.value)
        return f"{before}.{node.attr}" if before else ""
    return ""


def _last(node: ast.expr) -> str:
    """`c` of `a.b.c`, `a.b.c(...)` and `a.b.c[...]`."""
    if isinstance(node, ast.Call):
        return _last(node.func)
    if isinstance(node, ast.Subscript):
        return _last(node.value)
    return str(getattr(node, "attr", getattr(node, "id", "")))
