"""Measurements of qdo, side by side with comparable programs."""
