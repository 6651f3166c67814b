"""Bytes on a connection: frames, handshake, the fast lanes. Knows nothing of events."""
