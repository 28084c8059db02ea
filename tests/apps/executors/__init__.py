"""Apps of the tests of executors."""
