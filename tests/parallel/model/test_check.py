"""The check finds what a sharded model computes differently, and says what it smells of."""

import dataclasses
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import meshwright as mw
from meshwright.parallel import tensor_parallel
from meshwright.parallel.activation_checkpoint import count_saved
from meshwright.parallel.model.check import check, compare, cut_model, kind_of_loss, relative_error
from meshwright.parallel.model.check import on_meta as on_the_meta_device
from meshwright.parallel.model.inputs import kind_of
from meshwright.tools.bench.own_model.models import MADE, hf_llama, linears, on_meta, qwen3
from tests.support.worlds import run_ranks

AOT = mw.CompileConfig(backend="aot_eager")


def plan_of(made: MADE, styles: dict[str, str] | None = None, seq_len: int = 12, **keys: Any) -> mw.Plan:
    units = mw.describe(*made, styles=styles)
    config = mw.ParallelConfig(**{"compile": AOT, **keys})
    return mw.make_plan(config, units, mw.RunShape(2, 2, seq_len))


class CenteredNorm(nn.Module):
    """(1 + w) x / |x|, with an eps of another name."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.zeros(dim)), 1e-6

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon) * (1 + self.weight)

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)


class Gated(nn.Module):
    """A block with keyword arguments that returns a dict, biases, and a norm of its own formula."""

    def __init__(self, norm: type[nn.Module] = CenteredNorm) -> None:
        super().__init__()
        self.norm, self.up, self.down = norm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, *, state: dict[str, Tensor], scale: float) -> dict[str, Tensor]:
        x = state["x"]
        return {"x": x + scale * self.down(self.up(self.norm(x)).relu()), "last": x}


class Stack(nn.Module):
    """Blocks of two kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Linear(8, 16)
        self.blocks = nn.ModuleList(Gated(norm) for norm in (CenteredNorm, nn.LayerNorm) * 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        state = {"x": self.inside(x), "last": x}
        for block in self.blocks:
            state = block(state=state, scale=0.5)
        return state["x"], state["last"]


STYLES = {"blocks.*.norm": "sequence", "blocks.*.up": "colwise", "blocks.*.down": "rowwise"}


def stack() -> MADE:
    return Stack(), {"x": torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(0))}


def compare_here(made: MADE, plans: list[mw.Plan]) -> list[dict[str, Any]]:
    return [compare(plan, made[0], made[1]) for plan in plans]


def found(made: MADE, *plans: mw.Plan) -> list[dict[str, Any]]:
    results: list[dict[str, Any]] = run_ranks(2, compare_here, made, list(plans))[0]
    return results


def test_biases_norms_of_any_formula_dicts_and_keywords_compute_the_same() -> None:
    made = stack()
    whole = {"tp": 2, "sequence_parallel": False}
    plans = [
        plan_of(made, activation_checkpoint="full"),
        plan_of(made, activation_checkpoint="selective", selective_policy="matmul"),
        plan_of(made, STYLES, seq_len=6, **whole),
    ]
    for result in found(made, *plans):
        assert result["differences"] == []
        assert result["compared"] > 30
    with_biases = hf_llama(attention_bias=True, mlp_bias=True)
    (result,) = found(with_biases, plan_of(with_biases, tp=2))
    assert result["differences"] == []


def count_in_bfloat16(made: MADE) -> list[str]:
    """The dtypes of a loss and of the parameters of a model that computes in bfloat16."""
    model, example = made
    plan = plan_of(made, param_dtype="bfloat16")
    sharded = mw.apply_plan(on_the_meta_device(model), plan, mw.build_mesh(plan.mesh, "cpu"), gradients="sum")
    mw.materialize(sharded, seed=0)
    output = sharded.model(*example.values())
    output.float().sum().backward()
    return [str(output.dtype), *{str(p.grad.dtype) for p in sharded.model.parameters() if p.grad is not None}]


def test_inputs_in_another_dtype_are_cast() -> None:
    assert run_ranks(2, count_in_bfloat16, linears())[0] == ["torch.bfloat16", "torch.float32"]


