"""The `millstream` command: an edge that every room may serve and none may import."""
