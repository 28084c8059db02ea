"""The command line: arguments in, tables or JSON out; the data comes from `qdo.ops`."""
