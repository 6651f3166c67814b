"""The blocking client: one socket and plain calls, for Spark workers."""
