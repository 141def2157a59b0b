"""Every mesh and every setting train the same model as one plain process."""

import functools
import json
import math

import pytest
import torch
from _pytest.mark.expression import Expression

from tests.distributed import matrix
from tests.distributed.parity import LOSS, Job, check_compiled, check_parity, plain_run, run_jobs

AOT, EAGER, TP = (
    "--parallel.compile.backend=aot_eager",
    "--parallel.compile.enabled=false",
    "--parallel.tp=2",
)
PARTITIONED = "--parallel.compile.backend=aot_eager_decomp_partition"
SELECTIVE, FULL = "--parallel.activation_checkpoint=selective", "--parallel.activation_checkpoint=full"
FLASH, MATH, CHUNKS = (
    "--parallel.attention=flash",
    "--parallel.attention=math",
    "--parallel.loss_chunk_tokens=64",
)
# torch's attention, which runs on GPUs. Under full recompute it fails on a CPU (test_torch_faults.py), where
# we use our own.
FLASH_SAVED = "--parallel.selective_policy=aten.mm,aten._scaled_dot_product_flash_attention_for_cpu"
MIXED, DOCUMENTS = "--parallel.param_dtype=bfloat16", "--data.document_mask=true"


def jobs_of(cases: list[matrix.Case]) -> dict[str, Job]:
    return {
        matrix.name(case): Job(
            case["ranks"],
            matrix.arguments(case),
            matrix.graphs(case),
            "roundings" if case["parts"] != "all" and case["backend"] == "eager" else "",
        )
        for case in cases
    }


# Settings that are not factors of the matrix.
EVERYDAY = jobs_of(matrix.EVERYDAY) | {"math": Job(2, [EAGER, MATH, CHUNKS], 0)}
COMPILED = {
    "flash-selective": Job(2, [AOT, TP, FLASH, SELECTIVE, FLASH_SAVED], 2),
    "flash-budget": Job(2, [PARTITIONED, TP, FLASH, "--parallel.activation_checkpoint=budget"], 2),
    "math-compiled": Job(2, [AOT, MATH, CHUNKS], 2),
    # The kernel with document masks on a GPU.
    "flex-tp": Job(2, [AOT, TP, DOCUMENTS, SELECTIVE], 2, "flex"),
    "flex-full": Job(1, [AOT, DOCUMENTS, FULL], 2, "flex"),
}
# Compared by other checks.
BFLOAT16 = Job(2, [EAGER, TP, MIXED, *matrix.GENTLE], 0)
BFLOAT16_COMPILED = Job(2, [AOT, TP, MIXED, *matrix.GENTLE], 2)
STORED = Job(
    2,
    [
        *(EAGER, MIXED, *matrix.GENTLE),
        *("--parallel.storage_dtype=bfloat16", "--optim.state_dtype=bfloat16"),
    ],
    0,
)
JOBS = EVERYDAY | {"bfloat16": BFLOAT16, "stored": STORED}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Compute the slow cases only for a session that runs slow tests."""
    if "slow_name" in metafunc.fixturenames:
        marks = metafunc.config.option.markexpr
        if not marks or Expression.compile(marks).evaluate(lambda name, **_: name == "slow"):
            metafunc.parametrize("slow_name", slow_jobs(), ids=str)
        else:
            metafunc.parametrize("slow_name", [])


@functools.cache
def slow_jobs() -> dict[str, Job]:
    return matrix.sample(jobs_of(matrix.slow_cases()), matrix.PARITY_PARTS) | matrix.sample(
        COMPILED, parts=10
    )


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> list[str]:
    """Short lines of text, one document each: most sequences contain a document's end."""
    folder = tmp_path_factory.mktemp("text")
    lines = (json.dumps({"text": f"{n} in {i} is {n * n}"}) for i in range(8) for n in range(i, 300 + i))
    (folder / "lines.jsonl").write_text("\n".join(lines))
    return [
        f"--data.source={folder / 'lines.jsonl'}",
        f"--data.cache_dir={folder / 'cache'}",
        "--data.eval_fraction=0.2",
    ]


@pytest.fixture(scope="module")
def trained(data):
    """A function from a job's name, and a set of jobs with it, to its result. Jobs with the same number of
    ranks share processes, a few of them, so that no test takes long; a compiled job has its own."""
    results = {}

    def result(name, jobs):
        if name not in results:
            kind = (jobs[name].ranks, jobs[name].graphs > 0)
            same = [key for key, job in jobs.items() if (job.ranks, job.graphs > 0) == kind]
            count = 1 if jobs[name].graphs else 14 // jobs[name].ranks
            first = same.index(name) // count * count
            results.update(run_jobs({key: jobs[key] for key in same[first : first + count]}, data))
        return results[name]

    return result


