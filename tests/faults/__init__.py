"""Faults that need servers of their own, programs of the system, or minutes: `make test-faults`, not `make test`."""
