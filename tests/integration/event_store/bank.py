"""A small bank: the aggregates of the tests."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Opened:
    owner: str


@dataclass(frozen=True)
class Deposited:
    amount: int


@dataclass(frozen=True)
class Withdrawn:
    amount: int


class Overdrawn(Exception):
    pass


@dataclass
class Account:
    owner: str = ""
    balance: int = 0
    history: list[int] = field(default_factory=list)

    def apply(self, event: Any) -> None:
        match event:
            case Opened(owner):
                self.owner = owner
            case Deposited(amount):
                self.balance += amount
                self.history.append(amount)
            case Withdrawn(amount):
                self.balance -= amount
                self.history.append(-amount)

    def open(self, owner: str) -> Opened:
        return Opened(owner)

    def deposit(self, amount: int) -> Deposited:
        return Deposited(amount)

    def withdraw(self, amount: int) -> Withdrawn:
        if amount > self.balance:
            raise Overdrawn(f"{amount} of {self.balance}")
        return Withdrawn(amount)


EVENTS = [Opened, Deposited, Withdrawn]
