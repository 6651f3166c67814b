"""What became of the events that were handed to a producer."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ProducerCounters"]


@dataclass(frozen=True, slots=True)
class ProducerCounters:
    """At any time: produced = stored + refused + unconfirmed + waiting."""

    produced: int  # handed to the producer
    stored: int  # acknowledged
    refused: int  # surely not stored: there was no room in time, or the event was not accepted
    unconfirmed: int  # no ack: stored or not
    waiting: int  # not answered yet, or waiting for room in a full topic
