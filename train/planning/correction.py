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
from meshwright.train.calibration.compute import device_model
from meshwright.train.config import TrainingJob
from meshwright.train.distributed.process_group import usable_cores
from meshwright.train.files import write_atomically
from meshwright.train.planning.resolve import best_dtype

MOST_KEPT = 9  # runs; the factor is their median


@dataclass(frozen=True)
class Correction:
    """The runs of one machine, version of torch and dtype, compiled or not: the file that keeps them, and the
    measured speed of each as a share of the one predicted without a correction, the last last."""

    path: Path
    shares: tuple[float, ...]

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
            f"{self.factor:.3g} times the predicted speed on this machine, from its last {len(self.shares)} "
            f"runs: error {before:.1%} without, {after:.1%} with it; delete {self.path} to forget it"
        )

    def with_run(self, share: float) -> "Correction":
        """Return the correction with another run, and keep it, unless the folder cannot be written."""
        added = replace(self, shares=(*self.shares, share)[-MOST_KEPT:])
        with contextlib.suppress(OSError):
            write_atomically(self.path, "".join(f"{each:.4g}\n" for each in added.shares).encode())
        return added


def find_correction(job: TrainingJob, hardware: Hardware, device: torch.device) -> Correction:
    """Return what is kept of this machine's runs with the dtype of the job, compiled as it is."""
    parallel, facts = job.parallel, (hardware.name, device_model(device), usable_cores(), torch.__version__)
    dtype = best_dtype(hardware) if parallel.param_dtype == "auto" else parallel.param_dtype
    products = dtype if parallel.float8.recipe == "none" else "float8"
    key = hashlib.sha256(repr(facts).encode()).hexdigest()[:16]
    runs = f"{products}-{'compiled' if parallel.compile.enabled else 'eager'}"
    path = cache_folder(parallel.compile) / f"corrections-{key}-{runs}.txt"
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    return Correction(path, tuple(map(float, text.split())))
