"""The decisions of fenced writing, with a broker of a few lines and acks that get lost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.errors import (
    ConfigError,
    DataLoss,
    FencedOut,
    MillstreamError,
    PublishError,
    Unconfirmed,
    WrongSequence,
)
from millstream.events.fence import EXPECTED_HEADER, NUMBER_HEADER, FenceState
from millstream.events.fence_writer import (
    CLAIMS_MAX,
    RACES_MAX,
    Answer,
    FenceWriter,
    Outcome,
    Publish,
    ReadLast,
    Request,
    Steps,
    unit_messages,
)
from millstream.events.packs.pack import EncodedPack, empty
from millstream.wire.api import ErrorCode, PubAck
from millstream.wire.batch import BATCH_MESSAGES_MAX
from millstream.wire.message import OutgoingMessage, StoredMessage
from millstream.wire.protocol import parse_headers

T = TypeVar("T")
FENCE = "t._pack.w"


class Broker:
    """A stream in memory, with the check of the expected sequence."""

    def __init__(self) -> None:
        self.messages: list[StoredMessage] = []
        self.faults: list[str] = []  # of the next publishes: "lost ack", "unconfirmed", "lost"

    def last(self, subject: str) -> StoredMessage | None:
        return next((m for m in reversed(self.messages) if m.subject == subject), None)

    def ask(self, request: Request) -> Answer:
        if isinstance(request, ReadLast):
            return self.last(request.subject)
        fault = self.faults.pop(0) if self.faults else ""
        if fault == "lost":
            raise Unconfirmed("it never arrived")
        ack = self.store(request.messages)
        if fault == "unconfirmed":
            raise Unconfirmed("no ack, however often it was sent")
        if fault == "lost ack":
            return self.store(request.messages)  # as a client sends it again
        return ack

    def store(self, messages: Sequence[OutgoingMessage]) -> PubAck:
        for message in messages:
            expected = parse_headers(message.headers).get(EXPECTED_HEADER)
            last = self.last(message.subject.decode())
            if expected is not None and int(expected) != (last.sequence if last else 0):
                code = ErrorCode.WRONG_LAST_SEQUENCE
                raise WrongSequence(400, code, "wrong last sequence")
        for message in messages:
            subject, headers, payload = message
            number = len(self.messages) + 1
            stored = StoredMessage(subject.decode(), number, headers, bytes(payload), "")
            self.messages.append(stored)
        return PubAck(seq=len(self.messages))

    def run(self, steps: Steps[T]) -> T:
        try:
            request = next(steps)
            while True:
                try:
                    answer = self.ask(request)
                except MillstreamError as error:
                    request = steps.throw(error)
                else:
                    request = steps.send(answer)
        except StopIteration as end:
            value: T = end.value
            return value

    @property
    def numbers(self) -> list[int]:
        """The unit numbers on the fence, in the order they were stored."""
        found = [m for m in self.messages if m.subject == FENCE]
        return [int(parse_headers(m.headers)[NUMBER_HEADER]) for m in found]


@pytest.fixture
def broker() -> Broker:
    return Broker()


def claimed(broker: Broker, owner: str = "a") -> FenceWriter:
    writer = FenceWriter(FENCE, "w")
    broker.run(writer.claim(owner))
    return writer


def test_a_claim_and_units_follow_each_other(broker: Broker) -> None:
    writer = claimed(broker)
    assert writer.state == FenceState(1, 1, 1, 0, "", "a")
    assert broker.run(writer.store([empty()], 10, "note")).sequence == 2
    assert broker.run(writer.store([], 20)).note == "note"  # kept until it is replaced
    assert broker.numbers == [1, 2, 3]
    assert claimed(broker, "b").state == FenceState(4, 2, 4, 20, "note", "b")


def test_a_writer_that_was_taken_over_stores_nothing(broker: Broker) -> None:
    old = claimed(broker)
    new = claimed(broker, "b")
    before = old.state
    with pytest.raises(FencedOut):
        broker.run(old.store([empty()], 1))
    assert old.state == before
    broker.run(new.store([empty()], 1))
    assert broker.numbers == [1, 2, 3]


@pytest.mark.parametrize("fault", ["lost ack", "unconfirmed"])
def test_a_unit_whose_ack_was_lost_is_recognised(broker: Broker, fault: str) -> None:
    writer = claimed(broker)
    broker.faults = [fault]
    assert broker.run(writer.store([empty()], 5)) == FenceState(2, 1, 2, 5, "", "a")
    broker.run(writer.store([empty()], 6))
    assert broker.numbers == [1, 2, 3]


def test_a_claim_whose_ack_was_lost_is_recognised(broker: Broker) -> None:
    broker.faults = ["lost ack"]
    assert claimed(broker).state.epoch == 1
    assert broker.numbers == [1]


def test_a_unit_that_never_arrived_is_unconfirmed_and_can_be_stored_again(broker: Broker) -> None:
    writer = claimed(broker)
    broker.faults = ["lost"]
    with pytest.raises(Unconfirmed):
        broker.run(writer.store([empty()], 5))
    assert broker.run(writer.store([empty()], 5)).position == 5
    assert broker.numbers == [1, 2]


def test_a_log_that_lost_what_it_confirmed_is_reported(broker: Broker) -> None:
    writer = claimed(broker)
    broker.run(writer.store([empty()], 5))
    del broker.messages[-1]
    with pytest.raises(DataLoss, match="position 0"):
        broker.run(writer.store([empty()], 6))


def test_a_unit_is_not_mistaken_for_one_that_an_interrupted_call_stored(broker: Broker) -> None:
    writer = claimed(broker)
    interrupted = writer.store([empty()], 5)
    broker.ask(next(interrupted))  # stored; the caller is cancelled before its ack
    interrupted.close()
    with pytest.raises(PublishError, match="continue from position 5"):
        broker.run(writer.store([empty()], 9))
    assert broker.numbers == [1, 2]


def test_a_new_fence_starts_with_an_empty_pack(broker: Broker) -> None:
    first, twin = FenceWriter(FENCE, "w"), FenceWriter(FENCE, "w")
    state = broker.run(first.begin())
    assert state == first.state == FenceState(1, 0, 1)
    assert broker.run(twin.begin()) == state
    assert len(broker.messages) == 1


def test_attempts_that_start_a_fence_together_store_one_pack(broker: Broker) -> None:
    first, twin = FenceWriter(FENCE, "w"), FenceWriter(FENCE, "w")
    steps = twin.begin()
    assert isinstance(steps.send(broker.ask(next(steps))), Publish)  # it saw no fence
    state = broker.run(first.begin())
    assert isinstance(steps.throw(WrongSequence(400, 10071, "wrong")), ReadLast)
    with pytest.raises(StopIteration) as end:
        steps.send(broker.last(FENCE))
    assert end.value.value == twin.state == state
    assert len(broker.messages) == 1


def test_the_same_unit_of_another_attempt_is_found_and_a_different_one_refused(
    broker: Broker,
) -> None:
    """This fence is never claimed: units are distinguished only by their contents."""
    writer, twin = FenceWriter(FENCE, "w"), FenceWriter(FENCE, "w")
    state = broker.run(writer.begin())
    wanted = state.next(1, "rows=3")
    assert broker.run(twin.offer(wanted, [empty()])).outcome is Outcome.STORED
    same = broker.run(writer.offer(wanted, [empty()]))
    assert (same.outcome, same.state) == (Outcome.FOUND, wanted.stored_at(2))
    other = broker.run(writer.offer(state.next(1, "rows=4"), [empty()]))
    assert (other.outcome, other.state) == (Outcome.REFUSED, wanted.stored_at(2))
    assert len(broker.messages) == 2


def test_plain_messages_sent_along_with_a_fence_are_stored_before_it(broker: Broker) -> None:
    writer = FenceWriter(FENCE, "w")
    state = broker.run(writer.begin())
    plain = [OutgoingMessage(b"t.k%d" % n, b"", b"v") for n in range(2)]
    offer = broker.run(writer.offer(state.next(1), [], plain))
    assert offer.state.sequence == 4
    assert [m.subject for m in broker.messages] == [FENCE, "t.k0", "t.k1", FENCE]


class Rivals(Broker):
    """Another writer claims the name before each publish."""

    claims = 0

    def ask(self, request: Request) -> Answer:
        if isinstance(request, Publish):
            self.claims += 1
            last = super().run(FenceWriter(FENCE, "w").look())
            self.store(unit_messages(FENCE, "w", last.claimed(f"r{self.claims}"), [empty()]))
        return super().ask(request)


def test_a_name_that_others_keep_is_given_up_after_many_claims() -> None:
    broker = Rivals()
    with pytest.raises(FencedOut):
        broker.run(FenceWriter(FENCE, "w").claim("a"))
    assert broker.claims == CLAIMS_MAX > RACES_MAX


def test_a_unit_larger_than_the_server_stores_together_is_refused() -> None:
    packs: list[EncodedPack] = [empty()] * (BATCH_MESSAGES_MAX + 1)
    with pytest.raises(ConfigError, match="1,001 messages"):
        unit_messages(FENCE, "w", FenceState(), packs)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["first", "second"]),
            st.sampled_from(["claim", "store"]),
            st.sampled_from(["", "lost ack", "unconfirmed", "lost"]),
        ),
        max_size=25,
    )
)
def test_no_unit_is_stored_twice_or_after_a_takeover(steps: list[tuple[str, str, str]]) -> None:
    """Two writers of one name, in any order, with any ack lost."""
    broker = Broker()
    writers = {name: FenceWriter(FENCE, "w") for name in ("first", "second")}
    owner: str | None = None
    claims = 0
    confirmed: list[tuple[str, int]] = []
    for name, action, fault in steps:
        writer = writers[name]
        broker.faults = [fault]
        try:
            if action == "claim":
                claims += 1
                broker.run(writer.claim(f"{name}-{claims}"))
                owner = name
            elif writer.state.sequence:
                broker.run(writer.store([empty()], len(confirmed) + 1))
                assert owner == name
                confirmed.append((name, writer.state.number))
        except FencedOut:
            assert owner != name
        except Unconfirmed:
            assert fault == "lost"
    assert broker.numbers == list(range(1, len(broker.numbers) + 1))
    assert len(set(confirmed)) == len(confirmed)
