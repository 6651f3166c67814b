"""A name that is refused is answered with one that is valid."""

from __future__ import annotations

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from millstream.errors import ConfigError, PipelineInvalid
from millstream.events.subject import NAME_CHARS_MAX, check_name, is_name
from millstream.messaging.topics.stream_config import check_stream_name
from millstream.nearest import proposed_name
from millstream.pipelines.declare import check_name as check_pipeline_name
from millstream.spark.options import sink_options, source_options


@given(st.text(max_size=300))
@example("." * 300)
@example("ﷺ" * 200)
def test_what_is_proposed_is_valid_and_a_valid_name_stays(name: str) -> None:
    proposed = proposed_name(name, NAME_CHARS_MAX)
    assert proposed is None or is_name(proposed)
    if is_name(name) and not name.endswith("-"):
        assert proposed == name
    if re.search("[A-Za-z0-9]", name[:NAME_CHARS_MAX]):
        assert proposed is not None


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("orders.eu", "'orders.eu': a dot separates the tokens of a subject. Use 'orders-eu'"),
        ("my orders", "start with a letter or digit, such as 'my-orders'"),
        ("_orders", "start with a letter or digit, such as 'orders'"),
        ("größe.*", "such as 'groe'"),
        ("x" * 201, f"such as '{'x' * 200}'"),
        ("!?", "use 1 to 200 of A-Z a-z 0-9 _ - and start with a letter or digit"),
        (7, "use 1 to 200"),
    ],
)
def test_the_refusal_of_a_name_says_why_and_proposes_one(name: str, told: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check_name("topic", name)
    assert told in str(refused.value)


def test_a_topic_that_is_opened_by_such_a_name_is_refused_the_same_way() -> None:
    with pytest.raises(ConfigError, match=r"a dot separates .* Use 'orders-eu'"):
        check_stream_name("orders.eu")


def test_spark_and_pipelines_propose_the_same() -> None:
    for options in ({"topic": "orders.eu"}, {"table": "orders.eu"}):
        with pytest.raises(ConfigError, match="Use 'orders-eu'"):
            sink_options(options)
    with pytest.raises(ConfigError, match="Use 'by-shop'"):
        source_options({"subscribe": "orders", "groupId": "by.shop"}, batch=False)
    with pytest.raises(PipelineInvalid, match="such as 'orders-eu'"):
        check_pipeline_name("function", "orders.eu")
    with pytest.raises(PipelineInvalid, match=r"a letter first$"):
        check_pipeline_name("function", "7.a")
