"""The command line, which parses arguments and writes data from `qdo.ops` as tables or JSON."""
