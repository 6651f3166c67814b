"""Projections: views of a log in tables, rebuilt beside the running ones and swapped."""
