"""The store of the tests: bank accounts, whose class of deposits has had two versions before."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Opened:
    owner: str


@dataclass
class Deposited:
    amount: int
    currency: str = "EUR"
    tags: list[str] = field(default_factory=list)


@dataclass
class Withdrawn:
    amount: int
    note: str | None = None


@dataclass
class Account:
    owner: str = ""
    balance: int = 0
    currencies: list[str] = field(default_factory=list)

    def apply(self, event: Any) -> None:
        match event:
            case Opened(owner):
                self.owner = owner
            case Deposited(amount, currency):
                self.balance += amount
                self.currencies.append(currency)
            case Withdrawn(amount):
                self.balance -= amount


EVENTS = [Opened, Deposited, Withdrawn]
