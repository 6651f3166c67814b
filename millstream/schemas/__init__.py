"""Schemas: one type model, every format to and from it, codecs and compatibility rules."""

from millstream.lazy import lazy_names

__all__, __getattr__, __dir__ = lazy_names(__name__, __file__)
