"""Run parity cases, grouped by number of ranks, and compare each with plain training."""

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
LIMIT_S, CASE_LIMIT_S = 900, 60  # per call, plus for each of its cases; only a hang gets near them
# absolute in nats; relative; relative to the parameter's gradient norm
LOSS, NORM, GRADIENT = 5e-5, 1e-5, 1e-4


@dataclass(frozen=True)
class Job:
    """One case: number of ranks, config overrides, number of compiled graphs, and the name of a change (see
    training.changed)."""

    ranks: int
    arguments: Sequence[str]
    graphs: int
    change: str = ""


def run_jobs(jobs: Mapping[str, Job], data: Sequence[str], steps: int = STEPS) -> dict[str, Result]:
    """Return rank 0's result of each job, or {"error": ...}. Jobs with the same number of ranks share
    processes, so that the compiler warms up once; after a crash, failure or hang the remaining jobs get new
    ones."""
    results: dict[str, Result] = {}
    while pending := {name: job for name, job in jobs.items() if name not in results}:
        ranks = next(iter(pending.values())).ranks
        cases = {
            name: Case(parse_config([*SHAPE, *data, *job.arguments]), steps, job.change)
            for name, job in pending.items()
            if job.ranks == ranks
        }
        results |= _run_cases(ranks, cases)
    return results


def _run_cases(ranks: int, cases: Mapping[str, Case]) -> dict[str, Result]:
    """Return the results up to and including the first failed case."""
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
    """Train without parallelism, with the model, data and optimizer of these arguments."""
    plain = train_plainly(parse_config(arguments), STEPS, dtype)
    assert plain["losses"][-1] < plain["losses"][0] - 0.3, (
        "the loss fell too little to reveal a wrong gradient"
    )
    return plain


def plain_run(job: Job, data: Sequence[str], dtype: torch.dtype = torch.float32) -> Result:
    """Return the reference of a job: one for each model, data setting, optimizer and list of frozen
    parameters."""
    model_arguments = [
        a for a in job.arguments if a.startswith(("--model.", "--data.", "--optim.", "--train.freeze"))
    ]
    return reference((*SHAPE, *data, *model_arguments), dtype)


def check_parity(got: Result, plain: Result) -> None:
    """Check everything that "trains the same model" means."""
    assert "error" not in got, got["error"]
    assert torch.equal(got["tokens"], plain["tokens"]), "the sample order differs"
    assert got["weights"].keys() == plain["weights"].keys()
    for name, weight in plain["weights"].items():
        assert torch.equal(got["weights"][name], weight), f"initial weights of {name} differ"
    assert got["losses"] == pytest.approx(plain["losses"], abs=LOSS, rel=0)
    assert got["eval_loss"] == pytest.approx(plain["eval_loss"], abs=LOSS, rel=0)
    assert got["norms"] == pytest.approx(plain["norms"], rel=NORM, abs=0)
    assert got["grads"].keys() == plain["grads"].keys(), "the trained parameters differ"
    for name, grad in plain["grads"].items():
        difference = (got["grads"][name] - grad).norm() / grad.norm()
        assert difference < GRADIENT, f"first gradient of {name} differs by {difference:.1e} of its norm"
    assert got["drifted"] == [], "copies of these parameters differ between ranks"


def check_compiled(got: Result, graphs: int) -> None:
    """Check for no graph breaks, and for one graph per kind of block and one for the head, all in the first
    step."""
    assert got["breaks"] == {}
    assert got["graphs"] == [graphs] * len(got["losses"]), (
        "recompiled after the first step, or blocks do not share a graph"
    )
