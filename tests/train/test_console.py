"""train/console.py: the reader of the output may exit."""

import subprocess
import sys

from tests.support.launch import ROOT, environment

WRITE = """
import sys
from meshwright.train.console import Console
console = Console(is_main=True)
for step in range(100_000):
    console.print(f"step {step}")
console.start_progress(0, 10)
console.close()
print("done", file=sys.stderr)
"""


def test_a_reader_that_leaves_does_not_end_what_it_read() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", WRITE],
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as writer:
        assert writer.stdout
        assert writer.stderr
        assert writer.stdout.readline() == "step 0\n"
        writer.stdout.close()
        assert writer.stderr.read() == "done\n"
    assert writer.returncode == 0
