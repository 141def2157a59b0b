"""train/console.py: whoever watches may leave."""

import subprocess
import sys

from tests.support.launch import ROOT, environment

TALK = """
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
        [sys.executable, "-c", TALK],
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as talker:
        assert talker.stdout
        assert talker.stderr
        assert talker.stdout.readline() == "step 0\n"
        talker.stdout.close()
        assert talker.stderr.read() == "done\n"
    assert talker.returncode == 0
