"""The blocking classes that tools/generate_blocking.py writes."""
