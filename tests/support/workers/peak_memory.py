"""`run(1, "tools.plan", ..., module="tests.support.workers.peak_memory")`: a command and its peak memory in
KiB."""

import resource
import sys

from tests.support.nested import run_module

if __name__ == "__main__":
    try:
        run_module(sys.argv[1], sys.argv[2:])
    finally:
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, file=sys.stderr)
