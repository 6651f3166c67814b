"""Ids of aggregates as subjects. Pure.

The dots of an id separate its parts, and each part is one token of the subject, so the broker can
choose by the first part (the category) or by any pattern of parts:

>>> subject_of("courses", "course-1.bob"), id_of("course-1.bob")
('courses.course-1.bob', 'course-1.bob')
"""

from __future__ import annotations

from millstream.errors import ConfigError
from millstream.events.subject import key_of_token, key_token

__all__ = ["check_id", "id_of", "matches_pattern", "pattern_of", "subject_of", "tokens_of"]


def check_id(id: str) -> str:
    """The id if it is text; else a ConfigError that says how to write it."""
    if not isinstance(id, str):
        raise ConfigError(
            f"an aggregate's id is text, found {type(id).__name__}. Convert it: str({id!r:.40})"
        )
    if not id:
        raise ConfigError("an aggregate's id is text of at least one character, found ''")
    return id


def tokens_of(id: str) -> str:
    """The tokens of an id, joined by dots; reversible.

    >>> tokens_of("a.b"), tokens_of("a b"), tokens_of("a..b"), tokens_of("_x")
    ('a.b', 'a=20b', 'a.=.b', '=5Fx')
    """
    token = key_token(check_id(id))  # refuses what is too long
    return ".".join(map(key_token, id.split("."))) if "." in id else token


def id_of(tokens: str) -> str:
    """The id that tokens stand for.

    >>> id_of("a=20b"), id_of("a.=.b"), id_of("=5Fx")
    ('a b', 'a..b', '_x')
    """
    if "=" not in tokens:
        return tokens
    return ".".join(key_of_token(token.encode()) or "" for token in tokens.split("."))


def subject_of(prefix: str, id: str) -> str:
    """The subject of an aggregate in a partition."""
    return f"{prefix}.{tokens_of(id)}"


def pattern_of(pattern: str) -> str:
    """The tokens of a pattern of ids: `*` stands for one part, `>` at the end for one or more.

    >>> pattern_of("course-1.*"), pattern_of("a b.>")
    ('course-1.*', 'a=20b.>')
    """
    parts = check_id(pattern).split(".")
    wild = [part in ("*", ">") for part in parts]
    if ">" in parts[:-1]:
        raise ConfigError(f"pattern {pattern!r}: '>' is only allowed as the last part")
    return ".".join(
        part if is_wild else key_token(part) for part, is_wild in zip(parts, wild, strict=True)
    )


def matches_pattern(pattern: str, id: str) -> bool:
    """Whether an id matches a pattern of ids.

    >>> matches_pattern("course-1.*", "course-1.bob"), matches_pattern("a.>", "b.c")
    (True, False)
    """
    wanted, found = pattern_of(pattern).split("."), tokens_of(id).split(".")
    for index, token in enumerate(wanted):
        if token == ">":
            return len(found) > index
        if index >= len(found) or token not in ("*", found[index]):
            return False
    return len(wanted) == len(found)
