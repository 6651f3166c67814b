"""The libraries of extras, loaded when first used."""

from __future__ import annotations

import importlib
from typing import Any

from millstream import errors

__all__ = ["needed"]


def needed(module: str, extra: str = "schemas") -> Any:
    """The module, or `MissingExtra` with the pip command if its library is not installed."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        library = module.partition(".")[0]
        # Another missing module is a fault of the library itself.
        if (error.name or "").partition(".")[0] != library:
            raise
        raise errors.MissingExtra(extra, module) from None
