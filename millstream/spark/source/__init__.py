"""Reading topics in Spark: driver and worker side."""
