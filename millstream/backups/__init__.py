"""Backups: copies of topics or of a whole account, taken while it is used, and their restore."""
