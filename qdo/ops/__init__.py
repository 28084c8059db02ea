"""Operator functions, which return frozen values and print nothing.

Functions that use the coordinator raise CoordinatorUnreachableError if the connection is lost. They
raise NodeRefusedError or AuditRefusedError if the account lacks a right on a node or on the action
log. Docstrings name only further errors. `client` is None if the file of the coordinator does not
exist yet. `reason` and `by` are for the action log; `by` is an operator other than the user of this
process.
"""
