"""Backups: copies of topics or of accounts, taken while they are used, and their restore."""
