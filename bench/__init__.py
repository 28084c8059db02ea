"""What qdo costs and gains, measured side by side with comparable programs."""
