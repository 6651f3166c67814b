"""SQLite as a source: triggers that record changes."""
