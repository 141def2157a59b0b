"""How many files and sockets this process may have open."""

import contextlib
import resource

# a socket to every peer of thousands, and all shards; programs that walk through all numbers stay quick
ENOUGH = 65_536


def open_files_limit() -> int:
    """How many it may have open now (ulimit -n), `ENOUGH` at most."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return ENOUGH if soft == resource.RLIM_INFINITY else min(soft, ENOUGH)


def allow_open_files() -> None:
    """Raise the limit as far as the system lets a user: a shell's own, of 1,024, is meant for programs that
    use select(2)."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    wanted = ENOUGH if hard == resource.RLIM_INFINITY else min(hard, ENOUGH)
    if open_files_limit() < wanted:
        # macOS allows less than its hard limit says; then the old one holds
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
