"""`python -m grpozoo`."""

from grpozoo.cli.main import main

main()
