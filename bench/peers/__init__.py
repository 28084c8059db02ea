"""Comparable programs, each in one module that its own command line tool can load.

Nothing here imports qdo: these modules run in a virtual environment of their own.
"""
