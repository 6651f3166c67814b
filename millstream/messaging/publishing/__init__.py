"""Ways to store events: one by one, in packs, exactly once."""
