"""Steps that are not finite on one rank: all ranks skip and count them, and too many end the run with a
cause."""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.parallel.fsdp import local_part
from meshwright.train.checkpoint.manifest import TrainPosition
from meshwright.train.config_parser import parse_config
from meshwright.train.data.sample_order import SampleOrder
from meshwright.train.data.sequences import make_sequence_shape
from meshwright.train.data.training_data import TrainLoader
from meshwright.train.errors import NonFiniteError
from meshwright.train.fault_tolerance.nonfinite import NonFiniteGuard
from meshwright.train.model.trained_model import loss_of_forward
from meshwright.train.step import train_step
from tests.support.launch import EAGER, TINY, write_text
from tests.support.sharded import build_sharded
from tests.support.steps import bits, step_done
from tests.support.stores import load_corpus
from tests.support.worlds import run_ranks

STEPS, FAULTY_STEP, FAULTY_RANK = 3, 2, 1
Now = dict[str, int]


@dataclass(frozen=True)
class Case:
    """Config overrides and the injected fault."""

    arguments: Sequence[str]
    fault: str


def faulty(now: Now) -> bool:
    return now["step"] >= FAULTY_STEP and dist.get_rank() == FAULTY_RANK


def nan_output(model: nn.Module, now: Now, most: float = math.inf) -> None:
    """Put NaN into the output of layers.1, at most so many times."""

    def hook(_module: nn.Module, _inputs: object, x: Tensor) -> Tensor | None:
        now["times"] = now.get("times", 0) + faulty(now)
        return x + math.nan if faulty(now) and now["times"] <= most else None

    model.layers[1].register_forward_hook(hook)


def nan_once(model: nn.Module, now: Now) -> None:
    nan_output(model, now, 1)


def inf_gradient(model: nn.Module, now: Now) -> None:
    """Put Inf into the gradient of layers.1's input; the loss stays finite."""

    def hook(_module: nn.Module, grads: tuple[Tensor | None, ...], _of_output: object) -> Any:
        return (grads[0] + math.inf, *grads[1:]) if faulty(now) and grads[0] is not None else None

    model.layers[1].register_full_backward_hook(hook)


def inf_loss(model: nn.Module, now: Now) -> None:
    """Make the loss Inf; all gradients stay finite."""
    model.head.loss.register_forward_hook(lambda _m, _i, x: x + math.inf if faulty(now) else None)


def huge_gradient(model: nn.Module, now: Now) -> None:
    """Scale the loss so that it and the gradients are finite, but the squares exceed float32."""
    model.head.loss.register_forward_hook(lambda _m, _i, x: x * 1e25 if faulty(now) else None)


def nan_parameter(model: nn.Module, now: Now) -> None:
    """Put NaN into one rank's shard of a weight before the faulty step."""

    def hook(_module: nn.Module, _inputs: object) -> None:
        if faulty(now):
            local_part(model.layers[1].attention.wq.weight).detach().view(-1)[0] = math.nan

    model.register_forward_pre_hook(hook, prepend=True)


FAULTS: dict[str, Callable[[nn.Module, Now], None]] = {
    fault.__name__: fault
    for fault in (nan_output, nan_once, inf_gradient, inf_loss, huge_gradient, nan_parameter)
}


