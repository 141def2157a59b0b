"""The attention kernel that a step ran, from its profile."""

import pytest
import torch

from meshwright.models.attention import KERNELS, CausalAttention
from meshwright.train.profiling import CHECKED_STEP, KernelCheck, describe_attention
from tests.support.steps import step_done

CPU = torch.device("cpu")
# Kernel names from published profiles, except "math".
SEEN = {
    "cudnn": [
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_3_64x64x128_4x1x1_kernel0_0",
        "softmax_warp",
    ],
    "flash": [
        "void pytorch_flash::flash_fwd_kernel<pytorch_flash::Flash_fwd_kernel_traits<128>>",
        "nvjet_tst_128x256",
    ],
    "efficient": ["fmha_cutlassF_bf16_aligned_64x128_rf_sm80(PyTorchMemEffAttention::AttentionKernel)"],
    "flex": ["triton_tem_fused_flex_attention_0"],
    "cpu": ["meshwright::cpu_causal_attention", "aten::_scaled_dot_product_cpu"],
    "math": ["void softmax_warp_forward<float>", "nvjet_tst_128x256"],
}


@pytest.mark.parametrize("planned", KERNELS)
@pytest.mark.parametrize("ran", KERNELS)
def test_a_kernel_is_known_by_its_name_and_another_one_is_said(planned: str, ran: str) -> None:
    line = describe_attention(planned, SEEN[ran])
    assert line.startswith("attention: " if planned == ran else f"warning: attention={planned} ")
    assert ran in line


def test_a_kernel_other_than_planned_is_warned_of() -> None:
    lines: list[str] = []
    check = KernelCheck("cpu", CPU, lines.append)
    attention, q = CausalAttention(), torch.randn(1, 16, 2, 16)
    attention.kernel = "flash"
    for _ in range(CHECKED_STEP):
        check.before_step(1)
        attention(q, q, q)
        check.after_step(step_done(1))
    assert lines[0].startswith("warning: attention=cpu ")
    assert "flash" in lines[0]


def test_a_step_that_fails_leaves_no_profiler_on() -> None:
    check = KernelCheck("cpu", CPU, print)
    for _ in range(CHECKED_STEP - 1):
        check.before_step(1)
        check.after_step(step_done(1))
    check.before_step(1)
    assert torch.autograd._profiler_enabled()
    check.close()
    assert not torch.autograd._profiler_enabled()
