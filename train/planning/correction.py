"""What this machine's own runs correct: their speed as a share of the predicted one, kept beside the
measurements of the machine."""

import contextlib
import hashlib
import statistics
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from meshwright.parallel.compile.apply import cache_folder
from meshwright.parallel.planner.hardware import Hardware
from meshwright.parallel.yaml_io import YamlError, load_mapping, to_yaml
from meshwright.train.calibration.compute import device_model
from meshwright.train.config import TrainingJob
from meshwright.train.distributed.process_group import usable_cores
from meshwright.train.files import write_atomically
from meshwright.train.planning.resolve import best_dtype

MOST_KEPT = 9  # runs; the factor is their median


@dataclass(frozen=True)
class Correction:
    """The runs of a machine, those of one dtype, compiled or not.

    Args:
        path: the file that keeps them, of one machine and version of torch
        runs: dtype, and compiled or eager
        shares: measured speed of each run as a share of the one predicted without a correction, the last last
        least_steps: of a run that counts, after its first report
    """

    path: Path
    runs: str
    shares: tuple[float, ...]
    least_steps: int = 10

    @property
    def factor(self) -> float:
        """The speed of these runs as a share of the predicted one; 1 without any."""
        return statistics.median(self.shares) if self.shares else 1.0

    def describe(self) -> str:
        """Return the factor, and the mean error of the predictions of these runs without and with it."""
        before, after = (
            statistics.mean(abs(factor / share - 1) for share in self.shares) for factor in (1.0, self.factor)
        )
        return (
            f"{self.factor:.3g} times the predicted speed on this machine ({self.runs}): error of "
            f"{len(self.shares)} runs {before:.1%} without this correction, {after:.1%} with it; "
            f"delete {self.path} to forget it"
        )

    def with_run(self, share: float) -> "Correction":
        """Return the correction with another run, and keep it, unless the folder cannot be written."""
        added = replace(self, shares=(*self.shares, share)[-MOST_KEPT:])
        with contextlib.suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            kept = _read(self.path) | {self.runs: list(added.shares)}
            write_atomically(self.path, to_yaml(kept).encode())
        return added


def find_correction(job: TrainingJob, hardware: Hardware, device: torch.device) -> Correction:
    """Return what is kept of this machine's runs with the dtype of the job, compiled as it is."""
    parallel = job.parallel
    dtype = best_dtype(hardware) if parallel.param_dtype == "auto" else parallel.param_dtype
    products = dtype if parallel.float8.recipe == "none" else "float8"
    runs = f"{products}, {'compiled' if parallel.compile.enabled else 'eager'}"
    facts = device_model(device), usable_cores(), torch.__version__
    key = hashlib.sha256(repr(facts).encode()).hexdigest()[:16]
    path = cache_folder(job.parallel.compile) / f"corrections-{key}.yaml"
    return Correction(path, runs, tuple(_read(path).get(runs, ())))


def _read(path: Path) -> dict[str, list[float]]:
    """Return the shares in a file by runs; none without a file that can be read."""
    try:
        return dict(load_mapping(path))
    except (OSError, YamlError):
        return {}
