"""The command line: parses arguments, and writes data from `qdo.ops` as tables or JSON."""
