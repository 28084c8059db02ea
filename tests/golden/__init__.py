"""Lists made from the source that a person reviews when they change."""
