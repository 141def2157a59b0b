"""How one case of `bench gpu` is measured: in processes of its own, with what the planner predicts beside
it."""

import dataclasses
import json
import os
import socket
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from meshwright.models.cost import flops_per_token
from meshwright.parallel.memory_breakdown import GIB
from meshwright.parallel.planner.hardware import Hardware, find_hardware, load_hardware
from meshwright.parallel.planner.memory_model import usable_bytes
from meshwright.tools.bench.gpu import peer_torchtitan
from meshwright.tools.bench.gpu.cases import (
    ACCELERATE,
    STEPS_PER_REPORT,
    TORCHTITAN,
    Curves,
    EndToEnd,
    GpuCase,
    GpuShape,
    PeerRun,
    measure_curves,
)
from meshwright.tools.bench.gpu.peers import missing_packages
from meshwright.tools.bench.speed.kernel_table import table_of
from meshwright.tools.bench.train_run import (
    MFUS,
    WARM_UP_STEPS,
    Setup,
    config_to_record,
    measure_run_in,
    resolve,
)
from meshwright.tools.processes import BenchError, make_environment, python_command, run_to_end
from meshwright.train.config import TrainingJob
from meshwright.train.planning.device_defaults import best_attention
from meshwright.train.planning.predict import ATTENTION_KINDS, Prediction, predict
from meshwright.train.planning.resolve import plan_run

PROFILED_STEPS = STEPS_PER_REPORT  # between two reports, which wait for the GPU: nothing else runs into them
# what holds the package meshwright
ROOT = Path(__file__).parents[4]


class AbsentError(Exception):
    """A peer is not installed; the message names what is missing."""


class OutOfTimeError(Exception):
    """The case was cut off because the time for all of them was over."""


@dataclasses.dataclass(frozen=True)
class GpuMachine:
    """Where the cases run: torch's device and its name, the shape, CPU threads, and the user's config
    keys."""

    device: str
    device_name: str
    shape: GpuShape
    threads: int
    overrides: tuple[str, ...]

    def hardware(self) -> Hardware | None:
        """Its kind; None where no file in configs/hardware describes it. Of a CPU as many cores as a run
        uses."""
        if self.device == "cpu":
            return dataclasses.replace(load_hardware()["cpu"], cores=self.threads)
        return find_hardware(self.device_name)


def setup_of(machine: GpuMachine, work: EndToEnd, profiled: bool = False) -> Setup:
    """The run of train.main."""
    keys = [*work.keys(machine.shape), f"--run.device={machine.device}", *machine.overrides]
    if profiled:
        keys += [
            f"--profile.start={WARM_UP_STEPS + STEPS_PER_REPORT + 1}",
            f"--profile.steps={PROFILED_STEPS}",
        ]
    return Setup(1, machine.threads, keys, STEPS_PER_REPORT)


def config_of(machine: GpuMachine, work: EndToEnd | PeerRun | Curves | str) -> dict[str, Any]:
    """What the record says was run. Raises what a wrong config raises."""
    if isinstance(work, EndToEnd):
        return config_to_record(resolve(setup_of(machine, work)))
    if isinstance(work, Curves):
        return {
            name: config_to_record(resolve(setup_of(machine, run))) | {"steps": work.steps}
            for name, run in (("run", work.run), ("beside", work.beside))
        }
    if isinstance(work, PeerRun):
        return {
            "peer": work.peer,
            "layers": work.layers,
            "checkpoint": work.checkpoint,
            "rival": work.rival.name,
            "shape": dataclasses.asdict(machine.shape),
        }
    return {"shape": dataclasses.asdict(machine.shape)}


def measure_case(case: GpuCase, machine: GpuMachine, end_at: float) -> dict[str, Any]:
    """Figures of one run. Raises BenchError where it fails, PlanError where it does not fit, AbsentError and
    OutOfTimeError."""

    def look() -> None:
        if time.monotonic() > end_at:
            raise OutOfTimeError

    with tempfile.TemporaryDirectory(prefix="meshwright-bench-") as name:
        folder = Path(name)
        if isinstance(case.work, EndToEnd):
            return measure_end_to_end(folder, case.work, case.profiled, machine, look)
        if isinstance(case.work, PeerRun):
            return measure_peer(folder, case.work, machine, look)
        if isinstance(case.work, Curves):
            keys = [f"--run.device={machine.device}", *machine.overrides]
            return measure_curves(folder, case.work, machine.shape, keys, machine.threads, look)
        return run_worker(folder, case.work, [], machine, {}, look)


