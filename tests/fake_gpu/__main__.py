"""Install the fake GPU and run a command on it: `python -m tests.fake_gpu -h`."""

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from meshwright.tools.dryrun import log
from meshwright.tools.dryrun.install import ROOT, FakeGpu, FakeGpuError
from tests.fake_gpu.calls import collectives, count_launches, unimplemented
from tests.fake_gpu.commands import install_for_tests

DESCRIPTION = (
    "Install a CUDA build of torch with libraries that replace NVIDIA's (once, a download of 0.53 GB, 1.9 GB "
    "in ~/.cache/meshwright-tests or in the folder MESHWRIGHT_TESTS_CACHE), and run a command that sees fake "
    "H100s. Kernels compute nothing and take no time: losses are 0, and times are meaningless."
)
EPILOG = (
    "example: python -m tests.fake_gpu -- python -m train.main --config=llama_debug.yaml --train.steps=20"
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Install the fake GPU, run the command, and return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.fake_gpu", description=DESCRIPTION, epilog=EPILOG)
    parser.add_argument(
        "--devices", type=int, default=1, metavar="N", help="GPUs that the command sees (default 1)"
    )
    parser.add_argument(
        "--scratch",
        type=Path,
        metavar="FOLDER",
        help="keep logs and caches in FOLDER (default: delete them)",
    )
    parser.add_argument("command", nargs="*", help="the command to run, after --; without one: only install")
    options = parser.parse_args(arguments)
    try:
        gpu = install_for_tests()
    except FakeGpuError as error:
        parser.exit(2, f"{error}\n")
    if not options.command:
        print(f"torch: {gpu.site}\nlibraries: {gpu.libraries}")
        return 0
    if options.scratch:
        return run_on(gpu, options.scratch.absolute(), options.devices, options.command)
    with tempfile.TemporaryDirectory() as scratch:
        return run_on(gpu, Path(scratch), options.devices, options.command)


def run_on(gpu: FakeGpu, scratch: Path, devices: int, command: Sequence[str]) -> int:
    """Run the command and return its exit code. Prints the calls of its processes to stderr."""
    code = subprocess.run(command, env=gpu.environment(scratch, devices), cwd=ROOT, check=False).returncode
    for path in sorted(scratch.glob("log.*")):
        calls = log.read_calls(path)
        missing = ", ".join(unimplemented(calls)) or "none"
        print(
            f"process {path.suffix[1:]}: {count_launches(calls)} launches, {len(collectives(calls))} "
            f"collectives, {len(log.host_waits(calls))} host waits; not implemented: {missing}",
            file=sys.stderr,
        )
    return code


if __name__ == "__main__":
    sys.exit(main())
