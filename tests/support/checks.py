"""Reports of checks on two ranks and on one process, several subjects at once; and optimizers that compute
otherwise on a mesh."""

import pickle
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from meshwright.parallel.check.compare import compare_recorded
from meshwright.parallel.check.foreign import record_rank, record_twin
from meshwright.parallel.check.recorded import RankRecord
from meshwright.parallel.check.report import CheckReport
from meshwright.parallel.check.subject import Subject
from meshwright.parallel.fsdp import local_part
from meshwright.train.optim.muon import orthogonalise
from tests.support.worlds import run_ranks

RATE = 1e-2  # of optimizers
# a function at module level, because many a subject cannot be pickled
Subjects = Callable[..., Iterable[tuple[str, Subject]]]


def reports_of(subjects: Subjects, *arguments: Any) -> dict[str, CheckReport]:
    """Return the report on each of `subjects(*arguments)`, by name."""
    ranks = pickle.dumps(run_ranks(2, _record, subjects, arguments))  # as bytes, not an open file a tensor
    return dict(run_ranks(1, _compare, subjects, arguments, ranks)[0])


def _record(subjects: Subjects, arguments: tuple[Any, ...]) -> dict[str, RankRecord]:
    return {name: record_rank(subject) for name, subject in subjects(*arguments)}


def _compare(subjects: Subjects, arguments: tuple[Any, ...], ranks: bytes) -> dict[str, CheckReport]:
    recorded, found = pickle.loads(ranks), {}
    for name, subject in subjects(*arguments):
        of_subject = [rank[name] for rank in recorded]
        found[name] = compare_recorded(subject.mesh, record_twin(subject, of_subject), of_subject)
    return found


class PerShard(torch.optim.SGD):
    """Orthogonalises what a rank has of each matrix, as if it were the whole."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            gradient = local_part(p.grad)
            local_part(p).sub_(orthogonalise(gradient[None])[0] if p.dim() == 2 else gradient, alpha=RATE)


def per_shard(model: nn.Module, mesh: DeviceMesh | None) -> torch.optim.Optimizer:
    return PerShard(model.parameters(), RATE)


def momentum_lost(model: nn.Module, mesh: DeviceMesh | None) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), RATE, momentum=0.0 if mesh else 0.9)


def other_bits(model: nn.Module, mesh: DeviceMesh | None) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), RATE * (1 + 1e-6 if mesh else 1))
