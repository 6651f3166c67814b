"""Event stores: aggregates as sequences of typed events, with expected versions and past states."""
