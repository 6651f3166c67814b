"""The `millstream` command; no other room imports it."""
