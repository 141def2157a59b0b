"""`run(1, "NOFILE=64", "tools.doctor", ..., module=LIMITED)`: a command and its child processes under a limit
that they cannot raise, as after `ulimit -n 64`."""

import resource
import sys

from tests.support.forks import run_module
from tests.support.nested import fork_what_it_starts

LIMITED = "tests.support.limited"

if __name__ == "__main__":
    name, value = sys.argv[1].split("=")
    kind = getattr(resource, f"RLIMIT_{name}")
    resource.setrlimit(kind, (int(value), int(value)))
    fork_what_it_starts()
    run_module(sys.argv[2], sys.argv[3:])
