"""Reads what the status of queues needs."""
