"""Functions for operators, which return frozen values and print nothing.

Functions that use the coordinator raise CoordinatorUnreachableError if the connection is lost. They
raise NodeRefusedError or AuditRefusedError if the account lacks a right on a node or on the action
log. The docstrings here name only other errors. `client` is None if the coordinator is a file that
does not exist yet. The action log records `reason` and `by`. `by` names the operator if this is not
the user of the process.
"""
