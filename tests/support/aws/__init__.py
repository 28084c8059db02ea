"""Servers that speak the protocols of AWS on loopback, for tests and benchmarks."""
