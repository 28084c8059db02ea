"""The versions of the program and of its format, in a module that any module may import."""

__version__ = "0.1.0"

# Grows when this program writes something to the coordinator that older ones would misread.
FORMAT_LEVEL = 1