def check(name, jobs, trained, data):
    check_parity(trained(name, jobs), plain_run(jobs[name], data))
    check_compiled(trained(name, jobs), jobs[name].graphs)


@pytest.mark.parametrize("name", EVERYDAY, ids=str)
def test_a_mesh_trains_the_same_model_as_one_plain_process(name, trained, data):
    check(name, JOBS, trained, data)


@pytest.mark.slow
def test_every_pair_of_settings_trains_the_same_model_as_one_plain_process(slow_name, trained, data):
    """To repeat a failed case, set MESHWRIGHT_TESTS_SEED=all and select its name."""
    check(slow_name, slow_jobs(), trained, data)


@pytest.mark.slow
@pytest.mark.sampled(10)
@pytest.mark.parametrize("name", COMPILED)
def test_attention_kernels_of_gpus_train_the_same_model_compiled(name, trained, data):
    check(name, {name: COMPILED[name]}, trained, data)


# bfloat16 has 8 significant bits: rounding to nearest changes a value by at most U = 2**-8 of it. The
# variances of independent roundings add up; each has a standard deviation of at most U / sqrt(3) of the
# rounded value.
U = 2**-8
# Consecutive roundings: about 13 in a block's forward (norm 2, projection, RoPE 2, attention,
# projection, sum, norm 2, two products of SwiGLU, sum), 5 in embedding and head; a backward has
# about twice as many.
FORWARD = 13 * matrix.LAYERS + 5
# 2.9% of its norm, which also bounds the error of norms
OF_A_GRADIENT = math.sqrt(3 * FORWARD) * U / math.sqrt(3)
# A token's loss moves by (p - y) . dz, and |p - y| <= sqrt(2). Logits z of size 1 have the accumulated error
# of a forward, averaged over the 512 tokens of a batch, and the error from rounding the weights, which all
# tokens share.
OF_A_TOKEN = math.sqrt(2) * math.sqrt(FORWARD) * U / math.sqrt(3) / math.sqrt(32 * 16)  # 1.1e-3
OF_THE_WEIGHTS = math.sqrt(2) * U / math.sqrt(3)  # 3.2e-3


def check_rounding(got, other, loss, gradient):
    assert got["losses"] == pytest.approx(other["losses"], abs=loss, rel=0)
    assert got["eval_loss"] == pytest.approx(other["eval_loss"], abs=loss, rel=0)
    assert got["norms"] == pytest.approx(other["norms"], rel=gradient, abs=0)
    for name, grad in other["grads"].items():
        assert (got["grads"][name] - grad).norm() < gradient * grad.norm(), name


def test_bfloat16_is_off_by_its_roundings_and_no_more(trained, data):
    """Compared with float32, and with one plain process that computes in bfloat16: that has the same rounded
    weights, so only the other roundings of both runs differ."""
    check_bfloat16(trained("bfloat16", JOBS), BFLOAT16, data)


@pytest.mark.slow
@pytest.mark.sampled(10)
def test_compiled_bfloat16_is_off_by_no_more_than_eager(data):
    (got,) = run_jobs({"bfloat16-compiled": BFLOAT16_COMPILED}, data).values()
    check_bfloat16(got, BFLOAT16_COMPILED, data)


def check_bfloat16(got, job, data):
    assert "error" not in got, got["error"]
    exact, plain = plain_run(job, data), plain_run(job, data, torch.bfloat16)
    check_rounding(got, exact, OF_A_TOKEN + OF_THE_WEIGHTS, OF_A_GRADIENT)
    check_rounding(got, plain, math.sqrt(2) * OF_A_TOKEN, math.sqrt(2) * OF_A_GRADIENT)
    assert max(abs(a - b) for a, b in zip(got["losses"], exact["losses"], strict=True)) > 2 * LOSS, (
        "bfloat16 was not used"
    )
    check_compiled(got, job.graphs)


def test_states_in_bfloat16_train_beside_those_in_float32(trained, data):
    got, plain = trained("stored", JOBS), plain_run(STORED, data, torch.bfloat16)
    assert "error" not in got, got["error"]
    assert got["losses"] == pytest.approx(plain["losses"], abs=0.02, rel=0)
