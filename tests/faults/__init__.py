"""The program that breaks Millstream on purpose and counts: `python -m tests.faults`."""
