"""What `qdo demo` shows: queues shared out among workers, one killed on the way, all checked."""
