"""What an event is in bytes: subjects, headers, values, packs and fences. Pure; no sockets."""
