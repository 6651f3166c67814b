"""The picture of the architecture is drawn from the layer table and is up to date."""

from __future__ import annotations

from xml.etree import ElementTree

from tools.architecture_picture import PICTURE, arrows, draw, levels, rooms


def test_the_picture_is_up_to_date() -> None:
    assert PICTURE.read_text() == draw(), "run python -m tools.architecture_picture"


def test_it_is_well_formed_and_names_every_room() -> None:
    words = {node.text for node in ElementTree.fromstring(draw()).iter() if node.text}
    assert rooms().keys() <= words


def test_a_room_is_above_everything_it_imports() -> None:
    graph = rooms()
    height = {room: number for number, row in enumerate(levels(graph)) for room in row}
    assert all(height[room] > height[target] for room, target in arrows(graph))


def test_what_follows_from_other_arrows_is_left_out() -> None:
    graph = {"a": {"b", "c"}, "b": {"c"}, "c": set()}
    assert arrows(graph) == [("a", "b"), ("b", "c")]
