"""Is a test worth anything? `python -m tests.mutants` breaks the product in small ways; one has to tell of each."""
