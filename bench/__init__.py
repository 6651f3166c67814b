"""Measurements: `python -m bench NAME [--quick] [--json]`. A family is a module with `measure`."""
