"""Change data capture: databases to topics, and topics to databases, exactly once."""

from millstream.lazy import lazy_names

__all__, __getattr__, __dir__ = lazy_names(__name__, __file__)
