"""Every mesh trains the same model as one plain eager process: losses, norms, first gradients, initial
weights, data.

A test run takes a sample of the slow cases (matrix.py). All of them, in about half an hour on two cores, or
those of another seed:

    MESHWRIGHT_TESTS_SEED=all pytest -m slow tests/distributed/test_parity.py
"""

import json
import math

import pytest
import torch

from tests.distributed import matrix
from tests.distributed.parity import GRADIENT, LOSS, Job, check_compiled, check_parity, plain_run, run_jobs

AOT, EAGER = "--parallel.compile.backend=aot_eager", "--parallel.compile.enabled=false"
FREEZE = "--train.freeze=[tok_embeddings.*, layers.0.*, layers.2.attention.wq.*]"
TP, DOCUMENTS = "--parallel.tp=2", "--data.document_mask=true"
FLASH, MATH = "--parallel.attention=flash", "--parallel.attention=math"
FOUR, FULL, OFFLOAD = (
    "--model.n_layers=4",
    "--parallel.activation_checkpoint=full",
    "--parallel.cpu_offload=true",
)
JOINED = "--parallel.unit_min_params=10000"


def jobs_of(cases: list[matrix.Case]) -> dict[str, Job]:
    return {
        matrix.name(case): Job(case["ranks"], matrix.arguments(case), matrix.graphs(case)) for case in cases
    }


# Hand-written cases for settings that are not factors of the matrix. FREEZE has five graphs: block 0, which
# is frozen and whose input needs no gradient; block 1, which is trained, with such an input; block 2, with a
# frozen weight; block 3; and the head.
OTHERS = {
    "frozen-tp": Job(4, [EAGER, FOUR, FREEZE, TP, FULL], 0),
    "offload": Job(4, [EAGER, OFFLOAD, TP], 0),
    # A block has 9,280 parameters: two make a unit.
    "joined": Job(4, [EAGER, FOUR, JOINED, TP, FULL], 0),
    "math": Job(2, [EAGER, MATH, "--parallel.loss_chunk_tokens=64"], 0),
    # The kernel with document masks on a GPU.
    "flex-selective": Job(1, [AOT, DOCUMENTS, "--parallel.activation_checkpoint=selective"], 2, "flex"),
}
# The same with more compiled ranks, and small variations of the cases above.
COMPILED = {
    "frozen": Job(1, [AOT, FOUR, FREEZE], 5),
    # torch's attention, which runs on GPUs. Under full recompute it fails on a CPU (test_torch_faults.py),
    # where we use our own.
    "flash-selective": Job(
        2,
        [
            AOT,
            TP,
            FLASH,
            "--parallel.activation_checkpoint=selective",
            "--parallel.selective_policy=aten.mm,aten._scaled_dot_product_flash_attention_for_cpu",
        ],
        2,
    ),
    "frozen-tp-compiled": Job(4, [AOT, FOUR, FREEZE, TP, FULL], 5),
    "offload-compiled": Job(4, [AOT, OFFLOAD, TP], 2),
    "offload-hsdp": Job(4, [EAGER, OFFLOAD, "--parallel.dp_replicate=2", "--train.micro_batch_size=2"], 0),
    "joined-compiled": Job(2, [AOT, FOUR, JOINED, FULL], 2),
    "joined-tp-compiled": Job(4, [AOT, FOUR, JOINED, TP, FULL], 2),
    "flash-budget": Job(
        2,
        [
            "--parallel.compile.backend=aot_eager_decomp_partition",
            TP,
            FLASH,
            "--parallel.activation_checkpoint=budget",
        ],
        2,
    ),
    "math-compiled": Job(2, [AOT, MATH, "--parallel.loss_chunk_tokens=64"], 2),
    "flex-tp": Job(2, [AOT, TP, DOCUMENTS, "--parallel.activation_checkpoint=selective"], 2, "flex"),
    "flex-full": Job(2, [AOT, DOCUMENTS, FULL], 2, "flex"),
    "hsdp-compiled": Job(4, [AOT, "--parallel.dp_replicate=2", "--parallel.reshard_after_forward=false"], 2),
}
# Compared by other checks.
BFLOAT16 = Job(4, [EAGER, FOUR, TP, "--parallel.param_dtype=bfloat16", *matrix.GENTLE], 0)
BFLOAT16_COMPILED = Job(2, [AOT, FOUR, TP, "--parallel.param_dtype=bfloat16", *matrix.GENTLE], 2)
ASYNC = Job(2, [AOT, TP], 2, "async")
BY_HAND = jobs_of(matrix.FAST) | OTHERS
# inductor's kernels take as long as all other cases
FAST = {name: job for name, job in BY_HAND.items() if "inductor" not in name}
COMPILED |= {name: job for name, job in BY_HAND.items() if name not in FAST}
SLOW = matrix.sample(jobs_of(matrix.SLOW), matrix.PARITY_PARTS) | matrix.sample(COMPILED, parts=7)
EVERYDAY = FAST | {"bfloat16": BFLOAT16}


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> list[str]:
    """Lines of text, one document each, about as long as a sequence: most sequences contain a document's
    end."""
    folder = tmp_path_factory.mktemp("text")
    lines = (
        json.dumps({"text": f"line {n} of text {i} squares to {n * n}"})
        for i in range(8)
        for n in range(i, 1500 + i)
    )
    (folder / "lines.jsonl").write_text("\n".join(lines))
    return [
        f"--data.source={folder / 'lines.jsonl'}",
        f"--data.cache_dir={folder / 'cache'}",
        "--data.eval_fraction=0.2",
    ]


