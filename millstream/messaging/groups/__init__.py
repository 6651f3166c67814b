"""Ordered groups: members, partitions, records, workers."""
