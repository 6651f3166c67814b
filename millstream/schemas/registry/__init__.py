"""Schemas stored in the broker, and topics bound to them. Does I/O."""
