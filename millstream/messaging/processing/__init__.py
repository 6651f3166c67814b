"""Processes: from topics to topics and tables, exactly once."""
