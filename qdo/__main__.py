"""``python -m qdo`` is the command `qdo`."""

from qdo.cli.main import main

main()
