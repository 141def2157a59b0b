"""The calls of a training loop of one's own in any order: random walks on a mesh beside one process with
plain torch. After every call the model is what the plain one is, and nothing but its shards is left."""

import copy
import io
import itertools
import os
import random
import tempfile
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

import meshwright as mw
from meshwright.parallel.errors import PlanError
from meshwright.parallel.sharded_model import is_split
from tests.support.factories import VOCABULARY, Positioned
from tests.support.hf_models import make_tokens
from tests.support.worlds import run_ranks

Keys = dict[str, Any]
SAMPLES, TOKENS, CALLS = 8, 8, 6
SPLIT = {"blocks.*.qkv": "own_gathered", "blocks.*.out": "own_rowwise", "logits": "own_gathered"}
MESHES: dict[int, list[Keys]] = {
    2: [
        {},
        {"strategy": "ddp"},
        {"tp": 2},
        {"cp": 2},
        {"reshard_after_forward": False, "activation_checkpoint": "full"},
    ],
    4: [
        {"dp_replicate": 2, "dp_shard": 2},
        {"tp": 2, "reduce_gradients": "last_micro_batch", "reshard_after_backward": False},
        {"tp": 2, "dp_replicate": 2, "dp_shard": 1},
        {"cp": 2, "activation_checkpoint": "offload"},
        {"strategy": "no_shard"},
    ],
}
UNSHARDED: dict[str, list[list[str]]] = {
    "sum": [["blocks.1.norm.weight"], ["blocks.0.out.weight", "places.weight"]],
    "mean_of_ranks": [[], ["logits.bias"]],
}


