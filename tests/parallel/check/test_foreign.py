"""What a check of somebody else's sharding sees, beside gradients: updates of real learning rates, what an
optimizer hides, outputs that are gone, buffers, an evaluation; and right loops in which rounding is all there
is of a gradient."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from meshwright.parallel.check.compare import compare_recorded
from meshwright.parallel.check.foreign import is_random
from meshwright.parallel.check.recorded import RankRecord, Seen
from meshwright.parallel.check.report import CheckReport
from meshwright.parallel.check.subject import MOST_PARAMETERS, Subject
from meshwright.parallel.errors import PlanError
from meshwright.parallel.plan.schema import MeshPlan
from tests.support.checks import other_bits, per_shard, reports_of


class Net(nn.Module):
    """Two outputs, a buffer, and a bias before a mean, whose gradient is rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 8)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 16))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h = self.first(x)
        h = self.scale * torch.tanh(h - h.mean(1, keepdim=True))
        return {"y": self.second(h), "h": h}


def build() -> tuple[Net, tuple[Tensor]]:
    return Net(), (torch.randn(16, 4, 8, generator=torch.Generator().manual_seed(0)),)


def shard(model: Net, mesh: DeviceMesh) -> None:
    fully_shard(model, mesh=mesh)


def undivided(model: Net, mesh: DeviceMesh) -> None:
    shard(model, mesh)
    model.set_force_sum_reduction_for_comms(True)  # gloo has no PREMUL_SUM
    model.set_gradient_divide_factor(1.0)


def buffer_on_one_rank(model: Net, mesh: DeviceMesh) -> None:
    model.scale.mul_(1 + dist.get_rank())
    shard(model, mesh)


def output_gone(model: Net, mesh: DeviceMesh) -> None:
    shard(model, mesh)
    model.register_forward_hook(lambda module, _, out: out if module.training else {"y": out["y"]})


def wrong_evaluation(model: Net, mesh: DeviceMesh) -> None:
    shard(model, mesh)
    model.register_forward_hook(
        lambda module, _, out: out if module.training else {name: 0 * value for name, value in out.items()}
    )


class Loop:
    """AdamW with a learning rate of real trainings, and a checkpoint with its moments."""

    decay, moments = 0.1, True

    def __init__(self, model: nn.Module, mesh: DeviceMesh | None) -> None:
        self.model, self.ranks = model, dist.get_world_size()
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=self.decay)

    def step(self, batches: list[tuple[Tensor]]) -> None:
        for (x,) in batches:
            (self.model(x)["y"].square().sum() * self.ranks / 100).backward()
        self.update()
        self.optimizer.zero_grad()

    def update(self) -> None:
        self.optimizer.step()

    def save(self, folder: Path) -> None:
        torch.save([self.model.state_dict(), self.optimizer.state_dict()], folder / f"{dist.get_rank()}.pt")

    def load(self, folder: Path) -> None:
        weights, states = torch.load(folder / f"{dist.get_rank()}.pt", weights_only=False)
        self.model.load_state_dict(weights)
        if self.moments:
            self.optimizer.load_state_dict(states)


class MomentsLost(Loop):
    moments = False


class DecayOnOneProcess(Loop):
    """Weight decay is lost where there are several ranks."""

    def __init__(self, model: nn.Module, mesh: DeviceMesh | None) -> None:
        self.decay = 0.0 if mesh else 0.1
        super().__init__(model, mesh)


class Masters(Loop):
    """The optimizer steps with copies of the weights, and with three times the gradient."""

    def __init__(self, model: nn.Module, mesh: DeviceMesh | None) -> None:
        super().__init__(model, mesh)
        self.masters = [p.detach().clone() for p in model.parameters()]
        self.optimizer = torch.optim.AdamW(self.masters, lr=1e-4)

    def update(self) -> None:
        for master, parameter in zip(self.masters, self.model.parameters(), strict=True):
            master.grad = parameter.grad.detach() * 3
        self.optimizer.step()
        for master, parameter in zip(self.masters, self.model.parameters(), strict=True):
            parameter.data.copy_(master)
            parameter.grad = None


class Outer(torch.optim.Optimizer):
    """An optimizer that calls another one, whose gradients of ranks are 2% too large."""

    def __init__(self, inner: torch.optim.Optimizer, scale: float) -> None:
        super().__init__(inner.param_groups, {})
        self.inner, self.scale = inner, scale

    def step(self, closure: Any = None) -> None:
        self.inner.step()


