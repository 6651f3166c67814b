"""Change data capture: databases to topics, and topics to databases, exactly once."""

from millstream.cdc.capture import Capture
from millstream.cdc.model import CaptureLag, Finding
from millstream.cdc.serving import serve_capture
from millstream.cdc.settings import CaptureSettings, OutboxSettings, TableSettings
from millstream.cdc.settings_file import load_capture
from millstream.cdc.sink.apply import Applied, Apply, ApplySettings, apply
from millstream.cdc.sources import open_source
from millstream.cdc.status import CaptureStatus, TableStatus
from millstream.cdc.whole_transactions import ChangedRow, Transaction, transactions

__all__ = [
    "Applied",
    "Apply",
    "ApplySettings",
    "Capture",
    "CaptureLag",
    "CaptureSettings",
    "CaptureStatus",
    "ChangedRow",
    "Finding",
    "OutboxSettings",
    "TableSettings",
    "TableStatus",
    "Transaction",
    "apply",
    "load_capture",
    "open_source",
    "serve_capture",
    "transactions",
]
