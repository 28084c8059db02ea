"""Containers for tests of the files in ``config/``, without a container engine or a network."""
