"""Run the benchmarks: `python -m benchmarks --help`."""

import sys

from benchmarks.cli import main

if __name__ == "__main__":
    sys.exit(main())
