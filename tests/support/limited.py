"""`run(1, "NOFILE=64", "tools.doctor", ..., module=LIMITED)`: a command and its child processes under a limit
that they cannot raise, as after `ulimit -n 64`; and a process whose disk is full."""

import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from tests.support.forks import run_module
from tests.support.nested import fork_what_it_starts

LIMITED = "tests.support.limited"


@contextmanager
def full_at(size_bytes: int) -> Iterator[None]:
    """Limit the file size of this process: a write beyond it is cut short, as on a full disk, and the next
    one fails."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


if __name__ == "__main__":
    name, value = sys.argv[1].split("=")
    kind = getattr(resource, f"RLIMIT_{name}")
    resource.setrlimit(kind, (int(value), int(value)))
    fork_what_it_starts()
    run_module(sys.argv[2], sys.argv[3:])
