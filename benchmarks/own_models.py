"""Tries tiny models as people write and publish them: initial values, sharding, tensor parallelism, training
and weights, each against plain torch."""

import argparse
import dataclasses
import importlib
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import meshwright as mw
from benchmarks.support.forked_ranks import RankError, run_forked
from benchmarks.support.harness import BenchResult, Measurement, run_benchmark
from benchmarks.zoo.case import Batch, Case
from benchmarks.zoo.models import CASES
from meshwright.parallel.check.check import compare
from meshwright.parallel.fsdp import full_tensor
from meshwright.parallel.model.constructor import tensors_by_name
from meshwright.parallel.model.parts import Loss
from meshwright.tools.checkpoint.__main__ import main as checkpoint_command
from meshwright.tools.processes import BenchError

SEED, STEPS = 7, 10
TOLERANCE = 1e-5  # of a relative difference: of outputs and gradients with tp, and of losses
# imported once, before the ranks are forked
PRELOADED = (
    *("torch._dynamo", "torch._inductor.compile_fx", "torch.distributed.fsdp", "meshwright.parallel.apply"),
    *("torch.distributed.tensor.parallel", "torch.distributed.checkpoint.state_dict", "safetensors.torch"),
    *("meshwright.parallel.model.materialize", "meshwright.train.checkpoint.own_loop", "sympy"),
    *("meshwright.tools.checkpoint.convert", "torch.distributed.tensor.experimental"),
)


@dataclass(frozen=True)
class Found:
    """What a comparison found.

    Args:
        right: whether it is as it should be
        largest: the largest relative difference; 0 is bitwise, None if there is no number
        message: what is not right, or why nothing was compared
    """

    right: bool
    largest: float | None = 0.0
    message: str = ""


def build(case: Case) -> nn.Module:
    """Return the model with its constructor's values of SEED."""
    torch.manual_seed(SEED)
    return case.build()


def shard(case: Case, model: nn.Module, loss: Loss | None = None) -> mw.ShardedModel:
    """Shard the model over all ranks, with full recomputation, eager. `loss`: to be checked."""
    return mw.shard(
        model,
        own_rows(case.batch(0)),
        parallel=mw.ParallelConfig(activation_checkpoint="full", compile=mw.CompileConfig(enabled=False)),
        loss=loss,
        **case.asked,
    )


