"""Durable subscriptions: deliveries, leases, administration, HTTP push."""
