"""Processes of tests: forked from a warm interpreter, or started by exec where a test needs it."""
