"""Topics as DataFrames, step by step, as in a notebook.

`python -m examples.notebook`
"""

# %% A broker, a typed topic and some orders
from __future__ import annotations

import tempfile
from contextlib import ExitStack
from dataclasses import dataclass

from pyspark.sql import functions as f

from examples.own_broker import broker_url
from millstream import blocking
from millstream.spark import session, table_writer


@dataclass
class Order:
    customer: str
    amount: int


stack = ExitStack()
url = stack.enter_context(broker_url())
mill = blocking.connect(url)
orders = mill.create_topic("orders", schema=Order)
orders.publish_many([Order(name, amount) for name in ("ann", "ben") for amount in (1, 2, 3)])

# %% A session, and the topic as a batch: values are typed columns, no parsing needed
spark = session("notebook", quick=True)
batch = spark.read.format("millstream").option("url", url).option("subscribe", "orders").load()
batch.groupBy("value.customer").agg(f.sum("value.amount").alias("amount")).orderBy(
    "customer"
).show()

# %% The same as a stream that keeps a table up to date, exactly once
totals = mill.create_table("totals")
stream = (
    spark.readStream.format("millstream")
    .option("url", url)
    .option("subscribe", "orders")
    .option("startingOffsets", "earliest")
    .load()
    .groupBy(f.col("value.customer").alias("customer"))
    .agg(f.sum("value.amount").alias("amount"))
)
folder = stack.enter_context(tempfile.TemporaryDirectory())
query = (
    stream.writeStream.outputMode("update")
    .foreachBatch(table_writer("totals", key="customer", url=url))
    .option("checkpointLocation", folder)
    .start()
)
query.processAllAvailable()
orders.publish(Order("ann", 100))
query.processAllAvailable()
query.stop()

# %% The table, read back without Spark
for entry in sorted(totals.entries(), key=lambda entry: entry.key):
    print(entry.key, entry.value.decode())

# %% The end
spark.stop()
mill.close()
stack.close()
