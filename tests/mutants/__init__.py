"""Is a machine worth anything? `python -m tests.mutants` breaks the product in small ways; the machine has to tell."""
