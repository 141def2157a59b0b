"""Initial weights are read directly into shards: the model equals transformers', and each rank reads only its
own slices."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from meshwright.models.hf import hf_name
from meshwright.tools.checkpoint.__main__ import main as convert
from tests.distributed.counted_reading import run_cases
from tests.support.hf_models import make_hf, make_tokens, save_hf
from tests.support.launch import EAGER
from tests.support.worlds import run_ranks

RANKS, VOCAB = 4, 264  # tp divides it
MESH = [*EAGER, "--parallel.tp=2", "--parallel.dp_shard=2"]
# All kinds of sharding: both mesh axes on one dimension (wq, wk, wv, w1, w3, embedding, head), one axis on
# each dimension (wo, w2), without tp (norms).
CASES = {
    "offload": (False, torch.bfloat16, [*MESH, "--parallel.cpu_offload=true"]),
    "checkpoint": (True, torch.float32, MESH),
    "uneven": (True, torch.float32, [*EAGER, "--parallel.dp_shard=4"]),  # 50 of w2 over 4 ranks
    "replicated": (False, torch.bfloat16, [*EAGER, "--parallel.dp_replicate=2", "--parallel.tp=2"]),
}


def make(tied: bool) -> Any:
    return make_hf(3, tied, rope="llama3", vocab_size=VOCAB, hidden_size=40, intermediate_size=50)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("cases")
    cases = {}
    for name, (tied, dtype, mesh) in CASES.items():
        source = save_hf(folder / f"{name}.hf", make(tied), dtype, "20KB")
        convert(["import", str(source), str(folder / f"{name}.ours"), "--shard_gb=0.00002"])
        ours = folder / f"{name}.ours"
        init_from = ours if name == "checkpoint" else source
        cases[name] = [f"--config={ours / 'config.yaml'}", f"--checkpoint.init_from={init_from}", *mesh]
    ranks = run_ranks(RANKS, run_cases, cases, make_tokens(VOCAB, seq_len=65))
    return {name: [rank[name] for rank in ranks] for name in CASES}


@pytest.mark.sampled(3, day=0)
@pytest.mark.parametrize("name", CASES)
def test_weights_and_first_loss_are_those_of_transformers(
    name: str, results: dict[str, list[dict[str, Any]]]
) -> None:
    tied, dtype, _ = CASES[name]
    hf = make(tied).to(dtype).to(torch.float32)  # rounded as it was saved
    theirs = dict(hf.named_parameters())
    for result in results[name]:
        for fqn, weight in result["weights"].items():
            assert weight.dtype == torch.float32
            assert torch.equal(weight, theirs[hf_name(fqn)]), fqn
    tokens = make_tokens(VOCAB, seq_len=65)
    with torch.no_grad():
        loss = F.cross_entropy(hf(tokens[:, :-1]).logits.flatten(0, 1), tokens[:, 1:].flatten()).item()
    assert [result["loss"] for result in results[name]] == pytest.approx([loss] * RANKS, abs=1e-4, rel=0)


@pytest.mark.parametrize("name", CASES)
def test_each_rank_reads_its_own_slices_and_no_more(
    name: str, results: dict[str, list[dict[str, Any]]]
) -> None:
    ranks = results[name]
    for result in ranks:
        expected = {parameter: size for parameter, size in result["local"].items() if size}
        assert {parameter: sum(sizes) for parameter, sizes in result["taken"].items()} == expected
    model = sum(weight.numel() for weight in ranks[0]["weights"].values())
    read = sum(sum(sizes) for result in ranks for sizes in result["taken"].values())
    copies = 2 if name == "replicated" else 1
    # both ranks of a tp group have them
    norms = 5 * 40 * (2 if "--parallel.tp=2" in CASES[name][2] else 1) * copies
    assert read == copies * (model - 5 * 40) + norms
