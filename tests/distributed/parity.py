"""Runs cases on as many ranks as each has, those of as many together, and compares each with plain
training."""

import functools
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.train.config_parser import parse_config
from tests.distributed.matrix import SHAPE, STEPS
from tests.distributed.reference import train_plainly
from tests.distributed.training import Case, train_cases
from tests.support.worlds import RanksError, run_ranks

Result = dict[str, Any]
LIMIT_S, CASE_LIMIT_S = 900, 60  # of a call, and for each of its cases: only what hangs comes near it
# absolute in nats; relative; relative to the parameter's gradient norm
LOSS, NORM, GRADIENT = 5e-5, 1e-5, 1e-4


@dataclass(frozen=True)
class Job:
    """One case: on how many ranks, with which config overrides, how many graphs it compiles, what
    training.changed changes."""

    ranks: int
    arguments: Sequence[str]
    graphs: int
    change: str = ""


def run_jobs(jobs: Mapping[str, Job], data: Sequence[str], steps: int = STEPS) -> dict[str, Result]:
    """What rank 0 of each job saw, or {"error": ...}. Those of as many ranks share processes, so that the
    compiler warms up once; after one that crashes, fails or hangs the rest have new ones."""
    results: dict[str, Result] = {}
    while todo := {name: job for name, job in jobs.items() if name not in results}:
        ranks = next(iter(todo.values())).ranks
        cases = {
            name: Case([*SHAPE, *data, *job.arguments], steps, job.change)
            for name, job in todo.items()
            if job.ranks == ranks
        }
        results |= _run_cases(ranks, cases)
    return results


def _run_cases(ranks: int, cases: Mapping[str, Case]) -> dict[str, Result]:
    """Of the cases that were run before one failed, and that one."""
    with tempfile.TemporaryDirectory() as name:
        folder, error = Path(name), None
        try:
            run_ranks(ranks, train_cases, folder, cases, limit_s=LIMIT_S + CASE_LIMIT_S * len(cases))
        except RanksError as raised:
            error = raised
        results = {case: torch.load(folder / case) for case in cases if (folder / case).exists()}
        if error is not None:
            failed = next((case for case in cases if case not in results), None)
            if failed is None:
                raise error
            results[failed] = {"error": str(error)}
        return results


@functools.cache
def reference(arguments: tuple[str, ...], dtype: torch.dtype = torch.float32) -> Result:
    """Plain training of the model, on the data, that these arguments describe."""
    plain = train_plainly(parse_config(arguments), STEPS, dtype)
    assert plain["losses"][-1] < plain["losses"][0] - 0.5, (
        "the data must be learnable, or a wrong gradient hides"
    )
    return plain


def plain_run(job: Job, data: Sequence[str], dtype: torch.dtype = torch.float32) -> Result:
    """The reference of a job: one for each model, each optimizer, each list of frozen parameters, and
    documents apart or not."""
    of_the_model = [
        a for a in job.arguments if a.startswith(("--model.", "--data.", "--optim.", "--train.freeze"))
    ]
    return reference((*SHAPE, *data, *of_the_model), dtype)


def check_parity(got: Result, plain: Result) -> None:
    """The whole of what "trains the same model" means."""
    assert "error" not in got, got["error"]
    assert torch.equal(got["tokens"], plain["tokens"]), "the order of samples differs"
    assert got["weights"].keys() == plain["weights"].keys()
    for name, weight in plain["weights"].items():
        assert torch.equal(got["weights"][name], weight), f"initial weights of {name} differ"
    assert got["losses"] == pytest.approx(plain["losses"], abs=LOSS, rel=0)
    assert got["eval_loss"] == pytest.approx(plain["eval_loss"], abs=LOSS, rel=0)
    assert got["norms"] == pytest.approx(plain["norms"], rel=NORM, abs=0)
    assert got["grads"].keys() == plain["grads"].keys(), "other parameters are trained"
    for name, grad in plain["grads"].items():
        difference = (got["grads"][name] - grad).norm() / grad.norm()
        assert difference < GRADIENT, f"first gradient of {name} differs by {difference:.1e} of its norm"


def check_compiled(got: Result, graphs: int) -> None:
    """No break, as many graphs as there are kinds of block and a head, all of them in the first step."""
    assert got["breaks"] == {}
    assert got["graphs"] == [graphs] * len(got["losses"]), (
        "something was compiled late, or a block apart from the others"
    )
