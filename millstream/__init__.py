"""Event streaming for Python: durable messaging in front, Spark pipelines behind.

Names are loaded from their rooms when they are first used, so `import millstream` stays light:
no pyspark and no pyarrow until something needs them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from millstream.errors import MillstreamError

if TYPE_CHECKING:
    from millstream.broker import Broker as Broker
    from millstream.broker import BrokerSettings as BrokerSettings
    from millstream.broker import Cluster as Cluster

    __version__: str

__all__ = ["Broker", "BrokerSettings", "Cluster", "MillstreamError", "__version__"]

# Public name -> the room that defines it. Every name of `__all__` but the error base is here.
_HOMES = {
    "Broker": "millstream.broker",
    "BrokerSettings": "millstream.broker",
    "Cluster": "millstream.broker",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        value: Any = version("millstream")
    elif name in _HOMES:
        from importlib import import_module

        value = getattr(import_module(_HOMES[name]), name)
    else:
        raise AttributeError(f"module 'millstream' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