class Walk:
    """A sharded and a plain model in the same state, and the calls, each done to both."""

    saved_by: tuple[int, float] | None

    def __init__(self, keys: Keys, gradients: Any, rng: random.Random, compiled: bool, folder: Path) -> None:
        self.rng, self.folder, self.step, self.settled = rng, folder, 0, True
        self.saved, self.saved_by = io.BytesIO(), None
        torch.manual_seed(rng.randrange(1000))
        self.plain = Positioned()
        with torch.device("meta"):
            model = Positioned()
        self.gradients = gradients
        self.count = rng.choice([int, torch.tensor])
        ranks, ids = dist.get_world_size(), make_tokens(VOCABULARY, 2, TOKENS)
        whole = rng.choice(UNSHARDED[gradients])
        if compiled and "activation_checkpoint" in keys:
            whole = []  # torch cannot recompute attention in such compiled blocks on a CPU
        units = mw.describe(model, (ids,), styles=SPLIT, unsharded=whole)
        config = mw.ParallelConfig(compile=mw.CompileConfig(compiled, "aot_eager"), **keys)
        plan = mw.make_plan(config, units, mw.RunShape(ranks, ranks, seq_len=TOKENS))
        mesh = mw.build_mesh(plan.mesh, "cpu")
        self.sharded = mw.apply_plan(model, plan, mesh, gradients=self.gradients)
        with pytest.raises(PlanError, match="no values"):
            self.sharded.clip_grad_norm(1.0)
        self.load_weights()
        with pytest.raises(PlanError, match="no gradients"):
            self.sharded.clip_grad_norm(1.0)
        self.new_optimizer()
        for block in model.blocks if mesh["tp"].get_local_rank() else ():  # as attention on a GPU rounds
            block.norm.register_forward_hook(_round)

    def load_weights(self) -> None:
        mw.load_weights(self.sharded, dict(self.plain.named_parameters()))

    def new_optimizer(self) -> None:
        self.sharded.settle()
        self.momentum = self.rng.choice([0.0, 0.9])
        models = (self.sharded.model, self.plain)
        self.optimizers = [
            torch.optim.SGD(model.parameters(), lr=0.01, momentum=self.momentum, foreach=True)
            for model in models
        ]

    def batch(self) -> Tensor:
        return torch.randint(
            VOCABULARY, (SAMPLES, TOKENS), generator=torch.Generator().manual_seed(self.step)
        )

    def own(self, ids: Tensor) -> Tensor:
        part = ids.tensor_split(self.sharded.plan.mesh.data_parallel)[self.sharded.data_rank]
        return part[:, self.sharded.token_positions(TOKENS)]

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.sharded.model(ids, self.sharded.token_positions(TOKENS))
        return logits

    def train(self, evaluates_within: bool = False) -> None:
        self.step += 1
        micro, ids = self.rng.choice([1, 2]), self.batch()
        batches = self.own(ids).tensor_split(micro)
        count = None if self.gradients == "mean_of_ranks" else lambda batch: self.count(batch.numel())
        reduction = "mean" if count is None else "sum"
        for batch, divisor in self.sharded.micro_batches(batches, count):
            loss = F.cross_entropy(self.forward(batch).flatten(0, 1), batch.flatten(), reduction=reduction)
            (loss / divisor).backward()
            if evaluates_within:
                with mw.evaluating(self.sharded.model):
                    self.forward(batch)
        F.cross_entropy(self.plain(ids).flatten(0, 1), ids.flatten()).backward()
        expected = nn.utils.clip_grad_norm_(self.plain.parameters(), 1.0)
        torch.testing.assert_close(self.sharded.clip_grad_norm(1.0), expected, rtol=1e-4, atol=0.0)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def evaluate_within_a_step(self) -> None:
        self.train(evaluates_within=True)

    def evaluate(self) -> None:
        with mw.evaluating(self.sharded.model):
            self.compare_outputs()

    def forward_without_gradients(self) -> None:
        with torch.no_grad():
            self.compare_outputs()

    def compare_outputs(self) -> None:
        ids = self.batch()
        with torch.no_grad():
            expected = self.own(self.plain(ids))
        torch.testing.assert_close(self.forward(self.own(ids)).detach(), expected, rtol=1e-4, atol=1e-4)

    def forward_alone(self) -> None:
        """With gradients, for a backward that does not come: what is called next settles that."""
        self.forward(self.own(self.batch()))
        self.settled = False

    def swap(self) -> None:
        """Evaluate with other weights, as of an average, put into the optimizer's parameters."""
        self.sharded.settle()
        kept = []
        for optimizer in self.optimizers:
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            kept.append([(p, p.detach().clone()) for p in parameters])
            torch._foreach_mul_([p.data for p in parameters], 0.5)
        self.rng.choice([self.evaluate, self.forward_without_gradients, self.forward_alone])()
        self.sharded.settle()
        for parameter, value in itertools.chain(*kept):
            parameter.data.copy_(value)

    def save(self) -> None:
        if (self.folder / f"step-{self.step:08d}").exists():
            return
        mw.save(self.folder, self.sharded, self.optimizers[0], self.step, extra={"step": self.step})
        self.saved, self.saved_by = io.BytesIO(), (self.step, self.momentum)
        torch.save([part.state_dict() for part in (self.plain, self.optimizers[1])], self.saved)

    def load(self) -> None:
        if self.saved_by is None:
            assert mw.load(self.folder, self.sharded, self.optimizers[0]) is None
        elif self.saved_by[1] == self.momentum:
            step = self.saved_by[0]
            assert mw.load(self.folder, self.sharded, self.optimizers[0]) == (step, {"step": step})
            self.saved.seek(0)
            states = torch.load(self.saved)
            for part, state in zip((self.plain, self.optimizers[1]), states, strict=True):
                part.load_state_dict(state)

    def check(self) -> None:
        if not self.settled:
            self.settled = True
            return
        plain, copies = dict(self.plain.named_parameters()), list[Tensor]()
        for name, parameter in self.sharded.model.named_parameters():
            assert isinstance(parameter, DTensor), f"{name} is left gathered"
            place, local = (parameter.device_mesh, parameter.placements), parameter.to_local().detach()
            expected = distribute_tensor(plain[name].detach(), *place, src_data_rank=None).to_local()
            torch.testing.assert_close(local, expected, rtol=1e-4, atol=1e-5, msg=name)
            if not is_split(parameter, "tp"):
                copies.append(local.flatten())
        of_ranks: list[Any] = [None] * self.sharded.mesh["tp"].size()
        dist.all_gather_object(of_ranks, torch.cat(copies), group=self.sharded.mesh.get_group("tp"))
        assert all(torch.equal(of_ranks[0], of_rank) for of_rank in of_ranks), "copies over tp drift"
        assert all(module.training for module in self.sharded.model.modules())


