"""`python -m bench` is bench/run.py."""

import sys

from bench.run import main

main(sys.argv[1:])
