"""`run(1, "64", "tools.doctor", ..., module="tests.tools.limited")`: a command that may have so many files open."""

import resource
import sys

from tests.support.forks import run_module
from tests.support.nested import fork_what_it_starts

if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[1]), resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    fork_what_it_starts()
    run_module(sys.argv[2], sys.argv[3:])
