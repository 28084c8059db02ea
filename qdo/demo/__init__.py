"""The demo behind `qdo demo`: distributes queues over workers, kills one, and checks the result."""
