"""Fuzzing of everything that reads bytes from strangers: `make fuzz`."""
