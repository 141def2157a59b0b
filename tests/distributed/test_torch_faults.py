"""Failures of torch's own that this project goes around, reproduced without it: a test here goes away when torch is mended.

Beside each stands the test that our own way is right.
"""

import json

import pytest
import torch

from tests.support.launch import run

VERSION = ".".join(torch.__version__.split(".")[:2])
only_2_13 = pytest.mark.skipif(VERSION != "2.13", reason=f"a fault of torch 2.13 (2.11 does not have it), this is {VERSION}")


def said(ranks: int, *arguments: str) -> str:
    return run(ranks, *arguments, module="tests.distributed.torch_faults_worker", timeout_s=300).stdout


def one_step(*arguments: str) -> dict:
    return json.loads(said(2, "step", *arguments))


@only_2_13
def test_torchs_own_styles_lose_the_gradient_of_an_embedding_in_front_of_a_compiled_block():
    """Ours: test_parity.py, where every tp case that compiles has the embedding's gradient of the plain process."""
    eager, compiled = one_step("none", "keep", "-"), one_step("aot_eager", "keep", "-")
    assert eager["embedding.weight"] > 1
    assert compiled.pop("embedding.weight") == 0.0, "torch is mended: parallel/tensor.py need not say so any more"
    assert compiled == pytest.approx({name: norm for name, norm in eager.items() if name != "embedding.weight"})
    waited = one_step("aot_eager", "keep", "wait")
    assert waited == pytest.approx(eager), "waiting for the collective is what parallel/tensor.py does"


@only_2_13
def test_a_compiled_block_with_dtensor_weights_cannot_recompute_torchs_attention_on_a_cpu():
    """Ours: 4-1x2x2-aot_eager-full in test_parity.py, with an attention for CPUs that torch does not count as random."""
    seen = one_step("aot_eager", "recompute", "wait")
    assert "expected all tensors_saved_with_vc_check to be Tensors" in seen["error"]
    assert "DeviceMesh" in seen["error"]
    eager = one_step("none", "recompute", "wait")
    assert eager["embedding.weight"] > 1


@pytest.mark.slow
def test_resharding_to_smaller_groups_beside_tp_hangs():
    """Ours: such a plan is refused (tests/parallel/test_make_plan.py)."""
    if VERSION not in ("2.11", "2.12", "2.13"):
        pytest.skip(f"known of torch 2.11 to 2.13, this is {VERSION}: try whether parallel/rules.py need refuse it still")
    assert said(8, "reshard", "true").count("through") == 8
    assert said(8, "reshard", "2").count("through") < 8
