"""The attention and loss kernels of a plan: which are refused, the default on each device, and their time and
memory in the planner."""

import pytest
import torch

from meshwright.models.attention import KERNELS
from meshwright.parallel.errors import PlanError
from meshwright.parallel.memory_breakdown import GIB
from meshwright.parallel.plan.make import LOSS_CHUNK_TOKENS
from meshwright.parallel.plan.serialize import plan_to_yaml
from meshwright.parallel.planner.cost_model import step_times
from meshwright.parallel.planner.hardware import load_hardware
from meshwright.parallel.planner.memory_model import predict_step_memory
from meshwright.train.config_parser import parse_config
from meshwright.train.planning.predict import predict_memory, run_workload
from meshwright.train.planning.resolve import attention_on_device, best_attention, check_attention, plan_run
from tests.support.plans import fullest, plan_of
from tests.support.simulated import simulated
from tests.support.worlds import run_ranks

LLAMA_8B = [
    "--config=llama_8b",
    "--model.n_layers=1",
    "--parallel.param_dtype=bfloat16",
    "--train.seq_len=8192",
    "--train.micro_batch_size=1",
    "--train.global_batch_size=-1",
]
NARROW = ["--model.dim=256", "--model.n_heads=4", "--model.n_kv_heads=4", "--model.ffn_dim=512"]
GPU, CPU = torch.device("cuda"), torch.device("cpu")


def head_of(*arguments: str, world_size: int = 8):
    """Return the head's workload, and the memory of the step."""
    config = parse_config([*LLAMA_8B, *arguments])
    plan = plan_run(config.job, world_size)
    work = run_workload(config.job, plan)
    return work.modules["head"], predict_step_memory(plan, work)


def predict_peak_bytes(arguments: list[str]) -> int:
    config = parse_config(arguments)
    return predict_memory(config.job, plan_run(config.job, 8)).peak_bytes


def test_long_micro_batches_get_a_chunked_loss_unless_logits_are_gathered() -> None:
    assert plan_of(seq_len=LOSS_CHUNK_TOKENS, micro=1).loss_chunk_tokens == 0
    assert plan_of(seq_len=LOSS_CHUNK_TOKENS, micro=2).loss_chunk_tokens == LOSS_CHUNK_TOKENS
    assert plan_of(seq_len=LOSS_CHUNK_TOKENS, micro=2, loss_chunk_tokens=0).loss_chunk_tokens == 0
    assert plan_of(seq_len=4 * LOSS_CHUNK_TOKENS, tp=2, loss_parallel=False).loss_chunk_tokens == 0
    unsplit_head = plan_of(
        seq_len=4 * LOSS_CHUNK_TOKENS, tp=2, loss_parallel=False, tp_modules=("attention",)
    )
    assert unsplit_head.loss_chunk_tokens == LOSS_CHUNK_TOKENS


ABLE = {  # kernels by documents kept apart, device and dtype
    (False, "cpu", "bfloat16"): {"cpu", "math", "flash"},
    (False, "cuda", "bfloat16"): {"math", "flash", "efficient", "cudnn"},
    (True, "cpu", "bfloat16"): {"cpu"},
    (True, "cuda", "bfloat16"): {"flex"},
    (False, "cuda", "float32"): {"math", "efficient"},
}


@pytest.mark.parametrize(("apart", "device_type", "dtype"), ABLE)
def test_a_kernel_runs_where_it_can_and_is_refused_elsewhere(apart, device_type, dtype) -> None:
    for kernel in KERNELS:
        keys = [f"--parallel.attention={kernel}", f"--data.document_mask={str(apart).lower()}"]
        config = parse_config([*keys, f"--parallel.param_dtype={dtype}"])
        plan = plan_run(config.job, 1)
        if kernel in ABLE[apart, device_type, dtype]:
            check_attention(config.job, plan, device_type)
        else:
            message = rf"parallel.attention={kernel} .* a {device_type} device.* use auto"
            with pytest.raises(PlanError, match=message):
                check_attention(config.job, plan, device_type)


def test_auto_in_float32_is_a_kernel_that_runs_on_every_gpu() -> None:
    config, apart = parse_config([]), parse_config(["--data.document_mask=true"])
    assert config.parallel.param_dtype == "float32"
    for kind in load_hardware().values():
        if not kind.cores:
            assert (best_attention(config.job, kind), best_attention(apart.job, kind)) == (
                "efficient",
                "flex",
            )
            check_attention(config.job, plan_run(config.job, 1, 1, best_attention(config.job, kind)), "cuda")
    assert attention_on_device(config.job, GPU, "NVIDIA H200") == "efficient"


def test_a_plan_file_for_another_kind_of_device_says_where_it_is_wrong(tmp_path) -> None:
    plan_file = tmp_path / "plan.yaml"
    plan_file.write_text(plan_to_yaml(plan_run(parse_config([]).job, 1)))
    config = parse_config([f"--parallel.plan={plan_file}"])
    with pytest.raises(
        PlanError,
        match=rf"attention=cpu of {plan_file} .* a cuda device .*: use math, efficient.* tools.plan --gpu",
    ):
        check_attention(config.job, plan_run(config.job, 1), "cuda")


