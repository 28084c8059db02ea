"""Prepared faults: to practise with, and to measure how soon qdo names each of them."""
