"""Topics: settings, stream configuration, create, look up, edit, delete."""
