"""The installed version."""

from __future__ import annotations

from importlib.metadata import version
from typing import Final

__all__ = ["__version__"]

__version__: Final = version("millstream")
