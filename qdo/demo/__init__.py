"""The demo of `qdo demo`: distributes queues over workers, kills a worker, checks the result."""
