"""Real fleets under random faults: ``python -m tests.soak --seed 1 --rounds 4 --seconds 60``.

Each round starts a coordinator, several `qdo-worker` parents with their processes, and a sender.
Workers are killed, frozen, drained and restarted, and the coordinator too, while some of the
messages block the event loop of their process. Then the faults end, everything must be processed,
and the journal of all runs is checked (`checks`). The exit code is 1 if a round violates a rule.
"""
