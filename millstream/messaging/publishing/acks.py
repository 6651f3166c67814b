"""What the acks of a topic guarantee, as its servers last said, and whether that is enough."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from millstream.errors import NotDurable, RequestTimeout
from millstream.events.event import Durability, Receipt

__all__ = ["Acks"]


class Acks:
    """The durability of each partition's acks; `unknown` while the servers are asked again.

    A topic may demand a durability. Then nothing is published before the servers have answered,
    and an ack that arrives before that counts only when they have.
    """

    def __init__(
        self,
        topic: str,
        durabilities: Sequence[Durability],
        demanded: bool,
        shortfall: NotDurable | None,
        patience: float,
        kept: bool = True,
    ) -> None:
        self.demanded = demanded
        self.durabilities = list(durabilities)  # changed in place: receipts look at it
        # What an ack alone says; that of an interest topic does not say whether the event is kept.
        self.stated = self.durabilities if kept else ["unknown"] * len(durabilities)
        self.shortfall = shortfall  # what is missing of what the topic demands
        self._topic = topic
        self._patience = patience
        self._asked: asyncio.Event | None = None  # set when the servers have answered

    @property
    def durability(self) -> Durability:
        """Of all partitions; `unknown` when it differs between them."""
        found = set(self.durabilities)
        return found.pop() if len(found) == 1 else "unknown"

    def forget(self) -> None:
        """Another server may be less durable: until it is asked, nothing is known."""
        self.durabilities[:] = ["unknown"] * len(self.durabilities)
        self.shortfall = None
        self._asked = self._asked or asyncio.Event()

    def set(self, durabilities: Sequence[Durability], shortfall: NotDurable | None) -> None:
        """What the servers have answered."""
        self.durabilities[:] = durabilities
        self.shortfall = shortfall
        if self._asked is not None:
            self._asked.set()
            self._asked = None

    def check_known(self) -> None:
        """Raise NotDurable if the servers have last answered that they do less than demanded."""
        if self.shortfall is not None:
            raise NotDurable(*self.shortfall.facts)

    async def check(self) -> None:
        """Raise NotDurable unless the servers do what the topic demands."""
        if not self.demanded:
            return
        while self._asked is not None:
            try:
                async with asyncio.timeout(self._patience):
                    await self._asked.wait()
            except TimeoutError:
                hint = ": it is not known how durably the server stores"
                raise RequestTimeout(self._topic, self._patience, hint) from None
        self.check_known()

    async def confirmed(self, receipt: Receipt) -> Receipt:
        """A receipt whose durability is what the topic demands, if it demands one."""
        if not self.demanded:
            return receipt
        await self.check()
        if receipt.durability != "unknown":
            return receipt
        return receipt._replace(durability=self.stated[receipt.partition])

    async def all_confirmed(self, receipts: list[Receipt]) -> list[Receipt]:
        """The same for many."""
        if not self.demanded:
            return receipts
        return [await self.confirmed(receipt) for receipt in receipts]
