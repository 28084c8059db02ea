"""The command line: arguments in, tables or JSON out; what is shown comes from `qdo.ops`."""
