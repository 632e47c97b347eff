"""`python -m dispatch_core.cli` is `relay-dispatch`."""

from dispatch_core.cli import main

main()
