"""The versions of the program and of its format, in a module that any module may import."""

__version__ = "0.1.0"

# Increases when this program writes data to the coordinator that older programs would misread.
FORMAT_LEVEL = 1