def whole(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and buffers by all of their names, gathered; every rank calls it."""
    tensors = tensors_by_name(model)
    return {name: full_tensor(t) for name, t in tensors.items()}


def bitwise(tensors: dict[str, Tensor], expected: dict[str, Tensor], of: str = "") -> Found:
    """Compare tensors bitwise."""
    names = [
        name
        for name in sorted(tensors.keys() | expected.keys())
        if name not in tensors or name not in expected or not torch.equal(tensors[name], expected[name])
    ]
    return Found(True) if not names else Found(False, None, f"{names[0]} differs{of}")


def initial_values(case: Case) -> Found:
    """Compare the values of a model that was built and then sharded, and those of one that is built when it
    is sharded, with those of its constructor."""
    expected = whole(build(case))
    kept = bitwise(whole(shard(case, build(case)).model), expected, ": built, then sharded")
    if case.needs_values or not kept.right:
        return kept
    with torch.device("meta"):
        empty = case.build()
    sharded = shard(case, empty)
    mw.materialize(sharded, SEED, build=case.build)
    return bitwise(whole(sharded.model), expected, ": sharded, then built")


def computation(case: Case, compiled: bool = False, **parallel: Any) -> Found:
    """Compare outputs and every gradient with those of the unsharded model."""
    model, size = build(case), dist.get_world_size()
    config = mw.ParallelConfig(
        compile=mw.CompileConfig(enabled=compiled, backend="aot_eager"),
        **{"activation_checkpoint": "full", **parallel},
    )
    units = mw.describe(model, case.batch(0), **case.asked)
    if "tp" in parallel and not units.styles:
        return Found(True, None, units.why_no_styles or "no styles")
    plan = mw.make_plan(config, units, mw.RunShape(size, size, seq_len=1))
    found = compare(plan, model, case.batch(0), "mean_of_ranks")
    wrong = [f"{each.run} {each.name} is off by {each.error:.1e}" for each in found["differences"]]
    return Found(found["largest"] <= TOLERANCE, found["largest"], "".join(wrong[:1]))


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer whose steps are as large as the gradients: Adam's are as large for those of twice
    the size."""
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def losses_of(case: Case, model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    """Train for STEPS steps in the loop of plain torch, and return their losses, the means of all ranks."""
    losses = []
    for step in range(STEPS):
        batch = own_rows(case.batch(step))
        loss = case.loss(model(**batch), batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / dist.get_world_size())
    return losses


def own_rows(batch: Batch) -> Batch:
    """Return this rank's rows of a batch."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    return {name: tensor.tensor_split(ranks)[rank] for name, tensor in batch.items()}


def trained_alone(case: Case) -> tuple[list[float], list[float]]:
    """Return the losses of plain torch, and those of the sharded model, on one process."""
    plain, sharded = build(case), shard(case, build(case), case.loss).model
    return losses_of(case, plain, momentum(plain)), losses_of(case, sharded, momentum(sharded))


def trained_and_exported(case: Case) -> tuple[list[float], Found]:
    """Return the losses on all ranks; and what was found of the weights, saved, exported and loaded into the
    plain model."""
    sharded = shard(case, build(case), case.loss)
    optimizer = momentum(sharded.model)
    losses = losses_of(case, sharded.model, optimizer)
    expected, found = whole(sharded.model), [Found(True)]
    with tempfile.TemporaryDirectory() as name:
        folder = [name]
        dist.broadcast_object_list(folder)
        saved = mw.save(Path(folder[0], "saved"), sharded, optimizer, STEPS)
        if dist.get_rank() == 0:
            found = [exported(case, saved, Path(name, "out"), expected)]
        dist.broadcast_object_list(found)
    return losses, found[0]


def exported(case: Case, checkpoint: Path, out: Path, expected: dict[str, Tensor]) -> Found:
    """Export a checkpoint, load it into the plain model, and compare the weights."""
    from safetensors.torch import load_file

    try:
        checkpoint_command(["export", str(checkpoint), str(out)])
        plain = case.build()
        of_transformers = (out / "config.json").is_file()  # whose files have a tied weight once
        plain.load_state_dict(load_file(out / "model.safetensors"), strict=not of_transformers)
        stored = plain.state_dict()
        return bitwise(stored, {name: expected[name] for name in stored})
    except Exception as error:  # of any kind: it is the row's message
        return Found(False, None, f"{type(error).__name__}: {error}")


def compared_losses(alone: tuple[list[float], list[float]], together: list[float]) -> Found:
    """Compare the losses of one and two processes with those of plain torch."""
    plain, one = alone
    error = max(
        abs(loss / expected - 1)
        for losses in (one, together)
        for loss, expected in zip(losses, plain, strict=True)
    )
    return Found(
        error <= TOLERANCE, error, "" if error <= TOLERANCE else f"{plain[-1]}, {one[-1]}, {together[-1]}"
    )


def attempt(ranks: int, function: Callable[..., Any], *arguments: Any, **keys: Any) -> Any:
    """Return what the function returns on ranks of its own, or the failure."""
    try:
        return run_forked(ranks, lambda: function(*arguments, **keys))
    except RankError as error:
        return Found(False, None, str(error))


def try_case(case: Case) -> dict[str, Found | None]:
    """Return what each comparison found, by column; None for one that does not apply."""
    with torch.device("meta"):
        case.build()  # imports its library once
    alone, both = attempt(1, trained_alone, case), attempt(2, trained_and_exported, case)
    failure = next((each for each in (alone, both) if isinstance(each, Found)), None)
    return {
        "initial values": attempt(2, initial_values, case),
        "FSDP": attempt(2, computation, case),
        "compiled": attempt(2, computation, case, compiled=True) if case.compiled else None,
        "TP": attempt(2, computation, case, tp=2, activation_checkpoint="none"),
        "losses": failure or compared_losses(alone, both[0]),
        "weights": both if isinstance(both, Found) else both[1],
    }


def try_model(name: str) -> dict[str, Any]:
    """Return a model's row. If it is refused, the columns are those of the refusal's way out."""
    case, row = CASES[name], {"model": name, "kind": CASES[name].kind, "special": CASES[name].special}
    try:
        found = try_case(case)
    except ModuleNotFoundError as error:
        return row | {"refused": "", "columns": {}, "right": False, "missing": str(error)}
    fsdp, refused = found["FSDP"], ""
    if fsdp is not None and fsdp.message.startswith("PlanError: "):
        refused = fsdp.message
        if case.way_out is not None:
            found = try_case(case.way_out(case))
    columns = {column: dataclasses.asdict(each) for column, each in found.items() if each is not None}
    return row | {
        "refused": refused,
        "columns": columns,
        "right": all(each.right for each in found.values() if each is not None),
    }


def try_all(options: argparse.Namespace, overrides: Sequence[str]) -> BenchResult:
    """Try the models that are named, or all. Raises BenchError for a name that is none of them."""
    if unknown := [name for name in options.names if name not in CASES]:
        raise BenchError(f"there is no model {unknown[0]!r}: use some of {', '.join(CASES)}")
    for module in PRELOADED:
        importlib.import_module(module)
    rows = []
    for name in options.names or CASES:
        rows.append(row := try_model(name))
        print(line_of(row), file=sys.stderr, flush=True)
    return BenchResult(None, {"rows": rows}, markdown(rows))


def line_of(row: dict[str, Any]) -> str:
    """Return a line for a row, and one for each thing that is not right."""
    lines = [f"{row['model']}: {'right' if row['right'] else 'not right'}"]
    lines += [f"  refused: {row['refused']}"] if row["refused"] else []
    lines += [
        f"  {column}: {found['message']}" for column, found in row["columns"].items() if found["message"]
    ]
    return "\n".join(lines)


COLUMNS = ("initial values", "FSDP", "TP", "losses", "weights")


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """Return the table of docs/your-model.md."""
    lines = [f"| {' | '.join(('model', 'what is special', *COLUMNS))} |", "|" + "---|" * (2 + len(COLUMNS))]
    for row in rows:
        cells = [row["model"], row["special"] + (" (after its way out)" if row["refused"] else "")]
        cells += [cell(row["columns"].get(column)) for column in COLUMNS]
        lines.append(f"| {' | '.join(cells)} |")
    right = sum(row["right"] for row in rows)
    return "\n".join([*lines, "", f"{right} of {len(rows)} right"])


def cell(found: dict[str, Any] | None) -> str:
    """Return what a column shows."""
    if found is None:
        return ""
    if not found["right"]:
        return "**wrong**"
    if found["largest"] is None:
        return "-"
    return f"{found['largest']:.1e}" if found["largest"] else "bitwise"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("names", nargs="*", metavar="NAME", help="models to try; all if none is given")


MEASUREMENT = Measurement(
    "own_models",
    add_options,
    try_all,
    description=(
        "Try tiny models as people write and publish them: their initial values, outputs and gradients under "
        "FSDP and tensor parallelism, ten steps on 1 and 2 processes, and their weights, saved and exported; "
        "each against plain torch."
    ),
    takes_keys=False,
)

if __name__ == "__main__":
    run_benchmark(MEASUREMENT)
