"""Ways to read a topic without a subscription: replay, latest, Arrow batches, verify."""
