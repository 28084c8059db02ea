"""Operations for operators: functions that return frozen values and print nothing.

Those that use the coordinator raise CoordinatorUnreachableError if the connection is lost, and
NodeRefusedError or AuditRefusedError if the account may not read or change a node or write to the
action log. Their docstrings name only further errors. `client` is None if the coordinator is a file
that does not exist yet. `reason` and `by`, the operator if that is not the user of this process,
are for the action log.
"""
