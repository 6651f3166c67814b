"""What a misspelled name probably means, for the messages of errors. Pure.

>>> near_names("orderz", ["orders", "payments"])
['orders']
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any, Final, TypeVar

from millstream.errors import ConfigError, MillstreamError

__all__ = [
    "check_known",
    "did_you_mean",
    "near_names",
    "one_of",
    "propose",
    "proposed_name",
    "settings_from",
]

# Comparing more names than this takes seconds, and nobody would read a longer list.
COMPARED_MAX: Final = 10_000
LISTED_MAX: Final = 40
SIMILAR: Final = 0.6  # of 1.0; below, a proposal is more often wrong than right

S = TypeVar("S")


def near_names(name: str, known: Iterable[str], most: int = 3) -> list[str]:
    """The known names that are most like this one, best first; upper case makes no difference."""
    import difflib  # only a program that has made a mistake needs it

    plain = {one.lower(): one for one in islice(known, COMPARED_MAX)}
    near = difflib.get_close_matches(name.lower(), plain, n=most, cutoff=SIMILAR)
    return [plain[one] for one in near]


def did_you_mean(name: str, known: Iterable[str], most: int = 1) -> str:
    """The question `did you mean 'orders'?`, or "" when no known name is near."""
    near = [f"'{one}'" for one in near_names(name, known, most)]
    return f"did you mean {' or '.join(near)}?" if near else ""


def one_of(name: str, known: Iterable[str], what: str = "setting") -> str:
    """What to write instead of an unknown name: the near one, or else those that there are."""
    names = sorted(known)
    listed = ", ".join(names[:LISTED_MAX]) + (", ..." if len(names) > LISTED_MAX else "")
    return did_you_mean(name, names) or f"the {what}s are {listed}"


def proposed_name(name: object, longest: int) -> str | None:
    """A name of letters, digits, `_` and `-` that is like one with other characters, if any is.

    >>> proposed_name("orders.eu", 200), proposed_name("_Menü du jour!", 200), proposed_name("", 9)
    ('orders-eu', 'Menu-du-jour', None)
    """
    if not isinstance(name, str):
        return None
    # Accents become characters of their own, which are left out.
    plain = unicodedata.normalize("NFKD", name[: 4 * longest]).encode("ascii", "ignore").decode()
    found = re.sub("[^A-Za-z0-9_-]+", "-", plain).lstrip("_-")[:longest].rstrip("-")
    return found or None


def check_known(given: Iterable[str], known: Iterable[str], what: str = "setting") -> None:
    """Refuse a name that is not known: `unknown setting 'a': did you mean 'b'?`."""
    names = set(known)
    for name in given:
        if name not in names:
            raise ConfigError(f"unknown {what} '{name}': {one_of(name, names, what)}")


def propose(error: MillstreamError, name: str, known: Iterable[str]) -> None:
    """Say in an error that a name was not found which ones are near, in place of other advice."""
    question = did_you_mean(name, known, most=2)
    if question:
        text = str(error).removesuffix(f". {getattr(error, 'advice', '')}")
        error.args = (f"{text}. {question[0].upper()}{question[1:]}", *error.args[1:])


def settings_from(
    kind: type[S], settings: S | None, values: Mapping[str, Any], also: Iterable[str] = ()
) -> S | None:
    """The settings of a call that takes them as one value or as keywords; None: neither given.

    `also` names the other keywords of the call, which may be the ones that were meant.
    """
    if settings is not None and not isinstance(settings, kind):
        raise ConfigError(
            f"settings: {type(settings).__name__} is not {kind.__name__}. "
            f"Give a {kind.__name__}, or its fields as keywords"
        )
    if not values:
        return settings
    if settings is not None:
        raise ConfigError(f"give {kind.__name__} or keywords ({', '.join(values)}), not both")
    check_known(values, [*kind.__dataclass_fields__, *also])  # type: ignore[attr-defined]
    return kind(**values)
