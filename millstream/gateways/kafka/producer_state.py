"""What a partition knows of idempotent producers, and what it makes of their batches. Pure.

Kafka's rules: a producer numbers the records it sends to a partition. A batch is taken if it
begins where the one before it ended; a copy of one of the last five gets the answer of the first
copy. Of a producer that is not known, any batch is taken.

What is stored says who is known: packs name the batches that they hold. Batches that are accepted
and not stored yet come on top; when one of them fails, those after it are refused, so that nothing
is stored with a gap before it.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, Final, NamedTuple

from millstream.gateways.kafka.protocol import ErrorCode

__all__ = [
    "COPIES_MAX",
    "PRODUCERS_MAX",
    "KeptProducer",
    "ProducerStates",
    "SentBatch",
    "Verdict",
    "last_sequence",
]

COPIES_MAX: Final = 5  # the batches of a producer whose copies are recognised; clients send five
# Producers that a partition remembers: the one that wrote least recently is forgotten first.
PRODUCERS_MAX: Final = 2000
_SEQUENCES: Final = 2**31  # sequence numbers go up to 2^31 - 1 and continue with 0


class SentBatch(NamedTuple):
    """A batch of an idempotent producer."""

    producer: int
    epoch: int
    first: int  # sequence numbers
    last: int


class Verdict(Enum):
    """What becomes of a batch."""

    NEW = auto()  # store it
    STORED = auto()  # a copy of one that is stored: the answer has its offset
    UNDER_WAY = auto()  # a copy of one that is being stored: it gets the same answer
    REFUSED = auto()


class Judged(NamedTuple):
    """A verdict, with what it is about."""

    verdict: Verdict
    offset: int = -1
    answer: Any = None  # of the first copy
    error: ErrorCode = ErrorCode.none
    text: str = ""


class _Stored(NamedTuple):
    first: int
    last: int
    offset: int  # of its first record


# In the place of batches that may have been stored after those before it, and are gone unseen.
_GONE: Final = _Stored(-1, -1, -1)

# What is kept of a producer: id, epoch, and its last batches, the oldest first.
KeptProducer = tuple[int, int, list[tuple[int, int, int]]]


@dataclass(slots=True)
class _Producer:
    epoch: int
    batches: deque[_Stored] = field(default_factory=lambda: deque(maxlen=COPIES_MAX))


class _UnderWay(NamedTuple):
    batch: SentBatch
    answer: Any


def last_sequence(first: int, count: int) -> int:
    """The number of the last of some records.

    >>> last_sequence(2**31 - 2, 4)
    1
    """
    return (first + count - 1) % _SEQUENCES


class ProducerStates:
    """The producers of one partition."""

    def __init__(self, limit: int = PRODUCERS_MAX) -> None:
        self._limit = limit
        self._stored: OrderedDict[int, _Producer] = OrderedDict()  # latest writer last
        self._under_way: dict[int, list[_UnderWay]] = {}  # by producer, in the order accepted

    # -- batches that arrive --------------------------------------------------------------

    def judge(self, batch: SentBatch) -> Judged:
        """What becomes of a batch that arrived."""
        stored = self._stored.get(batch.producer)
        under_way = self._under_way.get(batch.producer, ())
        if stored is None and not under_way:
            return Judged(Verdict.NEW)
        epoch = under_way[-1].batch.epoch if under_way else stored.epoch if stored else 0
        if batch.epoch < epoch:
            text = f"producer {batch.producer} has epoch {epoch} by now, this is {batch.epoch}"
            return Judged(Verdict.REFUSED, error=ErrorCode.invalid_producer_epoch, text=text)
        gone = not under_way and stored is not None and stored.batches[-1] == _GONE
        if batch.epoch > epoch:
            return Judged(Verdict.NEW) if batch.first == 0 or gone else _gap(batch, 0)
        for other in under_way:
            if other.batch == batch:
                return Judged(Verdict.UNDER_WAY, answer=other.answer)
        last = under_way[-1].batch.last if under_way else -1
        if stored is not None and stored.epoch == epoch:
            for copy in stored.batches:
                if (copy.first, copy.last) == (batch.first, batch.last):
                    return Judged(Verdict.STORED, offset=copy.offset)
            if not under_way:
                last = stored.batches[-2 if gone else -1].last
        expected = (last + 1) % _SEQUENCES
        if batch.first == expected or (gone and not _is_before(batch.last, expected)):
            return Judged(Verdict.NEW)
        if _is_before(batch.last, expected):
            text = (
                f"producer {batch.producer} sent sequences up to {last} before, {batch} is a copy"
            )
            return Judged(Verdict.REFUSED, error=ErrorCode.duplicate_sequence_number, text=text)
        return _gap(batch, expected)

    def accept(self, batch: SentBatch, answer: Any) -> None:
        """A batch judged NEW is going to be stored; copies of it get `answer`, too."""
        self._under_way.setdefault(batch.producer, []).append(_UnderWay(batch, answer))

    def settle(self, batch: SentBatch) -> None:
        """An accepted batch is stored, or will not be: it is under way no more."""
        waiting = self._under_way.get(batch.producer)
        if waiting is None:
            return
        waiting[:] = [other for other in waiting if other.batch != batch]
        if not waiting:
            del self._under_way[batch.producer]

    def forget_under_way(self) -> None:
        """Nothing is under way any more: everything that was has been answered."""
        self._under_way.clear()

    # -- batches that are stored ----------------------------------------------------------

    def stored(self, batch: SentBatch, offset: int) -> None:
        """A stored pack has this batch; its first record has this offset."""
        producer = self._stored.get(batch.producer)
        if producer is None:
            producer = self._stored[batch.producer] = _Producer(batch.epoch)
            if len(self._stored) > self._limit:
                self._stored.popitem(last=False)
        else:
            self._stored.move_to_end(batch.producer)
            if producer.epoch != batch.epoch:
                producer.epoch = batch.epoch
                producer.batches.clear()
        producer.batches.append(_Stored(batch.first, batch.last, offset))

    def cut(self, offset: int) -> None:
        """What had offsets from this one on is lost: it may be stored again."""
        for number, producer in list(self._stored.items()):
            left = [one for one in producer.batches if one != _GONE and one.offset < offset]
            producer.batches = deque(left, maxlen=COPIES_MAX)
            if not left:
                del self._stored[number]

    def lower(self, offset: int, by: int) -> None:
        """The offsets from this one on are smaller by so many."""
        for producer in self._stored.values():
            moved = [
                one._replace(offset=one.offset - by) if one.offset >= offset else one
                for one in producer.batches
            ]
            producer.batches = deque(moved, maxlen=COPIES_MAX)

    def lost_track(self) -> None:
        """Batches may be stored that nobody saw: of each producer, whatever follows is taken."""
        for producer in self._stored.values():
            if producer.batches[-1] != _GONE:
                producer.batches.append(_GONE)

    def kept(self) -> Iterator[KeptProducer]:
        """All that is known of stored batches, to be kept; `restore` takes it."""
        for number, producer in self._stored.items():
            yield (
                number,
                producer.epoch,
                [(one.first, one.last, one.offset) for one in producer.batches],
            )

    def restore(self, kept: Iterable[KeptProducer]) -> None:
        """What was known before this process began."""
        for number, epoch, batches in kept:
            for first, last, offset in batches:
                self.stored(SentBatch(number, epoch, first, last), offset)


def _is_before(last: int, expected: int) -> bool:
    """Whether a sequence number is one before `expected`, rather than one after it."""
    return 0 < (expected - last) % _SEQUENCES <= _SEQUENCES // 2


def _gap(batch: SentBatch, expected: int) -> Judged:
    text = f"producer {batch.producer} continues with sequence {expected}, this is {batch.first}"
    return Judged(Verdict.REFUSED, error=ErrorCode.out_of_order_sequence_number, text=text)
