"""Departures of New York joined with weather, planes and carriers as they arrive.

Reads the topics `flights` and `weather` and the tables `planes`, `airlines` and `airports`.
"""

from __future__ import annotations

from pyspark.sql import DataFrame
from pyspark.sql import functions as f

from millstream import pipelines as mp

LATE = "3 hours"  # how late an event may arrive
MOST = 40  # packs in one batch of the join: after an outage results arrive in steps
# Each topic has one event after the year, which completes the last hours.
END = "2014-01-02"


@mp.topic(key="origin")
def departures() -> DataFrame:
    """Each departure with the weather of that hour at that airport: a stream with a stream.

    A left join: a departure without weather is included once no weather can arrive any more.
    """
    flights = mp.read("flights", maxOffsetsPerTrigger=MOST)
    weather = mp.read("weather", maxOffsetsPerTrigger=MOST)
    same = ["origin", "hour"]
    joined = mp.join_streams(flights, weather, on=same, time="hour", late=LATE, how="left")
    return joined.where(f.col("hour") < END)


@mp.files(path="lake/departures")
def enriched() -> DataFrame:
    """Departures with carrier, plane and destination: a stream with the current tables.

    The result is a folder of Parquet files.
    """
    planes = mp.read_table("planes").select("tailnum", "manufacturer", "model", "seats")
    airlines = mp.read_table("airlines").select("carrier", f.col("name").alias("airline"))
    airports = mp.read_table("airports").select("faa", f.col("name").alias("destination"))
    rows = mp.enrich(mp.read("departures"), airlines, on="carrier")
    rows = mp.enrich(rows, planes, on="tailnum")
    return mp.enrich(rows, airports, on={"dest": "faa"})


@mp.table(key=["day", "origin"])
def delays() -> DataFrame:
    """Delays by airport and day: windows that are updated while they are open."""
    flights = mp.read("flights").withWatermark("hour", LATE).where(f.col("hour") < END)
    day = f.window("hour", "1 day").alias("window")
    counted = flights.groupBy(day, "origin").agg(
        f.count("*").alias("flights"),
        f.count("dep_delay").alias("departed"),
        f.sum("dep_delay").alias("delay"),
        f.count(f.when(f.col("dep_delay") >= 60, 1)).alias("hour_late"),
    )
    return counted.select(
        f.date_format("window.start", "yyyy-MM-dd").alias("day"), *counted.columns[1:]
    )


@mp.table(key="tailnum")
def operators() -> DataFrame:
    """The carrier that flew each plane last."""
    flights = mp.read("flights").where("tailnum IS NOT NULL AND id > 0")
    return flights.groupBy("tailnum").agg(
        f.max_by("carrier", f.struct("time", "id")).alias("carrier")
    )


@mp.table(key="tailnum")
def fleet() -> DataFrame:
    """The planes of each carrier: a join of two tables that follows changes of both."""
    planes = mp.read_changes("planes").drop("year")
    return mp.join_tables(mp.read_changes("operators"), planes, on="tailnum")
