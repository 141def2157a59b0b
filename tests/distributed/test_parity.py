"""Every mesh trains the same model as one plain eager process: losses, norms, first gradients, initial weights, data."""

import json
import math

import pytest
import torch

from tests.distributed import matrix
from tests.distributed.parity import GRADIENT, LOSS, Job, check_compiled, check_parity, plain_run, run_jobs

AOT, EAGER = "--parallel.compile.backend=aot_eager", "--parallel.compile.enabled=false"
FREEZE = "--train.freeze=[tok_embeddings.*, layers.0.*, layers.2.attention.wq.*]"
TP, DOCUMENTS, FLASH = "--parallel.tp=2", "--data.document_mask=true", "--parallel.attention=flash"


def jobs_of(cases: list[matrix.Case]) -> dict[str, Job]:
    return {matrix.name(case): Job(case["ranks"], matrix.arguments(case), matrix.graphs(case)) for case in cases}


# What is not a factor of the matrix, by hand. Graphs: block 0 is frozen and its input needs no gradient; nor does that of
# block 1, which is trained; block 2 has a frozen weight; block 3 is an ordinary one; and the head.
OTHERS = {
    "frozen": Job(2, [AOT, FREEZE], 5),
    "frozen-tp": Job(4, [AOT, FREEZE, TP, "--parallel.activation_checkpoint=full"], 5),
    "offload": Job(4, [AOT, "--parallel.cpu_offload=true", TP], 2),
    "offload-hsdp": Job(4, [EAGER, "--parallel.cpu_offload=true", "--parallel.dp_replicate=2", "--train.micro_batch_size=2"], 0),
    # A block has 9,280 parameters: two make a unit.
    "joined": Job(4, [AOT, "--parallel.unit_min_params=10000", TP, "--parallel.activation_checkpoint=full"], 2),
    # The attention that runs on a GPU. Fully checkpointed it fails on a CPU (test_torch_faults.py), where we have our own.
    "flash-selective": Job(2, [AOT, TP, FLASH, "--parallel.activation_checkpoint=selective",
                               "--parallel.selective_policy=aten.mm,aten._scaled_dot_product_flash_attention_for_cpu"], 2),
    "flash-budget": Job(2, ["--parallel.compile.backend=aot_eager_decomp_partition", TP, FLASH,
                            "--parallel.activation_checkpoint=budget"], 2),
    "math": Job(2, [AOT, "--parallel.attention=math", "--parallel.loss_chunk_tokens=64"], 2),
    # What keeps documents apart on a GPU.
    "flex-selective": Job(2, [AOT, TP, DOCUMENTS, "--parallel.activation_checkpoint=selective"], 2, "flex"),
    "flex-full": Job(2, [AOT, DOCUMENTS, "--parallel.activation_checkpoint=full"], 2, "flex"),
}  # fmt: skip
# Compared in another way.
SPECIAL = {"bfloat16": Job(4, [AOT, TP, "--parallel.param_dtype=bfloat16"], 2), "async": Job(2, [AOT, TP], 2, "async")}
FAST, SLOW = jobs_of(matrix.FAST) | OTHERS, jobs_of(matrix.SLOW)
EVERYDAY = FAST | SPECIAL


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> list[str]:
    """Lines, a document each, about as long as a sequence: most sequences have the end of one."""
    folder = tmp_path_factory.mktemp("text")
    lines = (json.dumps({"text": f"line {n} of text {i} squares to {n * n}"}) for i in range(8) for n in range(i, 1500 + i))
    (folder / "lines.jsonl").write_text("\n".join(lines))
    return [f"--data.source={folder / 'lines.jsonl'}", f"--data.cache_dir={folder / 'cache'}", "--data.held_out=0.2"]


@pytest.fixture(scope="module")
def trained(data, tmp_path_factory):
    """A function from a job's name, and the jobs it is one of, to its result. Those of as many ranks share a launch."""
    results = {}

    def result(name, jobs):
        if name not in results:
            alike = {other: job for other, job in jobs.items() if job.ranks == jobs[name].ranks}
            results.update(run_jobs(alike, data, tmp_path_factory.mktemp("jobs")))
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
    check(name, SLOW, trained, data)


def test_a_collective_handed_on_unwaited_would_lose_the_gradient_of_the_embedding(trained, data):
    """What parallel/tensor.py waits for: with torch's AsyncCollectiveTensor in place of its waiting, no other gradient is
    wrong, apart from the clipping, and parity must see it."""
    got, plain = trained("async", EVERYDAY), plain_run(EVERYDAY["async"], data)
    assert torch.count_nonzero(got["grads"].pop("tok_embeddings.weight")) == 0
    assert got["losses"][0] == pytest.approx(plain["losses"][0], abs=LOSS)
    for name, grad in got["grads"].items():
        other = plain["grads"][name]
        assert (grad / grad.norm() - other / other.norm()).norm() < GRADIENT, name
    with pytest.raises(AssertionError):
        check_parity(got, plain)


# bfloat16 has 8 bits of significand: rounding to nearest is off by at most U = 2**-8 of the value. Roundings that are
# independent add up by their squares, with a standard deviation of at most U / sqrt(3) each, of the value they are made on.
U = 2**-8
# Roundings one after another: about 13 in a block's forward (norm 2, projection, RoPE 2, attention, projection, sum, norm 2,
# two products of SwiGLU, sum), 4 blocks, 5 in embedding and head; a backward has about twice as many.
FORWARD = 13 * 4 + 5
OF_A_GRADIENT = math.sqrt(3 * FORWARD) * U / math.sqrt(3)  # 2.9% of its norm; and no norm is off by more than that
# A token's loss moves by (p - y) . dz, and |p - y| <= sqrt(2). Logits z of size 1 are off by what a forward gathers, averaged
# over the 512 tokens of a batch; and by the rounding of the weights, which all tokens share.
OF_A_TOKEN = math.sqrt(2) * math.sqrt(FORWARD) * U / math.sqrt(3) / math.sqrt(16 * 32)  # 1.1e-3
OF_THE_WEIGHTS = math.sqrt(2) * U / math.sqrt(3)  # 3.2e-3


def check_rounding(got, other, loss, gradient):
    assert got["losses"] == pytest.approx(other["losses"], abs=loss, rel=0)
    assert got["eval_loss"] == pytest.approx(other["eval_loss"], abs=loss, rel=0)
    assert got["norms"] == pytest.approx(other["norms"], rel=gradient, abs=0)
    for name, grad in other["grads"].items():
        assert (got["grads"][name] - grad).norm() < gradient * grad.norm(), name


def test_bfloat16_is_off_by_its_roundings_and_no_more(trained, data):
    """Against float32, and against one plain process that computes in bfloat16: then the rounded weights are the same, and
    two runs differ by what each rounds apart."""
    got, job = trained("bfloat16", EVERYDAY), EVERYDAY["bfloat16"]
    assert "error" not in got, got["error"]
    exact, plain = plain_run(job, data), plain_run(job, data, torch.bfloat16)
    check_rounding(got, exact, OF_A_TOKEN + OF_THE_WEIGHTS, OF_A_GRADIENT)
    check_rounding(got, plain, math.sqrt(2) * OF_A_TOKEN, math.sqrt(2) * OF_A_GRADIENT)
    assert max(abs(a - b) for a, b in zip(got["losses"], exact["losses"], strict=True)) > 2 * LOSS, "bfloat16 was not used"
    check_compiled(got, job.graphs)