def count_hooks(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def train(case: Case) -> dict[str, Any]:
    """Train with the guard as the loop does, until it raises."""
    torch._dynamo.reset()
    run, fault = build_sharded(case.arguments), case.fault
    config, model, optimizer = run.config, run.model, run.optimizer
    shape, corpus = run.shape, load_corpus(config.data)
    sequences = make_sequence_shape(
        config.data, corpus.tokenizer, config.train.seq_len, config.model.vocab_size
    )
    order = SampleOrder(corpus.sources, sequences, config.run.seed)
    loader = TrainLoader(order, sequences, shape, TrainPosition(), torch.device("cpu"), 2)
    lines, repeated = list[str](), (run.sharded, order, shape, loss_of_forward)
    guard = NonFiniteGuard(config.train.max_skipped_steps, *repeated, lines.append)
    now: Now = {"step": 0}
    FAULTS[fault](model, now)
    hooks = count_hooks(model)
    seen: dict[str, Any] = {"steps": [], "lines": lines, "error": None}
    try:
        for step in range(1, STEPS + 1):
            now["step"] = step
            data = loader.next()
            seen["tokens"] = torch.cat([batch.tokens for batch in data.micro_batches]).tolist()
            damaged = fault == "nan_parameter" and step == FAULTY_STEP  # the fault itself changes the weight
            before = bits(model, optimizer)
            batches, grad_clip = data.micro_batches, config.train.grad_clip
            result = train_step(run.sharded, optimizer, batches, grad_clip, loss_of_forward)
            after = bits(model, optimizer)
            changed = sum(not torch.equal(a, b) for a, b in zip(before, after, strict=True)) - (
                damaged and faulty(now)
            )
            seen["steps"].append(
                [result.loss.item(), result.grad_norm.item(), result.skipped.item(), changed]
            )
            guard.after_step(step_done(step, result, data, (step - 1) * shape.global_batch_size))
        guard.finish()
    except NonFiniteError as error:
        seen["error"] = str(error)
    seen["gradients_left"] = sum(p.grad is not None for p in model.parameters())
    seen["hooks_left"] = count_hooks(model) - hooks
    loader.close()
    return seen | {"skipped": guard.skipped}


def train_all(cases: Mapping[str, Case]) -> dict[str, dict[str, Any]]:
    """Return this rank's results of each case."""
    return {name: train(case) for name, case in cases.items()}


ONE_SKIP, TP = "--train.max_skipped_steps=1", "--parallel.tp=2"
FROZEN = "--train.freeze=[tok_embeddings.*,layers.0.*]"
# Of each world: the number of ranks, and the fault and arguments of each case.
WORLDS = {
    "fsdp": (
        2,
        {
            "inf_loss": ("inf_loss", EAGER),
            "huge_gradient": ("huge_gradient", EAGER),
            "nan_parameter": ("nan_parameter", EAGER),
            "accumulated": ("nan_output", [*EAGER, "--train.micro_batch_size=1"]),
            "offloaded": ("nan_output", [*EAGER, "--parallel.cpu_offload=true", FROZEN]),
            "nan_once": ("nan_once", EAGER),
            "no budget": ("nan_once", [*EAGER, "--train.max_skipped_steps=0"]),
        },
    ),
    "fsdp x tp": (
        4,
        {
            "forward": ("nan_output", [*EAGER, TP]),
            "backward": ("inf_gradient", [*EAGER, TP, "--parallel.activation_checkpoint=full"]),
        },
    ),
    "compiled": (2, {"compiled": ("nan_parameter", ["--parallel.compile.backend=aot_eager"])}),
}
FAULT = {name: fault for _, cases in WORLDS.values() for name, (fault, _) in cases.items()}
MESSAGES = {
    "nan_output": "rank 1: the output of layers.1 is the first value that is not finite",
    "inf_gradient": "rank 1: the gradient of the input of layers.1 is the first value that is not finite",
    "inf_loss": "rank 1: the output of head.loss is the first value that is not finite",
    "huge_gradient": "rank 1: the gradient of head.output.weight (or its square) is the first value that is "
    "not finite",
    "nan_parameter": "rank 1 has parameters that are not finite: layers.1.attention.wq.weight",
}
SKIPPED = "its loss or gradient is not finite (1 of at most 1 in 100 steps)"
WARNING = f"warning: step {FAULTY_STEP} was skipped: {SKIPPED}"
Seen = dict[str, list[dict[str, Any]]]  # case -> of every rank


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return write_text(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def on_world(text: list[str]) -> Callable[[str], Seen]:
    """A function from a world's name to every rank's results of its cases, computed once."""

    @functools.cache
    def results(world: str) -> Seen:
        ranks, cases = WORLDS[world]
        arguments = {
            name: Case([*TINY, *text, ONE_SKIP, *keys], fault) for name, (fault, keys) in cases.items()
        }
        of_ranks = run_ranks(ranks, train_all, arguments)
        return {name: [rank[name] for rank in of_ranks] for name in cases}

    return results


SAMPLED = [pytest.mark.slow, pytest.mark.sampled(10)]


@pytest.fixture(params=[pytest.param(w, marks=SAMPLED if w == "compiled" else []) for w in WORLDS])
def seen(request: pytest.FixtureRequest, on_world: Callable[[str], Seen]) -> Seen:
    return on_world(request.param)


def skips(of_rank: dict[str, Any]) -> list[float]:
    return [skipped for _loss, _norm, skipped, _changed in of_rank["steps"]]


def ended(seen: Seen) -> list[str]:
    """The cases in which too many steps were skipped."""
    return [name for name in seen if FAULT[name] != "nan_once"]


def test_all_ranks_skip_the_same_steps_change_no_bit_in_them_and_train_in_the_others(seen: Seen) -> None:
    for name, ranks in seen.items():
        for rank in ranks:
            assert skips(rank) == skips(ranks[0]), name
            for _loss, norm, skipped, changed in rank["steps"]:
                assert skipped == (not math.isfinite(norm)), name
                assert (changed == 0) == bool(skipped), name


def test_a_run_stops_on_all_ranks_at_the_step_after_the_last_that_may_be_skipped(seen: Seen) -> None:
    for name in ended(seen):
        for rank in seen[name]:
            assert skips(rank) == [0, 1, 1], name
            assert rank["lines"] == [WARNING], name
            assert rank["skipped"] == 2
            assert rank["error"] == seen[name][0]["error"], name
            assert f"step {FAULTY_STEP + 1} is not finite" in rank["error"]
            assert (rank["gradients_left"], rank["hooks_left"]) == (0, 0), name


def test_the_message_names_the_rank_and_the_module(seen: Seen) -> None:
    for name in ended(seen):
        error, damaged = seen[name][0]["error"], FAULT[name] == "nan_parameter"
        assert MESSAGES[FAULT[name]] in error, name
        for rank in ("rank 0", "rank 2", "rank 3"):
            assert rank not in error or damaged, f"{name}: the message must name only the faulty rank"
        assert error.count("has parameters") == damaged, name
        if damaged:
            assert "the output of layers.1.attention.wq is the first value" in error, (
                "the message must name where the value enters the step"
            )


@pytest.mark.parametrize(
    ("seen", "name", "count"),
    [("fsdp", "accumulated", 1), ("fsdp x tp", "forward", 2), ("fsdp x tp", "backward", 2)],
    indirect=["seen"],
)
def test_the_sequences_that_are_named_are_those_the_rank_saw(
    name: str, count: int, seen: Seen, text: list[str]
) -> None:
    split = load_corpus(parse_config(text).data).sources[0].split
    line = next(line for line in seen[name][0]["error"].splitlines() if line.startswith("rank 1: "))
    ids, source = line.partition("its sequences: ")[2].split(" of ")
    assert source == "text"
    tokens = np.empty((count, parse_config(TINY).train.seq_len), np.int64)
    for row, index in zip(tokens, ids.split(", "), strict=True):
        split.read(int(index) * len(row), row)
    assert tokens.tolist() == seen[name][1]["tokens"][:count]


@pytest.mark.parametrize("seen", ["fsdp"], indirect=True)
def test_a_fault_that_does_not_come_again_costs_one_step_of_the_budget(seen: Seen) -> None:
    for rank in seen["nan_once"]:
        assert skips(rank) == [0, 1] + [0] * (STEPS - 2)
        assert (rank["lines"], rank["error"], rank["skipped"]) == ([WARNING], None, 1)


@pytest.mark.parametrize("seen", ["fsdp"], indirect=True)
def test_without_a_budget_the_first_stops_the_run_and_what_is_not_found_again_is_called_so(
    seen: Seen,
) -> None:
    for rank in seen["no budget"]:
        assert skips(rank) == [0, 1]
        assert rank["lines"] == []
        assert "not reproduced on any rank" in rank["error"]
