"""Files of events, imported and exported."""
