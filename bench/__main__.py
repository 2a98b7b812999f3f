"""`python -m bench` runs `bench/run.py`."""

import sys

from bench.run import main

main(sys.argv[1:])
