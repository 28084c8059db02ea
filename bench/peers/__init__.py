"""Comparable programs, each in a module that the program's own command can load.

These modules do not import qdo: they run in a separate virtual environment.
"""
