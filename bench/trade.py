"""The event that is measured beside other systems and in Spark: five fields, the symbol its key."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime

import pyarrow as pa

__all__ = ["Trade", "trade_frame", "trades"]


@dataclass
class Trade:
    """Two texts, a number, a price, a time: about 100 bytes as JSON."""

    symbol: str
    venue: str
    quantity: int
    price: float
    at: datetime


def trade_frame(rows: int) -> pa.RecordBatch:
    """Trades as columns: 50 symbols at 7 venues."""
    start = int(datetime(2024, 1, 1, tzinfo=UTC).timestamp()) * 1_000_000
    return pa.record_batch(
        {
            "symbol": pa.array([f"SYM{n * 7 % 50:03d}" for n in range(rows)]),
            "venue": pa.array([f"V{n % 7}" for n in range(rows)]),
            "quantity": pa.array([n % 1000 for n in range(rows)], pa.int64()),
            "price": pa.array([100 + n * 13 % 500 / 10 for n in range(rows)], pa.float64()),
            "at": pa.array([start + n for n in range(rows)]).cast(pa.timestamp("us", "UTC")),
        }
    )


def trades(count: int) -> list[Trade]:
    """The same trades as objects."""
    rows = trade_frame(count).to_pylist()
    return [Trade(**{**row, "at": row["at"].astimezone(UTC)}) for row in rows]
