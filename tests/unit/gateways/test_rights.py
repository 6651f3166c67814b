"""What a user may do with topics and groups, from the subjects it may publish to."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.broker import Role, User
from millstream.broker.roles import boundary_of, permissions_of
from millstream.gateways.rights import Rights, TopicSubjects, base_account, rights_from_answer
from millstream.settings import Secret

ORDERS = TopicSubjects(("orders",), ("orders",))
OTHER = TopicSubjects(("other-0", "other-1"), ("other",))
GUARDED = TopicSubjects(("safe",), ("_guarded.safe",))


def of_user(**values: Any) -> Rights:
    """The rights of a user of the broker, as the server would say them."""
    user = User("ann", Secret("x"), **values)
    rules, bounds = permissions_of(user), boundary_of(user)
    account = user.account if bounds is None else bounds.account
    return Rights("ann", account, rules.publish, rules.publish_deny)


def deeds(rights: Rights, topic: TopicSubjects) -> str:
    """What may be done with a topic, in letters."""
    may = {
        "r": rights.may_read(topic),
        "w": rights.may_write(topic),
        "m": rights.may_manage(topic),
        "c": rights.may_create(topic.streams[0]),
    }
    return "".join(letter for letter, allowed in may.items() if allowed)


@pytest.mark.parametrize(
    ("values", "topic", "allowed"),
    [
        ({"role": Role.ADMIN}, ORDERS, "rwmc"),
        ({"role": Role.ADMIN}, GUARDED, "rwmc"),
        ({"role": Role.APP}, ORDERS, "rwc"),
        ({"role": Role.APP}, GUARDED, "rwc"),  # through its guard
        ({"role": Role.TRUSTED}, GUARDED, "rwc"),
        ({"role": Role.READER}, ORDERS, "r"),
        ({"role": Role.READER}, GUARDED, "r"),
        ({"topics": ("orders",)}, ORDERS, "rw"),
        ({"topics": ("orders",)}, OTHER, ""),
        ({"topics": ("other:2",)}, OTHER, "rw"),
        ({"topics": ("other:1",)}, OTHER, "w"),  # it may not read all partitions
        ({"topics": ("safe",)}, GUARDED, "rw"),
        ({"topics": ("order",)}, ORDERS, ""),
    ],
)
def test_a_role_allows_at_a_gateway_what_it_allows_at_the_broker(
    values: dict[str, Any], topic: TopicSubjects, allowed: str
) -> None:
    assert deeds(of_user(**values), topic) == allowed


def test_a_user_joins_groups_of_its_own_and_those_it_was_given() -> None:
    bounded = of_user(topics=("orders",), subscriptions=(("orders", "audit"),))
    reader = of_user(role=Role.READER)
    groups = ("ann", "ann.x", "audit", "anna", "bob.x", "", "audit.x")
    assert [group for group in groups if bounded.may_join(group)] == ["ann", "ann.x", "audit"]
    assert [group for group in groups if reader.may_join(group)] == ["ann", "ann.x"]
    assert all(of_user(role=Role.APP).may_join(group) for group in groups)


def test_a_bounded_user_belongs_to_the_account_of_its_topics() -> None:
    assert of_user(topics=("orders",)).belongs_to("main")
    assert of_user().belongs_to("main")
    assert not of_user().belongs_to("acme")
    assert not of_user(role=Role.READER, account="acme").belongs_to("main")
    assert not Rights("ann", "main:bob").belongs_to("main")
    assert base_account("main:ann", "ann") == "main"
    assert base_account("main", "ann") == "main"


@pytest.mark.parametrize(
    ("rule", "subject", "allowed"),
    [
        ("a.b", "a.b", True),
        ("a.b", "a.c", False),
        ("a.b", "a", False),
        ("a", "a.b", False),
        ("a.*", "a.b", True),
        ("a.*", "a.*", True),
        ("a.*", "a.>", False),
        ("a.*", "a.b.c", False),
        ("a.>", "a.b.c", True),
        ("a.>", "a.*.c", True),
        ("a.>", "a.>", True),
        ("a.>", "a", False),
        (">", "a.b", True),
        (">", ">", True),
        ("*", ">", False),
        ("*.b", "*.b", True),
        ("a.b", "*.b", False),
    ],
)
def test_a_rule_allows_what_is_within_it(rule: str, subject: str, allowed: bool) -> None:
    assert Rights("ann", "main", (rule,)).may_publish(subject) is allowed


@pytest.mark.parametrize(
    ("rule", "subject", "allowed"),
    [
        ("a.b", "a.b", False),
        ("a.b", "a.>", False),
        ("a.b", "a.*", False),
        ("a.>", "a.b", False),
        ("a.>", "a", True),
        ("a.*", "a.b.c", True),
        ("a.b", "a.c", True),
        (">", "a", False),
    ],
)
def test_a_prohibition_forbids_what_it_touches(rule: str, subject: str, allowed: bool) -> None:
    assert Rights("ann", "main", None, (rule,)).may_publish(subject) is allowed


TOKENS = st.lists(st.sampled_from(["a", "b", "*"]), min_size=1, max_size=4).map(".".join)
PATTERNS = st.one_of(TOKENS, TOKENS.map(lambda text: f"{text}.>"), st.just(">"))
SUBJECTS = st.lists(st.sampled_from(["a", "b"]), min_size=1, max_size=5).map(".".join)


@given(st.lists(PATTERNS, max_size=4), PATTERNS, SUBJECTS)
def test_what_is_allowed_is_never_more_than_the_rules_say(
    rules: list[str], pattern: str, subject: str
) -> None:
    """If a pattern is allowed, each subject that it stands for is; none is if all are denied."""
    allowing = Rights("ann", "main", tuple(rules))
    if allowing.may_publish(pattern) and Rights("", "", (pattern,)).may_publish(subject):
        assert allowing.may_publish(subject)
    denying = Rights("ann", "main", None, tuple(rules))
    if denying.may_publish(pattern) and Rights("", "", (pattern,)).may_publish(subject):
        assert denying.may_publish(subject)
    assert not allowing.may_publish(pattern) or rules


def test_the_answer_of_the_server_is_read() -> None:
    answer = {
        "user": "ann",
        "account": "main",
        "permissions": {"publish": {"allow": ["orders.>"], "deny": ["orders.x"]}, "subscribe": {}},
    }
    assert rights_from_answer(answer) == Rights("ann", "main", ("orders.>",), ("orders.x",))
    assert rights_from_answer({"user": "boss", "account": "main"}).unlimited
    assert not rights_from_answer(answer).unlimited
    assert rights_from_answer({"permissions": {"publish": {"deny": [">"]}}}).publish is None
    assert not rights_from_answer({"permissions": {"publish": {"deny": [">"]}}}).may_publish("a")


def test_users_of_topics_with_many_partitions_are_answered() -> None:
    """With one comparison for each rule and partition this would take minutes."""
    rights = of_user(topics=("big:1024",))
    streams = tuple(f"big-{number}" for number in range(1024))
    assert rights.publish is not None
    assert len(rights.publish) > 10_000
    assert rights.may_read(TopicSubjects(streams, ("big",)))
    assert not rights.may_read(TopicSubjects(("small",), ("small",)))
