"""Core NATS: publish, subscribe, request, services, client identities. At most once."""
