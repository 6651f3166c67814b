"""Computes the same results in batch with pandas, and compares every row."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from examples.flights import data
from millstream import Mill

WEATHER = ["temp", "wind", "rain", "sight"]


@dataclass(frozen=True)
class Verdict:
    """One result of the pipeline compared with the batch result."""

    name: str
    events_in: int
    events_out: int
    lost: int
    duplicated: int
    different: int

    @property
    def right(self) -> bool:
        return not (self.lost or self.duplicated or self.different)


# -- the pipeline's results -----------------------------------------------------------------


async def topic_rows(mill: Mill, name: str) -> pd.DataFrame:
    """The values of a topic."""
    topic = await mill.topic(name)
    found = [batch.column("value") async for batch in topic.batches()]
    parts = [pa.RecordBatch.from_struct_array(part) for part in found if len(part)]
    return _plain(pa.Table.from_batches(parts))


async def table_rows(mill: Mill, name: str) -> pd.DataFrame:
    """The current values of a table."""
    table = await mill.table(name)
    return pd.DataFrame([entry.value async for entry in table.entries()])


def file_rows(folder: Path) -> pd.DataFrame:
    """The rows of a folder of Parquet files."""
    files = sorted(path for path in folder.glob("*.parquet"))
    return _plain(pa.concat_tables([pq.read_table(path) for path in files]))


def _plain(table: pa.Table) -> pd.DataFrame:
    for n, item in enumerate(table.schema):
        if pa.types.is_timestamp(item.type):
            table = table.set_column(n, item.name, table.column(n).cast(data.TIME))
    frame: pd.DataFrame = table.to_pandas()
    return frame


# -- the batch results ----------------------------------------------------------------------


def departures(year: data.Year) -> pd.DataFrame:
    """Departures with the weather of that hour at that airport."""
    return _plain(year.flights).merge(_plain(year.weather), on=["origin", "hour"], how="left")


def enriched(year: data.Year) -> pd.DataFrame:
    """Departures with carrier, plane and destination as well."""
    rows = departures(year)
    tables = {name: _plain(table) for name, (_, table) in year.tables.items()}
    planes = tables["planes"][["tailnum", "manufacturer", "model", "seats"]]
    airlines = tables["airlines"].rename(columns={"name": "airline"})
    airports = tables["airports"][["faa", "name"]].rename(
        columns={"faa": "dest", "name": "destination"}
    )
    rows = rows.merge(airlines, on="carrier", how="left").merge(airports, on="dest", how="left")
    return rows.merge(planes, on="tailnum", how="left")


def delays(year: data.Year) -> pd.DataFrame:
    """Delays by airport and day."""
    rows = _plain(year.flights)
    rows["day"] = rows["hour"].dt.strftime("%Y-%m-%d")
    rows["late"] = rows["dep_delay"] >= 60
    grouped = rows.groupby(["day", "origin"])
    return pd.DataFrame(
        {
            "flights": grouped.size(),
            "departed": grouped["dep_delay"].count(),
            "delay": grouped["dep_delay"].sum(min_count=1),
            "hour_late": grouped["late"].sum(),
        }
    ).reset_index()


def fleet(year: data.Year, retired: set[str]) -> pd.DataFrame:
    """The registered planes, each with the carrier that flew it last."""
    rows = _plain(year.flights).dropna(subset=["tailnum"]).sort_values(["time", "id"])
    last = rows.groupby("tailnum")["carrier"].last().reset_index()
    planes = _plain(year.tables["planes"][1])[["tailnum", "manufacturer", "model", "seats"]]
    planes = planes[~planes["tailnum"].isin(retired)]
    return last.merge(planes, on="tailnum")


# -- comparing ------------------------------------------------------------------------------


def compare(
    name: str, events_in: int, found: pd.DataFrame, wanted: pd.DataFrame, key: list[str]
) -> Verdict:
    """Compare every row of two results."""
    if _normal(found, key, wanted.columns).equals(_normal(wanted, key, wanted.columns)):
        return Verdict(name, events_in, len(found), 0, 0, 0)
    have, want = _by_key(found, key, wanted.columns), _by_key(wanted, key, wanted.columns)
    lost = sum(max(0, len(rows) - len(have.get(item, []))) for item, rows in want.items())
    duplicated = sum(max(0, len(rows) - len(want.get(item, []))) for item, rows in have.items())
    different = sum(
        1
        for item, rows in want.items()
        for one, other in zip(rows, have.get(item, []), strict=False)
        if one != other
    )
    return Verdict(name, events_in, len(found), lost, duplicated, different)


def _normal(frame: pd.DataFrame, key: list[str], columns: Any) -> pd.DataFrame:
    """The rows sorted by their keys, with the same types on both sides."""
    plain = {}
    for name in columns:
        column = frame[name] if name in frame else pd.Series(dtype="float64")
        if pd.api.types.is_numeric_dtype(column):
            plain[name] = column.astype("float64")
        elif pd.api.types.is_datetime64_any_dtype(column):
            plain[name] = column.astype("datetime64[us, UTC]")
        else:
            plain[name] = column.astype("string")
    return pd.DataFrame(plain).sort_values(key).reset_index(drop=True)


def _by_key(
    frame: pd.DataFrame, key: list[str], columns: Any
) -> dict[tuple[Any, ...], list[tuple[Any, ...]]]:
    indexes = [list(columns).index(name) for name in key]
    result: dict[tuple[Any, ...], list[tuple[Any, ...]]] = {}
    if frame.empty:
        return result
    plain = frame[list(columns)].astype(object).where(frame[list(columns)].notna(), None)
    for row in plain.itertuples(index=False, name=None):
        clean = tuple(_number(item) for item in row)
        result.setdefault(tuple(clean[n] for n in indexes), []).append(clean)
    for rows in result.values():
        rows.sort(key=repr)
    return result


def _number(item: Any) -> Any:
    """Treat 2 and 2.0 as equal: pandas turns integers with nulls into floats."""
    return float(item) if isinstance(item, int) and not isinstance(item, bool) else item
