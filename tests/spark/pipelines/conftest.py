"""A PostgreSQL for the outputs of pipelines."""

from __future__ import annotations

from tests.postgres import postgres as database
from tests.postgres import postgres_server

__all__ = ["database", "postgres_server"]
