"""Topics to tables of databases: upserts and deletions with the position in one transaction."""
