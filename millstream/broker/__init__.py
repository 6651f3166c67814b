"""Runs nats-server: one embedded process, a local cluster, or a broker in the background."""

from millstream.lazy import lazy_names

__all__, __getattr__, __dir__ = lazy_names(__name__, __file__)
