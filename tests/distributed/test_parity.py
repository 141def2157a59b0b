"""Every mesh trains the same model as one plain eager process: losses, norms, first gradients, initial weights."""

import functools
from pathlib import Path

import pytest
import torch

from tests.distributed.reference import train_plainly
from tests.launch import EAGER, TINY, run, write_text
from train.config import parse_config

STEPS = 10
AOT = ["--parallel.compile.backend=aot_eager"]
CASES = {
    "1-eager": (1, [*EAGER]),
    "1-inductor": (1, []),
    "2-eager": (2, [*EAGER]),
    "2-aot": (2, [*AOT]),
    "2-inductor": (2, []),
    "2-accumulate": (2, [*AOT, "--train.micro_batch_size=1"]),
    "2-replicate": (2, [*EAGER, "--parallel.dp_replicate=2", "--train.micro_batch_size=1"]),
    "4-hsdp-recompute": (4, [*AOT, "--parallel.dp_replicate=2", "--train.micro_batch_size=1",
                             "--parallel.activation_checkpoint=full"]),
    "2-tied-keep": (2, [*EAGER, "--model.tie_embeddings=true", "--parallel.reshard_after_forward=false"]),
    "2-uneven": (2, [*EAGER, "--train.micro_batch_size=1"]),
    "2-no-prefetch": (2, [*EAGER, "--parallel.forward_prefetch=0", "--parallel.backward_prefetch=0"]),
    "2-far-prefetch": (2, [*AOT, "--parallel.forward_prefetch=2", "--parallel.backward_prefetch=2", "--model.n_layers=4"]),
}  # fmt: skip


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> list[str]:
    return write_text(tmp_path_factory.mktemp("parity"))


@functools.cache
def reference(arguments: tuple[str, ...], uneven: bool):
    return train_plainly(parse_config(arguments), STEPS, uneven)


def train_on_mesh(case: str, folder: Path, data: list[str], *extra: str):
    processes, arguments = CASES[case]
    out = folder / "result.pt"
    uneven = "uneven" if "uneven" in case else "even"
    result = run(processes, str(out), str(STEPS), uneven, *TINY, *data, *arguments, *extra,
                 module="tests.distributed.parity_worker")  # fmt: skip
    assert result.returncode == 0, result.stderr
    return torch.load(out)


@pytest.mark.parametrize("case", CASES)
def test_a_mesh_trains_the_same_model_as_one_plain_process(case, data, tmp_path):
    got = train_on_mesh(case, tmp_path, data)
    model_keys = [a for a in CASES[case][1] if a.startswith("--model.")]
    plain = reference((*TINY, *data, *model_keys), "uneven" in case)
    assert plain["losses"][-1] < plain["losses"][0] - 0.5, "the data must be learnable, or a wrong gradient hides"
    for name, weight in plain["weights"].items():
        assert torch.equal(got["weights"][name], weight), f"initial weights of {name} differ"
    assert got["losses"] == pytest.approx(plain["losses"], abs=5e-5)
    assert got["norms"] == pytest.approx(plain["norms"], rel=1e-5)
    for name, grad in plain["grads"].items():
        difference = (got["grads"][name] - grad).norm() / grad.norm()
        assert difference < 1e-4, f"first gradient of {name} differs by {difference:.1e} of its norm"
    assert got["graphs"][0] == got["graphs"][-1], "something was compiled after the first step"


def test_bfloat16_means_the_same_in_one_process_as_in_two(data, tmp_path):
    bf16 = ["--parallel.param_dtype=bfloat16", "--train.micro_batch_size=4"]
    one = train_on_mesh("1-eager", tmp_path, data, *bf16)
    two = train_on_mesh("2-eager", tmp_path, data, *bf16)
    # Both round the same numbers to 8 bits of mantissa; only the order of float32 sums over the batch differs.
    assert one["losses"] == pytest.approx(two["losses"], abs=2e-3)
    exact = reference((*TINY, *data), False)["losses"]
    assert max(abs(a - b) for a, b in zip(one["losses"], exact, strict=True)) > 1e-4, "bfloat16 was not used"
