"""Bytes on a connection: frames, handshake, fast publishing and reading. Knows no events."""
