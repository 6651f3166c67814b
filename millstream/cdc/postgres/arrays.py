"""Reads PostgreSQL's text of one-dimensional arrays: {1,NULL,"a\\"b"}. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

__all__ = ["array_items", "split_arrays"]

# One item: in quotes with any character escaped, or bare. Bare ones have no spaces at their ends
# as PostgreSQL writes them; what else is in them is up to the item's type.
_ITEM: Final = re.compile(r'"((?:[^"\\]|\\.)*+)"|([^,{}"\\]++)', re.DOTALL)
_ESCAPED: Final = re.compile(r"\\(.)", re.DOTALL)
_NULL: Final = "NULL"  # bare; in quotes it is a text
_HARD: Final = r'["\\\[]|^\{\{'  # what the quick way does not understand


def array_items(text: str) -> list[str | None] | None:
    """The items of an array; None if it has several dimensions, other bounds, or is no array.

    >>> array_items('{1,NULL,"a\\\\"b","NULL",""}'), array_items("{}"), array_items("{{1},{2}}")
    (['1', None, 'a"b', 'NULL', ''], [], None)
    """
    if len(text) < 2 or text[0] != "{" or text[-1] != "}":
        return None
    if text == "{}":
        return []
    items: list[str | None] = []
    at, last = 1, len(text) - 1
    while True:
        found = _ITEM.match(text, at, last)
        if found is None:
            return None
        quoted, bare = found.groups()
        if quoted is not None:
            items.append(_ESCAPED.sub(r"\1", quoted) if "\\" in quoted else quoted)
        else:
            items.append(None if bare == _NULL else bare)
        at = found.end()
        if at == last:
            return items
        if text[at] != ",":
            return None
        at += 1


def split_arrays(texts: pa.StringArray) -> tuple[pa.StringArray, pa.Array] | int:
    """All items of many arrays, and the offsets of each array in them (null for a null).

    A number instead is the index of the first text that is not a one-dimensional array.
    """
    if len(texts) == 0 or not pc.any(pc.match_substring_regex(texts, _HARD)).as_py():
        quick = _split_plain(texts)
        if quick is not None:
            return quick
    items: list[str | None] = []
    offsets: list[int | None] = []
    for index, text in enumerate(texts.to_pylist()):
        if text is None:
            offsets.append(None)
            continue
        found = array_items(text)
        if found is None:
            return index
        offsets.append(len(items))
        items.extend(found)
    return pa.array(items, pa.string()), pa.array([*offsets, len(items)], pa.int32())


def _split_plain(texts: pa.StringArray) -> tuple[pa.StringArray, pa.Array] | None:
    """The same for arrays without quotes, without a loop; None: they are not that plain."""
    starts, ends = pc.starts_with(texts, "{"), pc.ends_with(texts, "}")
    if not pc.all(pc.and_(starts, ends), min_count=0).as_py():
        return None
    inner = pc.utf8_slice_codeunits(texts, 1, -1)
    if pc.any(pc.match_substring_regex(inner, r"[{}]|^,|,$|,,"), min_count=0).as_py():
        return None
    lists = pc.split_pattern(inner, ",")
    items = lists.flatten()
    lengths = pc.list_value_length(lists)
    # An empty array is split into one empty text.
    empty = pc.equal(inner, "")
    if pc.any(empty, min_count=0).as_py():
        items = items.filter(pc.not_equal(items, ""))
        lengths = pc.if_else(empty, pa.scalar(0, pa.int32()), lengths)
    items = pc.if_else(pc.equal(items, _NULL), pa.scalar(None, pa.string()), items)
    counts: Sequence[int] = pc.fill_null(lengths, 0).to_numpy(zero_copy_only=False)
    offsets = np.zeros(len(texts) + 1, np.int32)
    np.cumsum(counts, out=offsets[1:])
    nulls = np.append(pc.is_null(texts).to_numpy(zero_copy_only=False), False)
    return items, pa.array(offsets, pa.int32(), mask=nulls)
