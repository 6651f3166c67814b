"""Base classes of all errors."""

from __future__ import annotations

__all__ = [
    "ConfigError",
    "MillstreamError",
    "MissingExtra",
]


class MillstreamError(Exception):
    """Base of everything Millstream raises on purpose."""


class ConfigError(MillstreamError, ValueError):
    """A setting, option or argument is wrong; nothing was changed."""


class MissingExtra(ConfigError, ImportError):
    """An optional dependency is not installed; the message has the pip line."""

    def __init__(self, extra: str, module: str) -> None:
        self.extra = extra
        self.module = module
        super().__init__(
            f"this needs the module '{module}', which is not installed: "
            f"pip install 'millstream[{extra}]'"
        )
