"""Versions of one schema, as a program has them over the years."""

from __future__ import annotations

import dataclasses
import datetime as dt
from decimal import Decimal
from typing import Annotated, Literal

from millstream.schemas import Schema, declare, types


@dataclasses.dataclass
class Order:
    """The first version."""

    id: int
    customer: str
    price: Annotated[Decimal, types.Decimal(10, 2)]
    placed: dt.datetime
    status: Literal["open", "paid"] = "open"


@dataclasses.dataclass
class OrderWithNote:
    """The second: one more field, with a default."""

    id: int
    customer: str
    price: Annotated[Decimal, types.Decimal(10, 2)]
    placed: dt.datetime
    status: Literal["open", "paid"] = "open"
    note: str | None = None


@dataclasses.dataclass
class OrderWithWeight:
    """One that may not follow: one more field, without a default."""

    id: int
    customer: str
    price: Annotated[Decimal, types.Decimal(10, 2)]
    placed: dt.datetime
    weight: float
    status: Literal["open", "paid"] = "open"


PLACED = dt.datetime(2026, 5, 6, 7, 8, 9, 10, tzinfo=dt.UTC)


def order(number: int = 1, customer: str = "ada") -> Order:
    return Order(number, customer, Decimal("9.90"), PLACED)


def version(cls: type) -> Schema:
    """The class as a version of the schema `Order`."""
    return declare(cls, name="Order")