@pytest.fixture(scope="module")
def trained(data):
    """A function from a job's name, and a set of jobs with it, to its result. Jobs with the same number of
    ranks share processes."""
    results = {}

    def result(name, jobs):
        if name not in results:
            results.update(
                run_jobs({key: job for key, job in jobs.items() if job.ranks == jobs[name].ranks}, data)
            )
        return results[name]

    return result


def check(name, jobs, trained, data):
    check_parity(trained(name, jobs), plain_run(jobs[name], data))
    check_compiled(trained(name, jobs), jobs[name].graphs)


@pytest.mark.parametrize("name", FAST, ids=str)
def test_a_mesh_trains_the_same_model_as_one_plain_process(name, trained, data):
    check(name, EVERYDAY, trained, data)


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW, ids=str)
def test_every_pair_of_settings_trains_the_same_model_as_one_plain_process(name, trained, data):
    """To repeat a failed case, set MESHWRIGHT_TESTS_SEED=all and select its name."""
    check(name, SLOW, trained, data)


def test_a_case_that_fails_spoils_none_that_comes_after_it(data):
    jobs = {"bad": Job(1, [EAGER], 0, "no such change"), "good": Job(1, [EAGER], 0)}
    results = run_jobs(jobs, data, steps=1)
    assert "KeyError: 'no such change'" in results["bad"]["error"]
    assert len(results["good"]["losses"]) == 1


@pytest.mark.slow
@pytest.mark.skipif(torch.__version__.startswith("2.11"), reason="2.11 does not have this fault of torch")
def test_a_collective_handed_on_unwaited_would_lose_the_gradient_of_the_embedding(data):
    """Why parallel/tensor_parallel.py waits: with torch's AsyncCollectiveTensor instead, the embedding's
    gradient is lost, no other gradient is wrong apart from clipping, and the parity check must detect it."""
    got, plain, lost = (
        run_jobs({"async": ASYNC}, data)["async"],
        plain_run(ASYNC, data),
        "tok_embeddings.weight",
    )
    assert "error" not in got, got["error"]
    assert torch.count_nonzero(got["grads"][lost]) == 0
    assert got["losses"][0] == pytest.approx(plain["losses"][0], abs=LOSS)
    for name in got["grads"].keys() - {lost}:
        grad = got["grads"][name]
        other = plain["grads"][name]
        assert (grad / grad.norm() - other / other.norm()).norm() < GRADIENT, name
    with pytest.raises(AssertionError):
        check_parity(got, plain)


# bfloat16 has 8 significant bits: rounding to nearest changes a value by at most U = 2**-8 of it. The
# variances of independent roundings add up; each has a standard deviation of at most U / sqrt(3) of the
# rounded value.
U = 2**-8
# Consecutive roundings: about 13 in a block's forward (norm 2, projection, RoPE 2, attention,
# projection, sum, norm 2, two products of SwiGLU, sum), 4 blocks, 5 in embedding and head; a backward has
# about twice as many.
FORWARD = 13 * 4 + 5
# 2.9% of its norm, which also bounds the error of norms
OF_A_GRADIENT = math.sqrt(3 * FORWARD) * U / math.sqrt(3)
# A token's loss moves by (p - y) . dz, and |p - y| <= sqrt(2). Logits z of size 1 have the accumulated error
# of a forward, averaged over the 512 tokens of a batch, and the error from rounding the weights, which all
# tokens share.
OF_A_TOKEN = math.sqrt(2) * math.sqrt(FORWARD) * U / math.sqrt(3) / math.sqrt(16 * 32)  # 1.1e-3
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
    check_bfloat16(trained("bfloat16", EVERYDAY), BFLOAT16, data)


@pytest.mark.slow
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
