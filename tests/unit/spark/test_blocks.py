"""Texts at many positions of a block are found as `startswith` finds them one by one."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream.spark.source.blocks import Words, cut


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_texts_of_any_length_are_found_where_they_are(data: st.DataObject) -> None:
    letters = st.text("ab", max_size=90).map(str.encode)
    text = data.draw(letters.filter(bool))
    parts = data.draw(st.lists(letters | st.just(text) | st.just(text[:-1]), max_size=6))
    block = b"".join(parts)
    positions = np.arange(len(block) + 1)
    found = Words(np.frombuffer(block, np.uint8)).match(positions, text)
    assert found.tolist() == [block.startswith(text, at) for at in positions]


def test_pieces_are_cut_out_in_order() -> None:
    found = cut(b"one two  three", np.array([0, 4, 8, 9]), np.array([3, 7, 8, 14]))
    assert found.to_pylist() == [b"one", b"two", b"", b"three"]
    assert cut(b"", np.array([], np.int64), np.array([], np.int64)).to_pylist() == []
