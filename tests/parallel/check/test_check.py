"""The check finds what a sharded model computes differently, and says what it smells of."""

import dataclasses
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import meshwright as mw
from meshwright.parallel import tensor_parallel
from meshwright.parallel.check.check import check, compare
from meshwright.parallel.check.check import on_meta as on_the_meta_device
from meshwright.parallel.check.kinds import relative_error
from meshwright.parallel.check.report import CheckReport
from meshwright.parallel.check.small_plan import not_run, small_plan
from meshwright.parallel.check.values import with_random_ids
from meshwright.parallel.model.parts import kind_of_loss, outputs_of_parts
from tests.support.checks import momentum_lost, other_bits, per_shard
from tests.support.factories import Positioned, rooted
from tests.support.worlds import run_ranks
from tests.support.zoo import MADE, linears

EAGER, DYNAMO = mw.CompileConfig(enabled=False), mw.CompileConfig(backend="eager")


class CenteredNorm(nn.Module):
    """(1 + w) x / |x|, with an eps of another name."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.zeros(dim)), 1e-6

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon) * (1 + self.weight)

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)


class Block(nn.Module):
    """A block with keyword arguments that returns a dict, biases, a norm of its own formula, and a norm of
    each head."""

    def __init__(self, norm: type[nn.Module] = CenteredNorm) -> None:
        super().__init__()
        self.norm, self.head_norm = norm(16), nn.LayerNorm(4)
        self.q, self.v, self.out = (nn.Linear(16, 16) for _ in range(3))
        self.k = nn.Linear(16, 16, bias=False)  # attention is the same for any, so its gradient is 0
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, *, state: dict[str, Tensor], scale: float) -> dict[str, Tensor]:
        x = state["x"]
        normed = self.norm(x)
        q, k, v = (
            linear(normed).unflatten(-1, (-1, 4)).transpose(1, 2) for linear in (self.q, self.k, self.v)
        )
        mixed = F.scaled_dot_product_attention(self.head_norm(q), k, v).transpose(1, 2).flatten(2)
        return {"x": x + scale * self.out(mixed) + self.down(self.up(x).relu()), "last": x}


class Stack(nn.Module):
    """Blocks of two kinds."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.inside = nn.Linear(8, 16)
        kinds = (CenteredNorm, nn.LayerNorm)
        self.blocks = nn.ModuleList(Block(kinds[i % 2]) for i in range(blocks))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        state = {"x": self.inside(x), "last": x}
        for block in self.blocks:
            state = block(state=state, scale=0.5)
        return state["x"], state["last"]


STYLES = {
    **{f"blocks.*.{name}": "colwise" for name in ("q", "k", "v")},
    "blocks.*.up": "own_colwise",
    **{f"blocks.*.{name}": "rowwise" for name in ("out", "down")},
    "blocks.*.norm": "sequence",
    "blocks.*.head_norm": "per_head",
}


def stack(blocks: int = 2) -> MADE:
    return Stack(blocks), {"x": torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(0))}


