"""configs/launch/nodes.sh on two "nodes": network namespaces joined by a virtual cable, with two processes
each and HSDP over both."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from meshwright.parallel.plan.serialize import load_plan
from meshwright.tools.processes import children
from tests.support.launch import ROOT, environment, read_status
from tests.support.run_faults import ENDLESS_STEPS, LIMIT_S, check_stopped, kill, steps_of, tiny

FIRST = "10.77.0.1"


def why_not() -> str:
    """Why this machine cannot create two nodes; "" if it can."""
    missing = [name for name in ("unshare", "nsenter", "ip", "getent") if not shutil.which(name)]
    if missing:
        return f"needs {', '.join(missing)} (Debian: util-linux, iproute2)"
    cable = ["unshare", "-rn", "ip", "link", "add", "node1", "type", "veth", "peer", "name", "node2"]
    made = subprocess.run(cable, capture_output=True, check=False)
    return (
        f"cannot create network namespaces with a cable: {made.stderr.decode().strip()}"
        if made.returncode
        else ""
    )


pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())


class Nodes:
    """Both nodes of a run in `folder`."""

    def __init__(self, folder: Path, process: "subprocess.Popen[bytes]") -> None:
        self.folder, self.process = folder, process

    def torchrun(self, node: int) -> int:
        """Process id of a node's torchrun."""
        return int((self.folder / f"{node}.pid").read_text())

    def screen(self, node: int) -> str:
        """Output of a node so far."""
        return (self.folder / f"{node}.txt").read_text()

    def code(self, node: int) -> int:
        """Exit code of a node."""
        return int((self.folder / f"{node}.code").read_text())

    def wait_for_step(self, step: int) -> None:
        """Wait until the step is in metrics.jsonl."""
        self.wait_for(lambda: max(steps_of(self.folder / "run"), default=0) >= step)

    def wait_for(self, happened: Callable[[], object]) -> None:
        """Wait until `happened()` is true; AssertionError with the output of both nodes if it does not
        happen."""
        deadline_s = time.monotonic() + LIMIT_S
        while not happened():
            assert self.process.poll() is None, self.screen(1) + self.screen(2)
            assert time.monotonic() < deadline_s, self.screen(1) + self.screen(2)
            time.sleep(0.05)

    def end(self) -> None:
        """Kill the remaining processes of both nodes."""
        for node in (1, 2):
            if (self.folder / f"{node}.pid").exists():
                pid = self.torchrun(node)
                kill([*children(pid), pid])
        self.process.wait(LIMIT_S)


@contextmanager
def two_nodes(folder: Path, processes: int, *arguments: str, **env: str) -> Iterator[Nodes]:
    """Start a run on two nodes with `processes` processes each."""
    command = [
        "configs/launch/nodes.sh",
        FIRST,
        "2",
        "llama_debug.yaml",
        *arguments,
        f"--run.dir={folder / 'run'}",
    ]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    process = subprocess.Popen(
        ["unshare", "-rn", "tests/launch_files/two_nodes.sh", str(folder), *command],
        cwd=ROOT,
        env=environment(PATH=path, PET_NPROC_PER_NODE=str(processes), **env),
        start_new_session=True,
    )
    nodes = Nodes(folder, process)
    try:
        yield nodes
    finally:
        nodes.end()


HSDP = ("--checkpoint.every=5", "--parallel.dp_replicate=2", "--train.micro_batch_size=1")


@pytest.mark.slow
@pytest.mark.sampled(10)
def test_sigterm_to_one_node_saves_on_both_and_the_same_line_goes_on(data, tmp_path):
    arguments = tiny(data, *HSDP)
    with two_nodes(tmp_path, 2, *arguments) as nodes:
        nodes.wait_for_step(3)
        os.kill(nodes.torchrun(2), signal.SIGTERM)
        nodes.wait_for(
            lambda: (tmp_path / "2.code").exists() and read_status(tmp_path / "run")["state"] == "stopped"
        )
        # the other node's torchrun waits 300 s and ignores SIGTERM
        nodes.wait_for(lambda: not children(nodes.torchrun(1)))
    mesh = load_plan(tmp_path / "run/plan.yaml").mesh
    assert (mesh.dp_replicate, mesh.dp_shard) == (2, 2)
    stopped = check_stopped(tmp_path / "run", "signal SIGTERM")
    # Kubernetes must not count a pod that was asked to stop as succeeded.
    assert nodes.code(2) != 0
    last = arguments.index(f"--train.steps={ENDLESS_STEPS}")
    arguments[last] = f"--train.steps={stopped + 3}"
    with two_nodes(tmp_path, 2, *arguments) as nodes:
        nodes.process.wait(2 * LIMIT_S)
    assert (nodes.code(1), nodes.code(2)) == (0, 0), nodes.screen(1) + nodes.screen(2)
    status = read_status(tmp_path / "run")
    assert (status["state"], status["step"], status["resumed_from"]) == ("finished", stopped + 3, stopped)


@pytest.mark.slow
@pytest.mark.sampled(10)
def test_a_node_that_is_gone_is_said_on_the_other(data, tmp_path):
    with two_nodes(tmp_path, 1, *tiny(data, *HSDP)) as nodes:
        nodes.wait_for_step(6)
        lost = nodes.torchrun(2)
        kill([lost, *children(lost)])
        # the message reports a dead process, or a save that was cut off if the kill interrupted one
        nodes.wait_for(lambda: "PeerLostError: " in nodes.screen(1))
    assert "the same command" in nodes.screen(1)


@pytest.mark.slow
@pytest.mark.sampled(10)
def test_a_wrong_interface_is_named_and_is_no_dead_process(data, tmp_path):
    with two_nodes(tmp_path, 1, *tiny(data, *HSDP), GLOO_SOCKET_IFNAME="lo") as nodes:
        nodes.wait_for(
            lambda: any("UnreachableError: " in path.read_text() for path in tmp_path.glob("?.txt"))
        )
        screens = nodes.screen(1) + nodes.screen(2)
    line = next(line for line in screens.splitlines() if "UnreachableError: " in line)
    facts = ("127.0.0.1, an address within one machine", "GLOO_SOCKET_IFNAME", "here: lo")
    assert [fact for fact in facts if fact not in line] == [], line
    assert "has died" not in screens