CALLS_OF_A_LOOP = (
    *("train", "train", "train", "evaluate_within_a_step", "evaluate", "forward_without_gradients"),
    *("forward_alone", "swap", "save", "load", "load_weights", "new_optimizer"),
)


def _round(_module: Any, _inputs: Any, x: Tensor) -> None:
    """Let the gradient of a module's output be off as if it were summed in another order."""
    if x.requires_grad:
        x.register_hook(lambda gradient: gradient * (1 + 1e-6))


def walk_each(jobs: list[tuple[Keys, str, str, bool]], folder: Path) -> None:
    for i, (keys, gradients, seed, compiled) in enumerate(jobs):
        torch._dynamo.reset()
        rng, done = random.Random(seed), list[str]()
        try:
            walk = Walk(keys, gradients, rng, compiled, folder / str(i))
            for call in rng.choices(CALLS_OF_A_LOOP, k=CALLS):
                done.append(call)
                getattr(walk, call)()
                walk.check()
        except BaseException as error:
            raise AssertionError(
                f"{keys}, {gradients}, seed {seed}, compiled {compiled}: {', '.join(done)}"
            ) from error


def tied_and_failed() -> float:
    """The factor by which the gradient of a tied parameter, which stays whole, is off; a failed backward and
    a step without its zero_grad are refused afterwards."""
    plain = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    plain[2].weight = plain[0].weight
    model, x = copy.deepcopy(plain).to("meta"), torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
    model[2].weight = model[0].weight
    units = mw.describe(model, (x,), blocks=nn.Linear, unsharded=["2.weight"])
    config = mw.ParallelConfig(compile=mw.CompileConfig(enabled=False))
    plan = mw.make_plan(config, units, mw.RunShape(2, 2, seq_len=1))
    sharded = mw.apply_plan(model, plan, mw.build_mesh(plan.mesh, "cpu"), gradients="sum")
    mw.load_weights(sharded, dict(plain.named_parameters()))
    for batch, count in sharded.micro_batches([x.chunk(2)[sharded.data_rank]], len):
        (model(batch).square().sum() / count).backward()
    (plain(x).square().sum() / 4).backward()
    factor = mw.full_tensor(model[0]._parameters["weight"].grad).norm() / plain[0].weight.grad.norm()
    with pytest.raises(PlanError, match="zero_grad"):
        next(sharded.micro_batches([x], len))
    model.zero_grad()
    with pytest.raises(PlanError, match="at least one"):
        next(sharded.accumulate([]))
    with mw.evaluating(model):
        loss = model(x).sum()
    with pytest.raises(RuntimeError, match="evaluating"):
        loss.backward()
    with pytest.raises(PlanError, match="backward has failed"):  # noqa: PT012
        for batch, count in sharded.micro_batches([x], len):
            (model(batch).sum() / count).backward()
    return factor.item()


def test_a_tied_parameter_may_stay_whole_and_what_would_train_wrongly_is_refused() -> None:
    assert run_ranks(2, tied_and_failed) == [pytest.approx(1.0, rel=1e-5)] * 2


def walk(ranks: int, compiled: bool, draws: int) -> None:
    day = os.environ["MESHWRIGHT_TESTS_SEED"]
    cases = itertools.product(MESHES[ranks], UNSHARDED, range(draws))
    jobs = [(keys, reduced, f"{day} {i}", compiled) for i, (keys, reduced, _) in enumerate(cases)]
    if draws == 1 and not compiled:  # every mesh on every day, and both ways on each in two
        odd = zlib.crc32(day.encode())
        jobs = [job for i, job in enumerate(jobs) if "strategy" in job[0] or (i // 2 + i + odd) % 2]
    with tempfile.TemporaryDirectory() as folder:
        run_ranks(ranks, walk_each, jobs, Path(folder), limit_s=900)


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.sampled(3, day=1))])
def test_calls_in_any_order_train_what_one_process_does(ranks: int) -> None:
    walk(ranks, compiled=False, draws=1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "compiled", "draws"),
    [
        pytest.param(*case, marks=pytest.mark.sampled(8, day=2 * day))
        for day, case in enumerate([(2, False, 4), (2, True, 1), (4, False, 3), (4, True, 1)])
    ],
)
def test_many_more_orders_and_compiled_ones(ranks: int, compiled: bool, draws: int) -> None:
    walk(ranks, compiled, draws)
