"""configs/launch/slurm.sh on a real Slurm of this machine, whose two nodes are two daemons.

Needs Debian's slurm-wlm and munge (apt-get install slurm-wlm munge), without configuration: the test creates
its own.
"""

import getpass
import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.launch import ROOT, environment, read_status, rows_in
from tests.support.run_faults import steps_of, tiny

NEEDED = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "srun", "sinfo")
PATH = f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
# a requeued job waits two minutes (delay of slurmctld), and the machine may be busy
LIMIT_S = 300.0
MISSING = [name for name in NEEDED if not shutil.which(name, path=PATH)]
CONFIGURATION = """
ClusterName=one
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge
CredType=cred/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
ReturnToService=2
SelectType=select/cons_tres
SlurmctldPort={port}
SlurmctldPidFile={folder}/controller.pid
SlurmdPidFile={folder}/%n.pid
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={port_1} CPUs={cores}
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={port_2} CPUs={cores}
PartitionName=all Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP
"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.sampled(10),
    pytest.mark.skipif(bool(MISSING), reason=f"needs {', '.join(MISSING)} (Debian: slurm-wlm, munge)"),
]


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [bound.getsockname()[1] for bound in sockets]
    for bound in sockets:
        bound.close()
    return ports


def wait(happened: Callable[[], object], describe: Callable[[], str]) -> None:
    deadline_s = time.monotonic() + LIMIT_S
    while not happened():
        assert time.monotonic() < deadline_s, describe()
        time.sleep(0.2)


@pytest.fixture(scope="module")
def slurm(tmp_path_factory) -> Iterator[dict[str, str]]:
    """Start a cluster and yield the environment for its commands."""
    folder = tmp_path_factory.mktemp("slurm")
    for name in ("state", "n1", "n2"):
        (folder / name).mkdir()
    key = folder / "key"
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o600)
    config = folder / "slurm.conf"
    names = {"host": socket.gethostname(), "user": getpass.getuser(), "cores": os.cpu_count()}
    ports = dict(zip(("port", "port_1", "port_2"), free_ports(3), strict=True))
    config.write_text(CONFIGURATION.format(folder=folder, **names, **ports))
    env = environment(PATH=PATH, SLURM_CONF=str(config), PET_NPROC_PER_NODE="1")
    files = {"key": "key", "socket": "munge", "pid": "munge.pid", "log": "munge.log", "seed": "munge.seed"}
    options = [
        f"--{kind}={folder}/{name}" if kind == "socket" else f"--{kind}-file={folder}/{name}"
        for kind, name in files.items()
    ]
    munged = ["munged", "--foreground", "--force", *options]
    named = ["-D", "-f", str(config)]
    commands = [munged, ["slurmctld", *named], ["slurmd", *named, "-N", "n1"], ["slurmd", *named, "-N", "n2"]]
    daemons = []
    try:
        for i, command in enumerate(commands):
            with (folder / f"{i}.log").open("wb") as log:
                daemons.append(
                    subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
                )
            time.sleep(1)
        states = ["sinfo", "--noheader", "--format=%T %D"]
        wait(
            lambda: output_of(states, env).strip() == "idle 2",
            lambda: "".join(p.read_text() for p in folder.glob("*.log")),
        )
        yield env
    finally:
        for daemon in reversed(daemons):
            daemon.terminate()
            daemon.wait(30)


def output_of(command: list[str], env: dict[str, str], folder: Path = ROOT) -> str:
    return subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True, check=False).stdout


def fresh_clone(folder: Path) -> Path:
    """Create a folder with links to this repository's folders, without outputs of runs."""
    folder.mkdir()
    for name in ("configs", "meshwright", "models", "parallel", "train", "tools"):
        (folder / name).symlink_to(ROOT / name)
    return folder


def test_at_the_time_limit_it_saves_is_queued_again_and_goes_on(slurm, data, tmp_path):
    folder, clone = tmp_path / "run", fresh_clone(tmp_path / "clone")
    arguments = tiny(data, "--checkpoint.every=100000", f"--run.dir={folder}")
    # scancel stops the first start, not a time limit, which counts in minutes; the script receives the same
    # signal.
    sbatch = ["sbatch", "--parsable", "--gpus-per-node=0", "--time=10", "configs/launch/slurm.sh"]
    job = output_of([*sbatch, "llama_debug.yaml", *arguments], slurm, clone).strip()
    output = clone / f"slurm-{job}.txt"
    try:
        wait(
            lambda: max(steps_of(folder), default=0) >= 3,
            lambda: output.read_text() if output.exists() else job,
        )
        output_of(["scancel", "--batch", "--signal=USR1", job], slurm)
        wait(lambda: ": queued again\n" in output.read_text(), output.read_text)
        assert "2 processes" in output.read_text()
        stopped = read_status(folder)
        assert (stopped["state"], stopped["reason"]) == ("stopped", "signal SIGTERM")
        # 10 s later: a credential of the second in which the old one was revoked counts as revoked too
        output_of(["scontrol", "update", f"JobId={job}", "StartTime=now+10"], slurm)
        wait(lambda: max(row["step"] for row in rows_in(folder)) > stopped["step"], output.read_text)
        assert read_status(folder)["resumed_from"] == stopped["step"]
        assert "Restarts=1" in output_of(["scontrol", "show", "job", job], slurm)
    finally:
        output_of(["scancel", job], slurm)
        wait(
            lambda: not output_of(["squeue", "--noheader"], slurm).strip(),
            lambda: output_of(["squeue"], slurm),
        )
