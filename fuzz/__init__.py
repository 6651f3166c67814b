"""Fuzzing of everything that reads untrusted bytes: `make fuzz`."""
