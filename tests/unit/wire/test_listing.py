"""When a list of streams or consumers is complete, with answers that a cluster gave."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.errors import IncompleteList
from millstream.wire import listing
from millstream.wire.api import StreamInfo
from millstream.wire.listing import Listing, Page

COMPLETE = b"""{"type":"io.nats.jetstream.api.v1.stream_list_response","total":2,"offset":0,
"limit":256,"streams":[{"config":{"name":"one"},"state":{"messages":7,"last_seq":7}},
{"config":{"name":"safe"},"state":{"messages":3,"last_seq":3}}]}"""
# A node was killed: the leader of `one` does not answer the node that makes the list.
LEADER_SILENT = b"""{"type":"io.nats.jetstream.api.v1.stream_list_response","total":2,"offset":0,
"limit":256,"streams":[{"config":{"name":"safe"},"state":{"messages":3,"last_seq":3},
"cluster":{"name":"millstream","leader":"n2","replicas":[{"name":"n0","current":true}]}}],
"missing":["one"]}"""
# It was stopped: the node that makes the list adds `one` itself, without its state.
NODE_STOPPED = b"""{"type":"io.nats.jetstream.api.v1.stream_list_response","total":2,"offset":0,
"limit":256,"streams":[{"config":{"name":"one"},"state":{"messages":0,"first_seq":0,
"first_ts":"0001-01-01T00:00:00Z","last_seq":0,"consumer_count":0},"cluster":{"name":"millstream",
"replicas":[{"name":"n1","current":false,"offline":true,"active":0}]}},
{"config":{"name":"safe"},"state":{"messages":3,"last_seq":3}}],"missing":["one"]}"""
UNSUPPORTED = b"""{"type":"io.nats.jetstream.api.v1.stream_list_response","total":2,"offset":0,
"limit":256,"streams":[{"config":{"name":"safe"},"state":{"messages":3,"last_seq":3}}],
"missing":["one"],"offline":{"one":"unsupported - required API level: 9"}}"""
NO_STREAMS = b"""{"type":"io.nats.jetstream.api.v1.stream_list_response","total":0,"offset":0,
"limit":256,"streams":[]}"""
CONSUMER_SILENT = b"""{"type":"io.nats.jetstream.api.v1.consumer_list_response","total":2,
"offset":0,"limit":256,"consumers":[{"stream_name":"one","name":"a"}],"missing":["b"]}"""


def page(answer: bytes) -> Page:
    return msgspec.json.decode(answer, type=Page)


def names(wanted: Listing[StreamInfo]) -> list[str]:
    return [info.config["name"] for info in wanted.rows]


def test_a_page_without_gaps_is_the_list() -> None:
    wanted = listing.streams()
    assert wanted.take(page(COMPLETE))
    assert wanted.complete
    assert names(wanted) == ["one", "safe"]


def test_no_streams_at_all_is_a_complete_list() -> None:
    wanted = listing.streams()
    assert wanted.take(page(NO_STREAMS))
    assert (wanted.complete, wanted.rows) == (True, [])


@pytest.mark.parametrize("answer", [LEADER_SILENT, NODE_STOPPED, UNSUPPORTED])
def test_a_page_that_names_missing_streams_is_requested_again(answer: bytes) -> None:
    wanted = listing.streams()
    first = dict(wanted.request)
    assert not wanted.take(page(answer))
    assert (wanted.short, wanted.complete, wanted.rows) == (True, False, [])
    assert wanted.request == first
    assert wanted.take(page(COMPLETE))
    assert (wanted.short, names(wanted)) == (False, ["one", "safe"])


def test_the_error_names_what_is_missing_and_why() -> None:
    wanted = listing.streams()
    wanted.take(page(UNSUPPORTED))
    error = wanted.incomplete(5)
    assert isinstance(error, IncompleteList)
    assert error.missing == {"one": "unsupported - required API level: 9"}
    assert "list of streams was not complete within 5 s" in str(error)
    assert "one (unsupported - required API level: 9)" in str(error)
    many = IncompleteList("streams", {f"s{number}": "" for number in range(9)}, "within 5 s")
    assert "s0, s1, s2, s3, s4 and 4 more" in str(many)


def test_a_missing_consumer_is_noticed() -> None:
    wanted = listing.consumers("one")
    assert wanted.verb == "CONSUMER.LIST.one"
    assert not wanted.take(page(CONSUMER_SILENT))
    assert "consumers of 'one'" in str(wanted.incomplete(5))
    assert wanted.incomplete(5).missing == {"b": ""}


def test_the_configuration_of_a_stream_whose_nodes_are_down_is_known() -> None:
    wanted = listing.streams("one.>", states=False)
    assert wanted.request == {"offset": 0, "subject": "one.>"}
    assert not wanted.take(page(LEADER_SILENT))  # its nodes are up: the answer lacks it
    assert wanted.take(page(NODE_STOPPED))
    assert (wanted.complete, names(wanted)) == (True, ["one", "safe"])


def test_fewer_rows_than_the_answer_itself_counts_are_not_a_list() -> None:
    wanted = listing.streams()
    short = page(COMPLETE)
    short.streams = (short.streams or [])[:1]
    assert not wanted.take(short)
    assert "1 of 2 (the server gave no name)" in str(wanted.incomplete(1))


def cut(existing: set[str], offset: int, limit: int) -> Page:
    """A page as the server cuts it; after the end it has no total."""
    there = sorted(existing)
    rows = [StreamInfo(config={"name": name}) for name in there[offset : offset + limit]]
    return Page(len(there) if rows else 0, min(offset, len(there)), limit, streams=rows)


@given(
    st.sets(st.text("abc", min_size=1, max_size=3), max_size=25),
    st.lists(st.tuples(st.booleans(), st.text("abc", min_size=1, max_size=3)), max_size=30),
    st.integers(2, 5),
)
def test_streams_that_come_and_go_between_pages_hide_no_other(
    existing: set[str], changes: list[tuple[bool, str]], limit: int
) -> None:
    """Whatever exists from the first page to the last is listed exactly once, in order."""
    throughout, ever = set(existing), set(existing)
    wanted = listing.streams()
    for _ in range(500):
        assert wanted.take(cut(existing, int(wanted.request["offset"]), limit))
        if wanted.complete:
            break
        for created, name in [changes.pop() for _ in range(min(3, len(changes)))]:
            (existing.add if created else existing.discard)(name)
            ever |= existing
            throughout &= existing
    found = names(wanted)
    assert wanted.complete
    assert found == sorted(set(found))
    assert throughout <= set(found) <= ever
