"""Activations in host memory: training with them is training without, bit by bit, and they are really there and not here."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.launch import EAGER, run

BLOCKS, KEPT_ON_DEVICE = 5, 1  # the last block's, which the backward needs first
SHAPE = ["--model.dim=64", f"--model.n_layers={BLOCKS}", "--model.n_heads=4", "--model.n_kv_heads=2", "--model.ffn_dim=192",
         "--model.vocab_size=512", "--train.seq_len=256", "--train.micro_batch_size=2", "--train.global_batch_size=8",
         "--optim.warmup_steps=2"]  # fmt: skip
AOT, INDUCTOR, TP = ["--parallel.compile.backend=aot_eager"], ["--parallel.compile.backend=inductor"], ["--parallel.tp=2"]
OFFLOAD, THREE = ["--parallel.activation_checkpoint=offload"], ["--parallel.checkpointed_blocks=3"]
HIDDEN = 2 * 256 * 64 * 4  # bytes of the smallest tensor that is sent: what a block takes in


def train(folder: Path, *cases: list[str]) -> list[dict[str, Any]]:
    out = folder / "out.json"
    done = run(2, str(out), json.dumps([[*SHAPE, *case] for case in cases]), module="tests.distributed.offload_worker",
               timeout_s=300, TORCHINDUCTOR_COMPILE_THREADS="1")  # fmt: skip
    assert done.returncode == 0, done.stderr
    results: list[dict[str, Any]] = json.loads(out.read_text())
    return results


def check(here: dict[str, Any], there: dict[str, Any], micro_batches: int) -> None:
    """The same numbers with what was saved here and there, and all of it sent in every step and fetched."""
    assert (there["losses"], there["norms"]) == (here["losses"], here["norms"])
    sent = there["sent"][0]
    assert sent > micro_batches * (BLOCKS - KEPT_ON_DEVICE - 2) * HIDDEN
    assert there["sent"] == [sent, 2 * sent, 3 * sent], "every step sends as much"
    assert there["held"] == [sent // micro_batches] * 3, "all of it is free again after a step, and taken again by the next"


def check_device(here: dict[str, Any], there: dict[str, Any]) -> None:
    """As much less on the device as is in host memory, and no more left there after a step."""
    assert here["after_forward"] - there["after_forward"] == pytest.approx(there["held"][0], abs=HIDDEN / 4)
    assert there["after_backward"] == pytest.approx(here["after_backward"], abs=HIDDEN * BLOCKS)


def test_the_same_training_with_less_on_the_device(tmp_path: Path) -> None:
    eager, eager_there, compiled, compiled_there, some_there = train(
        tmp_path, EAGER, [*EAGER, *OFFLOAD], AOT, [*AOT, *OFFLOAD], [*AOT, *OFFLOAD, *THREE]
    )
    for here, there in ((eager, eager_there), (compiled, compiled_there), (compiled, some_there)):
        check(here, there, micro_batches=2)
        check_device(here, there)
    assert some_there["sent"][0] * 4 == compiled_there["sent"][0] * 2, "of three blocks the last one stays, too"
    graphs = [result["graphs"] for result in (compiled, compiled_there, some_there)]
    assert all(len(set(counts)) == 1 for counts in graphs), f"recompiled: {graphs}"


@pytest.mark.slow
@pytest.mark.parametrize("keys", [INDUCTOR, [*EAGER, *TP], [*AOT, *TP]], ids=["inductor", "tp", "tp-aot"])
def test_the_same_by_inductor_and_with_split_weights(tmp_path: Path, keys: list[str]) -> None:
    here, there = train(tmp_path, keys, [*keys, *OFFLOAD])
    check(here, there, micro_batches=4 if keys[-1] in TP else 2)