class OffOnOneRank(nn.Linear):
    """A linear layer that is wrong on the last rank if it is sharded."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        wrong = type(self).__name__.startswith("FSDP") and dist.get_rank() == 1
        return y + 1 if wrong else y


def off_on_one_rank() -> MADE:
    return nn.Sequential(*(OffOnOneRank(8, 8) for _ in range(3))), {"input": torch.randn(4, 8)}


class Shifted(Positioned):
    """A model that mixes neighboring tokens outside of attention, which context parallelism cannot see."""

    def forward(self, ids: Tensor, positions: Tensor | None = None) -> Tensor:
        return super().forward(ids, positions) + super().forward(ids.roll(1, 1), positions)


class WithTable(nn.Module):
    """A model that adds a float32 buffer to its embeddings."""

    written_buffers = ("seen",)

    def __init__(self) -> None:
        super().__init__()
        self.ids, self.blocks = nn.Embedding(8, 4), nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.register_buffer("table", torch.ones(4))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        self.seen += 1
        x = (self.ids(ids) + self.table) * mask[..., None]
        for block in self.blocks:
            x = block(x)
        return x


def with_table() -> MADE:
    ids = torch.zeros(2, 6, dtype=torch.long)
    return WithTable(), {"ids": ids, "mask": torch.ones_like(ids)}


def plan_of(made: MADE, styles: dict[str, str] | None = None, **keys: Any) -> mw.Plan:
    units = mw.describe(*made, styles=styles)
    return mw.make_plan(mw.ParallelConfig(**{"compile": EAGER, **keys}), units, mw.RunShape(2, 2, 6))


def split(made: MADE, compiled: mw.CompileConfig = EAGER) -> mw.Plan:
    return plan_of(made, STYLES, compile=compiled, tp=2, sequence_parallel=False)


def split_wrongly(made: MADE) -> mw.Plan:
    plan = split(made)
    styles = {name: style for name, style in plan.tensor.styles.items() if style != "per_head"}
    return dataclasses.replace(plan, tensor=dataclasses.replace(plan.tensor, styles=styles))


def dtypes_in_bfloat16(made: MADE, plan: mw.Plan | None = None) -> list[str]:
    """The dtypes of the output and of the gradients of a model that computes in bfloat16."""
    model, example = made
    plan = plan or plan_of(made, param_dtype="bfloat16")
    sharded = mw.apply_plan(on_the_meta_device(model), plan, mw.build_mesh(plan.mesh, "cpu"), gradients="sum")
    mw.materialize(sharded, seed=0)
    output = sharded.model(*example.values())
    output.float().sum().backward()
    return [str(output.dtype), *{str(p.grad.dtype) for p in sharded.model.parameters() if p.grad is not None}]


class Tabled(nn.Module):
    """A float32 buffer is added to hidden states, and given to blocks, which must get it in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.blocks = nn.Linear(8, 8), nn.ModuleList(TabledBlock() for _ in range(2))
        self.register_buffer("table", torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        x = self.inside(x) + self.table
        for block in self.blocks:
            x = block(x, self.table)
        return x

    def reset_parameters(self) -> None:
        nn.init.ones_(self.table)


class TabledBlock(nn.Linear):
    def __init__(self) -> None:
        super().__init__(8, 8)

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        assert table.dtype == torch.float32
        return super().forward(x) * table.to(x.dtype)


def tabled() -> MADE:
    return Tabled(), {"x": torch.randn(4, 6, 8)}


def joined_in_bfloat16() -> list[str]:
    """The dtypes of a model whose first unit is what is before the blocks and the first block."""
    model, example = tabled()
    plan = plan_of((model, example), param_dtype="bfloat16")
    inside, first, *others = plan.units
    joined = dataclasses.replace(first, modules=(*inside.modules, *first.modules))
    plan = dataclasses.replace(plan, units=(joined, *others))
    return dtypes_in_bfloat16((model, example), plan)


def padded() -> MADE:
    """A vocabulary of which the id 3 has no gradient, and appears."""
    blocks = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
    return nn.Sequential(nn.Embedding(8, 8, padding_idx=3), blocks), {"input": torch.arange(8).expand(4, 8)}


RIGHT = (("muon", "fsdp"), ("muon", "hsdp"), ("muon", "tp"), ("adamw", "tp"))


def compare_optimizers(made: MADE) -> dict[Any, Any]:
    """Compare optimizers' steps: right ones on three meshes, wrong ones with FSDP."""
    plans = {"fsdp": plan_of(made), "hsdp": plan_of(made, dp_replicate=2, dp_shard=1), "tp": split(made)}
    found = {}
    for name, mesh in RIGHT:
        build = partial(mw.optimizer, name=name, lr=1e-2)
        found[name, mesh] = compare(plans[mesh], *made, optimizer=build)
    for build in (per_shard, momentum_lost, other_bits):
        of_sharded = partial(lambda build, sharded: build(sharded.model, sharded.mesh), build)
        found[build.__name__] = compare(plans["fsdp"], *made, optimizer=of_sharded)
    return found


def compare_on_ranks() -> dict[str, Any]:
    made, off, table, of_ids = stack(), off_on_one_rank(), with_table(), padded()
    of_root = rooted(), {"ids": torch.arange(48).view(8, 6)}
    token_models = [(kind(), {"ids": torch.zeros(2, 6, dtype=torch.long)}) for kind in (Positioned, Shifted)]
    plans = {
        "recomputed": plan_of(made, activation_checkpoint="full"),
        "selective": plan_of(made, activation_checkpoint="selective", selective_policy="matmul"),
        "split": split(made, DYNAMO),
        "offloaded": plan_of(made, activation_checkpoint="offload"),
        "accumulated": dataclasses.replace(plan_of(made), accumulation=2),
        "per head": split_wrongly(made),
    }
    found: dict[str, Any] = {name: compare(plan, *made) for name, plan in plans.items()}
    found["off"] = compare(plan_of(off), *off)
    root = plan_of(of_root, activation_checkpoint="full")
    found["root sharded"] = compare(root, *of_root)
    root = plan_of(of_root, activation_checkpoint="full", dp_replicate=2, dp_shard=1)
    found["root replicated"] = compare(dataclasses.replace(root, accumulation=2), *of_root)
    dtypes = [dtypes_in_bfloat16(linears()), dtypes_in_bfloat16(tabled()), joined_in_bfloat16()]
    found["bfloat16"] = dtypes
    found["padded"] = compare(plan_of(of_ids, {"0": "vocab"}, tp=2), *of_ids)
    found["mean"] = compare(plans["accumulated"], *made, gradients="mean_of_ranks")
    for tokens in token_models:
        plan = plan_of(tokens, cp=2)
        for gradients in ("sum", "mean_of_ranks"):
            key = (type(tokens[0]).__name__, gradients)
            found[key] = compare(plan, *tokens, gradients=gradients)
    found["optimizers"] = compare_optimizers(made)
    found["buffers"] = compare(plan_of(table), *table)
    tensor_parallel._with_bias = lambda module, y, partial=False: y  # type: ignore[assignment]
    found["bias"] = compare(split(made), *made)
    return found


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    """What two ranks found, by rank."""
    return run_ranks(2, compare_on_ranks)


@pytest.mark.parametrize("plan", ["recomputed", "selective", "split", "offloaded", "accumulated", "mean"])
def test_biases_norms_of_any_formula_dicts_and_keywords_compute_the_same(
    plan: str, results: list[dict[str, Any]]
) -> None:
    assert results[0][plan]["differences"] == []
    assert results[0][plan]["compared"] > (60 if plan == "split" else 30), "eager, and compiled"
    assert results[0][plan]["graphs"] == (2 if plan == "split" else 0), "one for each kind of block"


def test_parameters_outside_of_called_modules_compute_the_same(results: list[dict[str, Any]]) -> None:
    """Of the model itself, also a scalar; of a module that is not called; and one that is read elsewhere."""
    parameters = len([*rooted().parameters()])  # one is never used, whose gradient is zero
    for rank in results:
        assert rank["root sharded"]["largest"] == 0.0
        assert rank["root sharded"]["compared"] == parameters + 1
        assert rank["root replicated"]["largest"] < 1e-6, "two micro batches"


def test_inputs_in_another_dtype_are_cast_and_tables_are_not(results: list[dict[str, Any]]) -> None:
    assert results[0]["bfloat16"] == [["torch.bfloat16", "torch.float32"]] * 3


def test_an_id_without_a_gradient_has_none_in_a_split_vocabulary(results: list[dict[str, Any]]) -> None:
    assert results[0]["padded"]["differences"] == []


def test_micro_batches_are_compared_one_by_one(results: list[dict[str, Any]]) -> None:
    assert results[0]["accumulated"]["compared"] == results[0]["recomputed"]["compared"] + 2


@pytest.mark.parametrize("gradients", ["sum", "mean_of_ranks"])
def test_context_parallelism_is_run_on_random_ids(gradients: str, results: list[dict[str, Any]]) -> None:
    """Equal ids would hide the shift."""
    assert results[0]["Positioned", gradients]["differences"] == []
    assert "output 0" in {each.name for each in results[0]["Shifted", gradients]["differences"]}


@pytest.mark.parametrize(("name", "mesh"), RIGHT)
def test_an_optimizer_steps_the_same(name: str, mesh: str, results: list[dict[str, Any]]) -> None:
    found = results[0]["optimizers"][name, mesh]
    assert found["differences"] == []
    assert found["compared"] == results[0]["recomputed"]["compared"] + len([*stack()[0].parameters()])
    assert "AdamW, not fused: bitwise" in found["hints"][0]
    assert ("Muon: to 1e-05" in found["hints"][0]) == (name == "muon")


@pytest.mark.parametrize("fault", ["per_shard", "momentum_lost", "other_bits"])
def test_an_optimizer_that_computes_otherwise_on_a_mesh_is_found(
    fault: str, results: list[dict[str, Any]]
) -> None:
    differences = results[0]["optimizers"][fault]["differences"]
    assert {each.run for each in differences} == {"optimizer"}
    names = {each.name for each in differences}
    assert {f"update of blocks.{i}.up.weight" for i in range(2)} <= names
    assert ("update of blocks.0.up.bias" in names) == (fault != "per_shard")
    says = "shard alone" if fault == "per_shard" else "not bitwise"
    assert any(says in each.kind for each in differences)


def test_a_buffer_that_the_forward_writes_is_named(results: list[dict[str, Any]]) -> None:
    assert results[0]["buffers"]["differences"] == []
    assert ["seen" in text for text in results[0]["buffers"]["not_run"]] == [True]


def test_only_equal_ids_of_an_embedding_become_random() -> None:
    model, example = with_table()
    replaced = with_random_ids(model, example)
    assert replaced["ids"].unique().numel() > 1
    assert torch.equal(replaced["mask"], example["mask"])
    assert torch.equal(with_random_ids(WithTable(), replaced)["ids"], replaced["ids"])


def test_a_gradient_of_rounding_noise_is_no_difference() -> None:
    noise, other = 1e-9 * torch.randn(8), 1e-9 * torch.randn(8)
    assert relative_error(noise, other)[0] > 0.1
    assert relative_error(noise, other, floor=0.01)[0] < 1e-5
    assert relative_error(torch.zeros(8), torch.ones(8), floor=0.01)[0] == 1


def test_a_report_names_what_of_the_plan_was_not_run() -> None:
    made = stack()
    keys = {"reshard_after_forward": 2, "cpu_offload": True, "activation_checkpoint": "offload"}
    config = mw.ParallelConfig(**keys, param_dtype="bfloat16", reduce_dtype="bfloat16", forward_prefetch=2)
    plan = mw.make_plan(config, mw.describe(*made), mw.RunShape(8, 8, 6, global_batch_size=32))
    small = small_plan(plan, made[0])
    report = CheckReport(small.mesh, (), 1, 0.0, (), 0, not_run=tuple(not_run(plan, small)))
    for part in ("dp_shard 8", "accumulation 4", "cpu_offload", "reshard_after_forward 2", "GPU", "dtype"):
        assert part in str(report).split("not run: ")[1]
    assert "compiled" not in str(report).split("not run: ")[0]
    assert not [*not_run(small, small)][2:], "only what a CPU runs otherwise"


def test_a_whole_weight_on_split_heads_is_found(results: list[dict[str, Any]]) -> None:
    names = {each.name for each in results[0]["per head"]["differences"]}
    assert names == {f"blocks.{i}.head_norm.{kind}" for i in range(2) for kind in ("weight", "bias")}


def test_a_lost_bias_is_found(results: list[dict[str, Any]]) -> None:
    assert "output 0" in {each.name for each in results[0]["bias"]["differences"]}


def test_what_only_one_rank_computes_differently_is_found_by_all(results: list[dict[str, Any]]) -> None:
    for of_rank in results:
        assert "output 0" in {each.name for each in of_rank["off"]["differences"]}


def row_sum(outputs: Any, example: Any) -> Tensor:
    return (outputs if isinstance(outputs, Tensor) else outputs[0]).square().sum()


@pytest.mark.slow
@pytest.mark.sampled(6)
def test_a_check_starts_its_own_processes() -> None:
    made = stack()
    report = check(made[0], split(made), made[1], lambda outputs, example: row_sum(outputs, example))
    assert report.same, report
    assert report.compared > 30
    assert "the same, largest difference" in str(report)
    assert "the loss is a sum over rows" in str(report)


def test_the_kind_of_a_loss_is_told() -> None:
    model, example = linears()
    losses = {
        "sum": row_sum,
        "mean": lambda outputs, _: outputs.square().mean(),
        "neither": lambda outputs, _: outputs.square().sum().sqrt(),
    }
    parts = outputs_of_parts(model, example)
    assert [kind_of_loss(parts, loss) for loss in losses.values()] == [*losses]
    assert kind_of_loss(outputs_of_parts(model, {"input": example["input"][:1]}), row_sum) == ""
    assert kind_of_loss(parts, lambda outputs, _: 0.0 * row_sum(outputs, example)) == ""
    with pytest.raises(mw.PlanError, match="the loss fails on the model's outputs: AttributeError"):
        kind_of_loss(parts, lambda outputs, _: outputs.loss)
    with pytest.raises(mw.PlanError, match="must be a function of outputs and example"):
        check(model, plan_of((model, example)), example, lambda outputs: outputs.sum())
