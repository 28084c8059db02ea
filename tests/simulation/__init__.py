"""Seeded histories of workers, rebalancers and a modelled coordinator.

`schedule` is virtual time, `model` the coordinator, `world` the processes and what befalls
them, `checks` the invariants, `mutants` the proof that the checks bite. Run more histories
with ``python -m tests.simulation --histories 100000 --start-seed 0``.
"""
