"""Steps that are not finite on one rank: all ranks skip and count them, and too many end the run with a
cause."""

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from meshwright.train.config_parser import parse_config
from meshwright.train.data.corpus import load_corpus
from meshwright.train.data.token_store import TokenStream
from tests.distributed.faulty_training import FAULTY_STEP, STEPS, Case, train_all
from tests.support.launch import EAGER, TINY, write_text
from tests.support.worlds import run_ranks

COMPILED = ["--parallel.compile.backend=aot_eager"]
ONE_SKIP = "--train.max_skipped_steps=1"
# Mesh -> number of ranks and arguments; fault -> the message about the faulty rank.
MESHES = {
    "fsdp": (2, []),
    "fsdp x tp": (4, ["--parallel.tp=2", "--parallel.activation_checkpoint=full"]),
}
FSDP_ONLY = ("inf_loss", "huge_gradient")  # they do not depend on the mesh
SAID = {
    "nan_output": "rank 1: the output of layers.1 is the first value that is not finite",
    "inf_gradient": "rank 1: the gradient of the input of layers.1 is the first value that is not finite",
    "inf_loss": "rank 1: the output of head.loss is the first value that is not finite",
    "huge_gradient": "rank 1: the gradient of head.output.weight (or its square) is the first value that is "
    "not finite",
    "nan_parameter": "rank 1 has parameters that are not finite: layers.1.attention.wq.weight",
}
ON_MESHES = [(mesh, fault) for mesh in MESHES for fault in SAID if mesh == "fsdp" or fault not in FSDP_ONLY]
Seen = list[dict[str, Any]]  # of every rank


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    arguments = write_text(tmp_path_factory.mktemp("text"))
    load_corpus(parse_config(arguments).data)  # tokenized once for all tests
    return arguments


@pytest.fixture(scope="module")
def on_mesh(text: list[str]) -> Callable[[str], dict[str, Seen]]:
    """A function that returns `see_faults` of a mesh, computed once."""
    return functools.cache(lambda name: see_faults(name, text))


@pytest.fixture(params=list(MESHES))
def seen(request: pytest.FixtureRequest, on_mesh: Callable[[str], dict[str, Seen]]) -> dict[str, Seen]:
    return on_mesh(request.param)


def see_faults(name: str, text: list[str]) -> dict[str, Seen]:
    """Return every rank's results of every fault on one mesh."""
    ranks, mesh = MESHES[name]
    common = [*TINY, *text, *mesh, ONE_SKIP]
    faults = [fault for on, fault in ON_MESHES if on == name]
    cases = {fault: Case([*common, *EAGER], fault) for fault in (*faults, "nan_once", "none")}
    cases["none at all"] = Case([*common, *EAGER, "--train.max_skipped_steps=0"], "nan_once")
    if name == "fsdp":
        cases["accumulated"] = Case([*common, *EAGER, "--train.micro_batch_size=1"], "nan_output")
        frozen = "--train.freeze=[tok_embeddings.*,layers.0.*]"
        cases["compiled"] = Case([*common, *COMPILED], "nan_parameter")
        cases["offloaded"] = Case([*common, *EAGER, "--parallel.cpu_offload=true"], "nan_output")
        cases["frozen"] = Case([*common, *EAGER, frozen], "nan_output")
    of_ranks = run_ranks(ranks, train_all, cases)
    return {case: [rank[case] for rank in of_ranks] for case in cases}


def skips(of_rank: dict[str, Any]) -> list[float]:
    return [skipped for _loss, _norm, skipped, _changed in of_rank["steps"]]


def test_all_ranks_skip_the_same_steps_change_no_bit_in_them_and_train_in_the_others(
    seen: dict[str, Seen],
) -> None:
    for name, ranks in seen.items():
        for rank in ranks:
            assert skips(rank) == skips(ranks[0]), name
            for _loss, norm, skipped, changed in rank["steps"]:
                assert skipped == (not math.isfinite(norm)), name
                assert (changed == 0) == bool(skipped), name


def test_a_run_stops_on_all_ranks_at_the_step_after_the_last_that_may_be_skipped(
    seen: dict[str, Seen],
) -> None:
    warning = f"warning: step {FAULTY_STEP} was skipped: its loss or gradient is not finite (1 of at most 1)"
    for name, ranks in seen.items():
        if name in ("none", "nan_once", "none at all"):
            continue
        for rank in ranks:
            assert skips(rank) == [0, 1, 1], name
            assert rank["lines"] == [warning], name
            assert rank["skipped"] == 2
            assert rank["error"] == ranks[0]["error"], name
            assert f"step {FAULTY_STEP + 1} is not finite" in rank["error"]
            assert (rank["gradients_left"], rank["hooks_left"]) == (0, 0), name


@pytest.mark.parametrize(("seen", "fault"), ON_MESHES, indirect=["seen"])
def test_the_message_names_the_rank_and_the_module(fault: str, seen: dict[str, Seen]) -> None:
    error = seen[fault][0]["error"]
    assert SAID[fault] in error
    for rank in ("rank 0", "rank 2", "rank 3"):
        assert rank not in error or fault == "nan_parameter", "the message must name only the faulty rank"
    assert ("has parameters" in error) == (fault == "nan_parameter")
    if fault == "nan_parameter":
        assert error.count("has parameters") == 1
        assert "the output of layers.1.attention.wq is the first value" in error, (
            "the message must name where the value enters the step"
        )


@pytest.mark.parametrize(
    ("seen", "names"),
    [("fsdp", ["nan_output", "inf_gradient", "accumulated"]), ("fsdp x tp", ["nan_output", "inf_gradient"])],
    indirect=["seen"],
)
def test_the_sequences_that_are_named_are_those_the_rank_saw(
    names: list[str], seen: dict[str, Seen], text: list[str]
) -> None:
    split = load_corpus(parse_config(text).data).sources[0].split
    seq_len = parse_config(TINY).train.seq_len
    for name in names:
        part = slice(0, 1 if name == "accumulated" else 2)
        line = next(line for line in seen[name][0]["error"].splitlines() if line.startswith("rank 1: "))
        ids, source = line.partition("its sequences: ")[2].split(" of ")
        assert source == "text"
        named = [read_tokens(split, int(index) * seq_len, seq_len) for index in ids.split(", ")]
        assert named == seen[name][1]["tokens"][part], name


def read_tokens(split: TokenStream, first: int, count: int) -> list[int]:
    out = np.empty(count, np.int64)
    split.read(first, out)
    return out.tolist()


def test_a_fault_that_does_not_come_again_costs_one_step_of_the_budget(seen: dict[str, Seen]) -> None:
    for rank in seen["nan_once"]:
        assert skips(rank) == [0, 1, 0, 0]
        assert (rank["error"], rank["skipped"]) == (None, 1)


def test_without_a_budget_the_first_stops_the_run_and_what_is_not_found_again_is_called_so(
    seen: dict[str, Seen],
) -> None:
    for rank in seen["none at all"]:
        assert skips(rank) == [0, 1]
        assert rank["lines"] == []
        assert "not reproduced on any rank" in rank["error"]


def test_a_sound_run_says_nothing(seen: dict[str, Seen]) -> None:
    for rank in seen["none"]:
        assert skips(rank) == [0] * STEPS
        assert (rank["lines"], rank["error"], rank["skipped"]) == ([], None, 0)
