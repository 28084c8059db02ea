"""Operations for operators: functions that return frozen values and print nothing.

Those that use the coordinator raise CoordinatorUnreachableError if the connection is lost, and
NodeRefusedError or AuditRefusedError if the account may not read or change a node or write to the
action log. Their docstrings name only further errors.
"""
