"""Seeded histories of requests: the code of pools on a virtual schedule, with lost and late steps.

`processes` runs code as it is and keeps the store, `world` is what befalls it, `mutants` the proof
that the checks bite. See one history with ``python -m tests.simulation.requests.world SEED``.
"""