class Nested(Loop):
    def __init__(self, model: nn.Module, mesh: DeviceMesh | None) -> None:
        super().__init__(model, mesh)
        self.optimizer = Outer(self.optimizer, 1.02 if mesh else 1.0)

    def update(self) -> None:
        for parameter in self.model.second.parameters():
            parameter.grad.mul_(self.optimizer.scale)
        super().update()


CASES: dict[str, tuple[Callable[..., Any], type[Loop] | None, str]] = {
    "right": (shard, Loop, ""),
    "gradients undivided, on gloo": (undivided, None, ""),
    "buffer of one rank": (buffer_on_one_rank, None, "after sharding: buffer scale"),
    "output gone": (output_gone, None, "evaluation: output 1: missing"),
    "evaluation of a loop": (wrong_evaluation, Loop, "evaluation: output 0"),
    "moments lost": (shard, MomentsLost, "after step 3, loaded: change of second.weight"),
    "decay": (shard, DecayOnOneProcess, "after step 1: change of second.weight"),
    "nested": (shard, Nested, "step 1: gradient of second.bias"),
}


def adamw(model: nn.Module, mesh: DeviceMesh | None) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), 1e-2, fused=True)


OPTIMIZERS: dict[Callable[..., torch.optim.Optimizer], str] = {
    adamw: "",
    per_shard: "after step 1: change of second.weight is off by .*: computed from each rank's shard alone",
    other_bits: "after step 1: change of .*: not bitwise the same",
}


def subjects(folder: Path) -> Iterator[tuple[str, Subject]]:
    for name, (sharding, loop, _) in CASES.items():
        (folder / name).mkdir(exist_ok=True)
        yield name, Subject(build, sharding, MeshPlan(1, 2, 1), loop, folder / name)
    for optimizer in OPTIMIZERS:
        yield optimizer.__name__, Subject(build, shard, MeshPlan(1, 2, 1), optimizer=optimizer)
    (folder / "masters").mkdir(exist_ok=True)
    yield "masters", Subject(build, shard, MeshPlan(1, 2, 1), Masters, folder / "masters")


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, CheckReport]:
    return reports_of(subjects, tmp_path_factory.mktemp("foreign"))


@pytest.mark.parametrize("name", CASES)
def test_what_is_wrong_is_said_first(name: str, reports: dict[str, CheckReport]) -> None:
    report, says = reports[name], CASES[name][2]
    assert report.same == (not says), str(report)
    assert says in str(report)


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda optimizer: optimizer.__name__)
def test_an_optimizer_that_computes_otherwise_on_a_mesh_is_found(
    optimizer: Callable[..., torch.optim.Optimizer], reports: dict[str, CheckReport]
) -> None:
    report, says = reports[optimizer.__name__], OPTIMIZERS[optimizer]
    assert report.same == (not says), str(report)
    assert re.search(says, str(report))
    assert ("updates of AdamW, not fused: bitwise" in report.hints) == (optimizer is adamw)


def test_what_could_not_be_compared_is_said(reports: dict[str, CheckReport]) -> None:
    assert any("no optimizer of torch" in each for each in reports["masters"].not_run)


def test_steps_that_change_nothing_are_an_error_unless_all_is_frozen() -> None:
    record = RankRecord({Seen("after step 1", "change", "weight"): torch.zeros(2)})
    with pytest.raises(PlanError):
        compare_recorded(MeshPlan(1, 2, 1), record, [record, record])
    record.frozen = ("weight",)
    assert compare_recorded(MeshPlan(1, 2, 1), record, [record, record]).same


def test_random_numbers_of_training_are_noticed() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1))
    assert is_random(model, (torch.ones(2, 8),))
    assert not is_random(model.eval(), (torch.ones(2, 8),))


@pytest.mark.parametrize("size", [8, MOST_PARAMETERS], ids=["without values", "too large"])
def test_a_model_that_cannot_be_checked_is_refused(size: int) -> None:
    def build() -> tuple[nn.Module, tuple[Tensor]]:
        model = nn.Linear(size, 1, device="meta")
        return (model if size == 8 else model.to_empty(device="cpu")), (torch.ones(2, size),)

    subject = Subject(build, shard, MeshPlan(1, 1, 1))
    with pytest.raises(PlanError):
        subject.start()
    with pytest.raises(PlanError):
        subject.device_mesh()
