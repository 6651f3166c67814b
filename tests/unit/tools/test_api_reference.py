"""The API reference has every public name, once, and is up to date."""

from __future__ import annotations

import millstream
from millstream import TopicSettings
from tools.api_reference import PAGE, SECTIONS, fields_table, given_type, render


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text() == render(), "run python -m tools.api_reference"


def test_every_public_name_is_in_one_section() -> None:
    names = [name for _, names in SECTIONS.values() for name in names if ":" not in name]
    assert sorted(names) == sorted(
        {*vars(millstream)["__all__"]} - {"MillstreamError", "__version__", "blocking"}
    )


def test_every_call_says_what_it_does() -> None:
    members = [line for line in render().splitlines() if line.startswith("- **`")]
    assert members
    assert not [line for line in members if line.endswith("`**")]


def test_every_setting_of_a_topic_has_its_type_and_meaning() -> None:
    rows = [line for line in fields_table(TopicSettings) if line.startswith("| `")]
    assert len(rows) > 20
    assert not [row for row in rows if "Setting[" in row or row.endswith("|  |")]


def test_a_field_that_converts_is_shown_with_what_it_takes() -> None:
    assert given_type("Setting[Mapping[str, str], FrozenMetadata]") == "Mapping[str, str]"
    assert given_type("tuple[str, ...] | None") == "tuple[str, ...] | None"