def test_auto_is_cudnn_on_hopper_flash_before_flex_for_documents_and_ours_on_a_cpu() -> None:
    config = parse_config(["--parallel.param_dtype=bfloat16"])
    apart = parse_config(["--data.document_mask=true"])
    kinds = load_hardware()
    names = ("h100-sxm", "h200", "a100-80gb", "cpu")
    assert [best_attention(config.job, kinds[name]) for name in names] == ["cudnn", "cudnn", "flash", "cpu"]
    assert [best_attention(apart.job, kinds[name]) for name in ("h200", "cpu")] == ["flex", "cpu"]
    assert (
        attention_on_device(config.job, CPU, "CPU (no GPU)")
        == attention_on_device(apart.job, CPU, "CPU")
        == "cpu"
    )
    assert attention_on_device(config.job, GPU, "NVIDIA H200") == "cudnn"
    assert attention_on_device(apart.job, GPU, "NVIDIA H200") == "flex"
    assert plan_run(config.job, 2, 2, "cudnn").attention == "cudnn"
    assert plan_run(parse_config(["--parallel.attention=math"]).job, 2, 2, "cudnn").attention == "math"


@pytest.mark.slow
@pytest.mark.sampled(6)
def test_the_head_of_an_8b_never_needs_more_than_a_chunk_of_logits() -> None:
    """8,192 tokens, vocabulary of 128,256: at most 1.2 GiB more than the gradients that every head needs."""
    gradients = 128_256 * 4096 * 2 + 8192 * 4096 * 2
    chunked, chunked_memory = head_of()
    unchunked, unchunked_memory = head_of("--parallel.loss_chunk_tokens=0")
    chunk_gib = 2048 * 128_256 * 2 / GIB
    extra_gib = (fullest(chunked.forward, 1) - gradients) / GIB
    assert chunk_gib < extra_gib < chunk_gib + 0.3 < 1.2
    assert fullest(unchunked.forward, 1) / GIB > 4 * chunk_gib
    assert chunked_memory.memory.logits < unchunked_memory.memory.logits / 3
    assert sum(o.flops.at(1) for o in chunked.forward.operations) == pytest.approx(
        3 * 2 * 8192 * 4096 * 128_256
    )
    # The backward only hands on the gradient of the output's weight, and moves what the norm needs.
    output_bytes = 128_256 * 4096 * 2
    handed_on = [b for b in chunked.buffers if b.role == "weight_grad" and b.begin < 0 < b.end]
    assert [b.size.at(1) for b in handed_on] == [output_bytes]
    assert sum(o.bytes.at(1) for o in chunked.backward.operations) < output_bytes / 4
    eager, _ = head_of("--parallel.compile.enabled=false")
    assert "multiply_unless_one_kernel" not in {o.name for o in eager.backward.operations}
    # A second sequence adds chunks of the same size.
    assert fullest(chunked.forward, 2) - fullest(chunked.forward, 1) < 0.3 * GIB


@pytest.mark.parametrize("tp", [pytest.param(1, marks=[pytest.mark.slow, pytest.mark.sampled(8)]), 2])
def test_the_simulated_head_holds_what_is_predicted(tp) -> None:
    """Compare the eager code on fake tensors with the planner's prediction."""
    arguments = [*LLAMA_8B, *NARROW, f"--parallel.tp={tp}", "--parallel.compile.enabled=false"]
    simulation = simulated(8, *arguments)
    assert simulation.at_peak.logits > simulation.peak_bytes / 2, "the peak is in the head"
    # in a separate process, because tensors that pytest keeps alive would count
    (predicted,) = run_ranks(1, predict_peak_bytes, arguments)
    assert predicted == pytest.approx(simulation.peak_bytes, rel=0.005)
    of_head = [c for c in simulation.collectives if (c.unit, c.axis) == ("head", "tp")]
    forward = [c for c in of_head if (c.phase, c.op) == ("forward", "all_reduce")]
    assert [c.bytes for c in forward] == [2048 * 4, 2 * 2048 * 4] * 4 * (tp == 2)


@pytest.mark.sampled(3, day=0)
def test_attention_takes_its_kernels_time() -> None:
    config = parse_config(LLAMA_8B)
    hardware = load_hardware()["h200"]
    seconds = {}
    for kernel in ("cudnn", "flash"):
        plan = plan_run(config.job, 8, 8, kernel)
        times = step_times(plan, run_workload(config.job, plan), hardware, 8)
        seconds[kernel] = times.modules["layers.0"].forward.compute_s
    shares = [hardware.attention[kernel]["bfloat16"][0] for kernel in ("flash", "cudnn")]
    peak_s = 8192**2 * 4096 * 2 / (hardware.peak_tflops["bfloat16"] * 1e12)
    difference_s = peak_s / shares[0] - peak_s / shares[1]
    assert seconds["flash"] - seconds["cudnn"] == pytest.approx(difference_s, rel=0.05)
