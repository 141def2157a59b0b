"""`run(1, "64", "tools.doctor", ..., module="tests.tools.limited")`: a command that may have so many files open."""

import resource
import subprocess
import sys

from tests.support.nested import ForkingPopen, read_environment, run_module

if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[1]), resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    read_environment()
    subprocess.Popen = ForkingPopen  # type: ignore[misc]
    run_module(sys.argv[2], sys.argv[3:])
