"""PostgreSQL as a source: logical replication and snapshots."""
