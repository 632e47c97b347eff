"""Run the comparison: `python -m benchmarks.peers --help`."""

import sys

from benchmarks.peers.cli import main

if __name__ == "__main__":
    sys.exit(main())
