"""The work of the elected rebalancer: who gets which queue."""
