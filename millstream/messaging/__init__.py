"""What application code calls: connections, subjects, topics, events, subscriptions."""

from millstream.lazy import lazy_names

__all__, __getattr__, __dir__ = lazy_names(__name__, __file__)
