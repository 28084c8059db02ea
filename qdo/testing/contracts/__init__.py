"""The contracts of brokers, as tests that the package of a broker runs; see `fixtures`."""
