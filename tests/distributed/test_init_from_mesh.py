"""Initial weights are read directly into shards: the model equals transformers', and each rank reads only its
own slices."""

import gc
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from meshwright.models.hf import hf_name
from meshwright.parallel.fsdp import full_tensor
from meshwright.tools.checkpoint.__main__ import main as convert
from meshwright.train.checkpoint import reader
from meshwright.train.checkpoint.initial_weights import find_weights, load_weights
from meshwright.train.data.sequences import Batch
from meshwright.train.model.trained_model import loss_of_forward
from meshwright.train.step import train_step
from tests.support.hf_models import make_hf, make_tokens, save_hf
from tests.support.launch import EAGER
from tests.support.sharded import build_sharded
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


class Counted:
    """A safetensors file that counts the elements read from it. Slices only: full tensors cannot be read."""

    open, taken = reader.safe_open, dict[str, list[int]]()

    def __init__(self, filename: str, framework: str) -> None:
        self.file = Counted.open(filename, framework=framework)

    def __enter__(self) -> "Counted":
        self.file.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.file.__exit__(*error)

    def keys(self) -> list[str]:
        return list(self.file.keys())

    def metadata(self) -> Any:
        return self.file.metadata()

    def get_slice(self, name: str) -> Any:
        return _Slice(name, self.file.get_slice(name))


class _Slice:
    def __init__(self, name: str, part: Any) -> None:
        self.name, self.part = name, part
        self.get_shape, self.get_dtype = part.get_shape, part.get_dtype

    def __getitem__(self, where: Any) -> Tensor:
        taken = self.part[where]
        Counted.taken.setdefault(self.name, []).append(taken.numel())
        return taken


def run_case(arguments: Sequence[str], tokens: Tensor) -> dict[str, Any]:
    """Return the weights, the elements read of each, and the loss of the first step on tokens[sequence, T +
    1]."""
    run = build_sharded(arguments)
    weights, model = find_weights(run.config.checkpoint.init_from, run.config.model), run.model
    assert weights
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)
    Counted.taken.clear()
    load_weights(weights, model)
    local = {
        weights.names[name]: (p.to_local() if isinstance(p, DTensor) else p).numel()
        for name, p in model.named_parameters()
    }
    full = {name: full_tensor(p).detach().clone() for name, p in model.named_parameters()}
    shape = run.shape
    own = tokens.chunk(shape.data_parallel)[shape.data_rank]
    batch = Batch(own[:, :-1].contiguous(), own[:, 1:].contiguous())
    result = train_step(run.sharded, run.optimizer, [batch], 0.0, loss_of_forward)
    return {"loss": result.loss.item(), "taken": dict(Counted.taken), "local": local, "weights": full}


def run_cases(cases: Mapping[str, Sequence[str]], tokens: Tensor) -> dict[str, dict[str, Any]]:
    reader.safe_open = Counted  # this process ends with the test
    results = {}
    for name, arguments in cases.items():
        results[name] = run_case(arguments, tokens)
        gc.collect()
    return results


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