def measure_end_to_end(
    folder: Path, work: EndToEnd, profiled: bool, machine: GpuMachine, look: Callable[[], None]
) -> dict[str, Any]:
    """A run of train.main, the prediction for it, and, of a profiled one, the table of its kernels."""
    setup = setup_of(machine, work, profiled)
    predicted = predict_here(resolve(setup).job, machine)
    figures = {"predicted": predicted, **dataclasses.asdict(measure_run_in(folder, setup, {}, look))}
    if not profiled:
        return figures
    (trace,) = (folder / "run" / "profile").glob("step-*/rank-0.json.gz")
    return {**figures, "kernels": table_of(trace, PROFILED_STEPS)}


def predict_here(job: TrainingJob, machine: GpuMachine) -> dict[str, float] | None:
    """What the planner says of the run; None of a device that it does not know. Raises BenchError where it
    does not fit."""
    hardware = machine.hardware()
    if hardware is None:
        return None
    plan = plan_run(job, 1, 1, best_attention(job, hardware))
    prediction: Prediction = predict(job, plan, hardware, 1)
    peak_gib, usable_gib = (
        prediction.memory.peak_bytes / GIB,
        usable_bytes(int(hardware.memory_gib * GIB), hardware) / GIB,
    )
    if peak_gib > usable_gib:
        raise BenchError(f"does not fit: the planner says {peak_gib:.1f} GiB of {usable_gib:.1f}")
    return {
        "step_time_s": prediction.timeline.step_s,
        "tokens_per_s_per_rank": prediction.tokens_per_s_per_gpu,
        "peak_memory_gib": peak_gib,
        "reserved_memory_gib": prediction.reserved_bytes / GIB,
    }


def measure_peer(
    folder: Path, work: PeerRun, machine: GpuMachine, look: Callable[[], None]
) -> dict[str, Any]:
    """A peer's figures, with both MFUs as ours has them. Raises AbsentError."""
    if missing := missing_packages(work.peer):
        raise AbsentError(f"{work.peer} is absent: {' and '.join(missing)} not installed here")
    if work.peer == TORCHTITAN:
        figures = run_torchtitan(folder, work, machine, look)
    else:
        arguments = [f"--layers={work.layers}", f"--checkpoint={work.checkpoint}"]
        alone = lone_rank() if work.peer == ACCELERATE else {}
        figures = run_worker(folder, work.peer, arguments, machine, alone, look)
    return {**figures, **mfus_of(figures["tokens_per_s_per_rank"], work.layers, machine)}


def mfus_of(tokens_per_s: float, layers: int, machine: GpuMachine) -> dict[str, float | None]:
    """Attention counted in full and half; None where the device has no peak to compare with."""
    hardware, shape = machine.hardware(), machine.shape
    if hardware is None or hardware.cores:
        return dict.fromkeys(MFUS)
    peak_flops = hardware.peak_tflops["bfloat16"] * 1e12
    model = shape.model(layers)
    mfus = (
        tokens_per_s * flops_per_token(model, shape.seq_len, kind) / peak_flops for kind in ATTENTION_KINDS
    )
    return dict(zip(MFUS, mfus, strict=True))


def run_worker(
    folder: Path,
    work: str,
    arguments: list[str],
    machine: GpuMachine,
    variables: dict[str, str],
    look: Callable[[], None],
) -> dict[str, Any]:
    """What a worker found. Raises BenchError if it fails."""
    out = folder / "figures.json"
    command = [
        *python_command("meshwright.tools.bench.gpu.worker", 1, folder),
        work,
        f"--shape={machine.shape.name}",
        f"--device={machine.device}",
        f"--threads={machine.threads}",
        f"--out={out}",
        *arguments,
    ]
    run_to_end(command, make_environment(machine.threads, variables), folder / "log", look)
    figures: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    return figures


def run_torchtitan(
    folder: Path, work: PeerRun, machine: GpuMachine, look: Callable[[], None]
) -> dict[str, Any]:
    """Its own trainer, in a folder with what it reads. Raises BenchError if it fails."""
    command = peer_torchtitan.prepare(folder, machine.shape.name, work.layers, work.checkpoint)
    path = os.pathsep.join((str(folder), str(ROOT)))
    run_to_end(command, make_environment(machine.threads, {"PYTHONPATH": path}), folder / "log", look, folder)
    return peer_torchtitan.read_log(folder / "log", machine.shape.seq_len)


def lone_rank() -> dict[str, str]:
    """A launcher's variables for a process alone: accelerate shards only where there are some."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    return {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
    }
