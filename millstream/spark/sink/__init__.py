"""Writing topics from Spark: driver and worker side."""
