"""A stream of flights joined with tables of PostgreSQL, and the results written back to it.

`flights` is a topic that an application sends. `airlines`, `airports`, `planes` and `service` are
topics too: a capture writes every change of these tables to them. Where the results go is in the
environment variable MILLSTREAM_POSTGRES.
"""

from __future__ import annotations

from pyspark.sql import DataFrame
from pyspark.sql import functions as f

from millstream import pipelines as mp


@mp.postgres(table="results.departures")
def departures() -> DataFrame:
    """Each flight with its airline, plane and destination, as the tables are at that moment.

    Rows without a key are appended: later changes of the tables do not touch them.
    """
    airlines = mp.read_table("airlines").select("carrier", f.col("name").alias("airline"))
    planes = mp.read_table("planes").select("tailnum", "model", "seats")
    airports = mp.read_table("airports").select("faa", f.col("name").alias("destination"))
    flights = mp.read("flights").select("id", "time", "carrier", "tailnum", "dest")
    rows = mp.enrich(flights, airlines, on="carrier")
    rows = mp.enrich(rows, planes, on="tailnum")
    return mp.enrich(rows, airports, on={"dest": "faa"})


@mp.table(key="tailnum")
def landings() -> DataFrame:
    """Where each plane was last, and how many flights it had."""
    flights = mp.read("flights").where("tailnum IS NOT NULL").groupBy("tailnum")
    last = f.max_by("dest", f.struct("time", "id"))
    return flights.agg(f.count("*").alias("flights"), last.alias("airport"))


@mp.postgres(table="results.fleet", key="tailnum")
def fleet() -> DataFrame:
    """Where each plane is, and whether it may fly: follows the stream and the captured table.

    Rows are updated by their key, and deleted when the plane leaves the captured table.
    """
    return mp.join_tables(mp.read_changes("landings"), mp.read_changes("service"), on="tailnum")
