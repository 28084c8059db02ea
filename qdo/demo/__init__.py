"""The demo, which distributes queues over workers, kills a worker, and checks the result."""
