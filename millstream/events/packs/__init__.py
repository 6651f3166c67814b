"""Packs: many events as one Arrow stream in one message (docs/PACKS.md)."""
