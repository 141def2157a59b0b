"""Proves that a model which somebody else's code has sharded trains as it does on one process."""

import dataclasses
import tempfile
from pathlib import Path

from meshwright.parallel.check.compare import compare_recorded
from meshwright.parallel.check.foreign import Subject, record_rank, record_twin
from meshwright.parallel.check.kinds import TOLERANCE
from meshwright.parallel.check.processes import run_ranks
from meshwright.parallel.check.report import CheckReport


def check_sharding(subject: Subject, tolerance: float = TOLERANCE) -> CheckReport:
    """Run the model on the mesh and on one process, and compare values, outputs, gradients, updates and an
    evaluation; with a loop of theirs what its optimizers get, updates, and a step after a load.

    Args:
        tolerance: of a relative difference, in float32

    Raises PlanError if a process fails: its model or functions cannot be sent to it, or raise.
    """
    with tempfile.TemporaryDirectory(prefix="meshwright-saved-") as folder:
        subject = dataclasses.replace(subject, folder=Path(folder))
        ranks = run_ranks(record_rank, subject.mesh.world_size, (subject,), subject.device)
        twin = run_ranks(record_twin, 1, (subject, ranks), subject.device)[0]
    return compare_recorded(subject.mesh, twin, ranks, tolerance)
