"""What an event of a topic of changes holds: one change of one row of a database. Pure.

A topic of changes has one typed record an event: `op`, the row `before` and `after`, the columns
that are `unchanged`, and the `source`. Readers (sinks, Spark, the SDK) know it by these names.
"""

from __future__ import annotations

from typing import Final

__all__ = [
    "AFTER",
    "BEFORE",
    "COMMIT",
    "CREATE",
    "DELETE",
    "NUMBER",
    "OP",
    "OPS",
    "OP_HEADER",
    "POSITION_HEADER",
    "READ",
    "SOURCE",
    "TABLE",
    "TIME",
    "TOTAL",
    "TRANSACTION",
    "TRANSACTION_HEADER",
    "TRUNCATE",
    "UNCHANGED",
    "UPDATE",
]

OP: Final = "op"
BEFORE: Final = "before"  # null where the source does not send it
AFTER: Final = "after"  # null for a deletion
# Names of columns that are null in `after` because the source did not send them: they have kept
# their value. Null or empty: every column was sent.
UNCHANGED: Final = "unchanged"
SOURCE: Final = "source"

# Operations.
READ: Final = "r"  # a row of the snapshot
CREATE: Final = "c"
UPDATE: Final = "u"
DELETE: Final = "d"
TRUNCATE: Final = "t"  # every row before it is gone; has neither `before` nor `after`, nor a key
OPS: Final = (READ, CREATE, UPDATE, DELETE, TRUNCATE)

# Fields of `source`.
TABLE: Final = "table"  # "public.orders"
COMMIT: Final = "commit"  # position of the commit: an LSN, a place in a binlog, a number
TRANSACTION: Final = "transaction"  # the database's name for it; null in a snapshot
NUMBER: Final = "number"  # of the row within its transaction, from 1; null in a snapshot
TOTAL: Final = "total"  # rows of the transaction, over all captured tables; null in a snapshot
TIME: Final = "time"  # of the commit, or of the snapshot

# Headers of events in topics of rows (format="rows"), whose values are nothing but the row.
OP_HEADER: Final = "Cdc-Op"
POSITION_HEADER: Final = "Cdc-Commit"
TRANSACTION_HEADER: Final = "Cdc-Transaction"  # "<transaction> <number>/<total>"
