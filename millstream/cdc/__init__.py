"""Change data capture: databases to topics, and topics to databases, exactly once."""
