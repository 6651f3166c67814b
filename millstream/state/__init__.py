"""Answers that are rebuilt from topics: tables."""

from millstream.state.table import Change, Entry, Table

__all__ = ["Change", "Entry", "Table"]
