"""Which copies of a message are of use, by their ack addresses."""

from __future__ import annotations

import pytest

from millstream.messaging.subscriptions import copies as module
from millstream.messaging.subscriptions.copies import Copies
from millstream.wire.api import AckAddress, parse_ack_address


def reply(sequence: int, delivered: int, number: int) -> bytes:
    return b"$JS.ACK.s.c.%d.%d.%d.1700000000000000000.0" % (delivered, sequence, number)


def address(sequence: int, delivered: int, number: int) -> AckAddress:
    return parse_ack_address(reply(sequence, delivered, number))


def test_a_later_copy_of_what_was_settled_is_known() -> None:
    copies = Copies()
    copies.settled(reply(7, 1, 3))
    assert copies.is_settled(address(7, 2, 9))
    assert not copies.is_settled(address(8, 2, 9))


def test_what_a_seek_delivers_again_is_not_taken_for_a_copy() -> None:
    """The server counts deliveries from 1 again, both of the message and of the consumer."""
    copies = Copies()
    copies.settled(reply(7, 1, 3))
    assert not copies.is_settled(address(7, 1, 9))
    assert not copies.is_settled(address(7, 2, 2))


def test_what_was_settled_is_forgotten_after_a_while() -> None:
    copies = Copies()
    copies.settled(reply(7, 1, 3))
    copies.forget_old()
    assert copies.is_settled(address(7, 2, 9))
    copies.forget_old()
    assert not copies.is_settled(address(7, 2, 9))


def test_only_so_many_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SETTLED_MAX", 10)
    monkeypatch.setattr(module, "DROPPED_MAX", 10)
    copies = Copies()
    for number in range(1, 31):
        copies.settled(reply(number, 1, number))
        assert copies.is_settled(address(number, 2, 100))
        copies.dropped(address(number, 1, number))
    assert not copies.is_settled(address(20, 2, 100))
    assert copies.is_settled(address(21, 2, 100))
    assert copies.attempt(address(20, 2, 100)) == 2
    assert copies.attempt(address(21, 2, 100)) == 1


def test_copies_that_were_dropped_are_no_attempts() -> None:
    copies = Copies()
    for delivered in (1, 2, 3):
        copies.dropped(address(7, delivered, delivered))
    assert copies.attempt(address(7, 4, 4)) == 1
    assert copies.attempt(address(7, 5, 5)) == 2
    assert copies.attempt(address(7, 1, 6)) == 1  # after a seek
    assert copies.attempt(address(8, 4, 4)) == 4


def test_what_is_being_handled_is_known_until_it_is_done() -> None:
    copies = Copies()
    copies.handling(address(7, 1, 1))
    assert copies.is_handled_now(address(7, 2, 2))
    copies.handled(address(7, 1, 1))
    assert not copies.is_handled_now(address(7, 2, 2))