def test_a_linear_layer_with_a_bias_is_a_product() -> None:
    is_saved = count_saved(("aten.mm/2",))
    mm, addmm = torch.ops.aten.mm.default, torch.ops.aten.addmm.default
    assert [is_saved(op) for op in (addmm, mm, addmm, addmm)] == [False, True, False, True]
    assert [count_saved(("aten.addmm",))(op) for op in (addmm, mm)] == [True, False]


def test_a_whole_weight_on_split_heads_is_found() -> None:
    made = qwen3()
    plan = plan_of(made, tp=2, activation_checkpoint="none")
    styles = {name: style for name, style in plan.tensor.styles.items() if style != "per_head"}
    wrong = dataclasses.replace(plan, tensor=dataclasses.replace(plan.tensor, styles=styles))
    right, result = found(made, plan, wrong)
    assert right["differences"] == []
    assert {each.name.rpartition(".self_attn.")[2] for each in result["differences"]} == {
        "q_norm.weight",
        "k_norm.weight",
    }


def lose_bias(made: MADE, plan: mw.Plan) -> dict[str, Any]:
    tensor_parallel._with_bias = lambda module, y, partial=False: y  # type: ignore[assignment]
    return compare(plan, *made)


def test_a_lost_bias_is_found() -> None:
    made = hf_llama(attention_bias=True)
    plan = plan_of(made, tp=2, activation_checkpoint="none")
    result: dict[str, Any] = run_ranks(2, lose_bias, made, plan)[0]
    assert "output 0" in {each.name for each in result["differences"]}


class OffOnOneRank(nn.Linear):
    """A linear layer that is wrong on the last rank if it is sharded."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        wrong = type(self).__name__.startswith("FSDP") and dist.get_rank() == 1
        return y + 1 if wrong else y


def off_on_one_rank() -> MADE:
    return nn.Sequential(*(OffOnOneRank(8, 8) for _ in range(3))), {"input": torch.randn(4, 8)}


def test_what_only_one_rank_computes_differently_is_found_by_all() -> None:
    made = off_on_one_rank()
    plan = plan_of(made, compile=mw.CompileConfig(enabled=False))
    for results in run_ranks(2, compare_here, made, [plan]):
        assert "output 0" in {each.name for each in results[0]["differences"]}


def test_windows_of_two_lengths_are_two_kinds_and_numbers_of_layers_are_not() -> None:
    def block(**settings: int) -> nn.Module:
        made = nn.Linear(4, 4)
        vars(made).update(settings)
        return made

    first = block(layer_idx=0, window=8)
    assert kind_of(first) == kind_of(block(layer_idx=1, window=8))
    assert kind_of(first) != kind_of(block(layer_idx=0, window=16))


def test_the_cut_model_has_one_block_of_each_kind_and_another() -> None:
    made = stack()
    cut, blocks = cut_model(made[0], plan_of(made))
    assert blocks == ("blocks.0", "blocks.1", "blocks.2")
    assert len({kind_of(cut.get_submodule(name)) for name in blocks}) == 2
    assert len(made[0].blocks) == 6, "the model itself is left alone"


def row_sum(outputs: Any, example: Any) -> Tensor:
    return outputs.square().sum()


def row_mean(outputs: Any, example: Any) -> Tensor:
    return outputs.square().mean()


def root(outputs: Any, example: Any) -> Tensor:
    return outputs.square().sum().sqrt()


def test_the_kind_of_a_loss_is_told() -> None:
    model, example = linears()
    assert [kind_of_loss(model, example, loss) for loss in (row_sum, row_mean, root)] == [
        "sum",
        "mean",
        "neither",
    ]


def test_a_factor_is_told_apart_from_other_errors() -> None:
    x = torch.randn(8)
    assert relative_error(2 * x, x) == pytest.approx((1.0, 2.0))
    error, scale = relative_error(x + torch.randn(8), x)
    assert error > 0.1
    assert scale != scale
    assert relative_error(torch.zeros(3), x)[0] == float("inf")


def test_a_check_starts_its_own_processes() -> None:
    made = on_meta(hf_llama)
    report = check(*made[:1], plan_of(made, tp=2, activation_checkpoint="full"), made[1], None)
    assert report.same, report
    assert "the same, largest difference" in str(report)
    assert report.graphs == 1, "one for each kind of block"
