"""The program that injects faults and checks the promises: `python -m tests.faults`."""
