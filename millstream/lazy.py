"""Packages whose names are imported when they are first used.

Importing one light module of a room (`millstream.messaging.topics.settings`, say) also runs the
room's `__init__.py`. If that imported everything the room offers, a command that only needs the
names of some settings would load the complete client. Such a room therefore lists its names in
`__init__.pyi`, where type checkers and editors look, and its `__init__.py` is two lines:

    __all__, __getattr__, __dir__ = lazy_names(__name__, __file__)
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

__all__ = ["lazy_names"]

Names = tuple[list[str], Callable[[str], Any], Callable[[], list[str]]]


def lazy_names(package: str, file: str) -> Names:
    """`__all__`, `__getattr__` and `__dir__` of a package, from the imports of its stub.

    A package inside this one (`from millstream import blocking`) is loaded, but not in `__all__`.
    """
    # By the loader, not from the disk: on Spark's executors this package is in a zip archive. Its
    # path is ./name.zip there, which the loader takes only as it is.
    loader: Any = getattr(sys.modules[package].__spec__, "loader", None)
    stub = ast.parse(loader.get_data(f"{file}i"))
    homes = {
        alias.name: str(node.module)
        for node in stub.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }

    def load(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        if homes[name] == package:
            return import_module(f"{package}.{name}")
        value = getattr(import_module(homes[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    listed = sorted(name for name, home in homes.items() if home != package)
    return listed, load, lambda: sorted({*vars(sys.modules[package]), *homes})
