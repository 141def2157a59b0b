"""Parts of a training step alone, on one device: rooflines, attention by kernel, head and loss, the
optimizer.

Every figure is a median after a warm-up, with its spread. A way that this device or torch has not, or that
fails, gives its reason in place of figures. Shapes: B batch, T tokens, D dim, F ffn, V vocabulary.
"""

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from meshwright.models.attention import KERNELS, CausalAttention, within_documents
from meshwright.models.head import LinearCrossEntropySum
from meshwright.models.llama import Llama, init_weights
from meshwright.models.projections import Projection
from meshwright.parallel.memory_breakdown import GIB
from meshwright.tools.bench.calibrate.measure import attention_work, copy_rate
from meshwright.tools.bench.calibrate.worker import kernel_names
from meshwright.tools.bench.gpu.cases import GpuShape
from meshwright.tools.bench.timing import AttentionShape, Timer, Timing, attention_runs, draw, product_runs
from meshwright.train.config import OptimConfig
from meshwright.train.optim.optimizer import build_optimizer

Figures = dict[str, Any]
CHUNKS = (1, 2, 4)  # of the shape's chunk: time and memory against the chunk's size
# Weights and moments -> bytes that an update has to read and write for each parameter: weight and both
# moments twice, gradient.
OPTIMIZERS = {("float32", "float32"): 28, ("float32", "bfloat16"): 20, ("bfloat16", "bfloat16"): 14}


def measure_rooflines(shape: GpuShape, device: torch.device) -> Figures:
    """The products of the model's linear layers for one sequence, forward and both gradients, and a plain
    copy."""
    clock, tokens = Timer(device, shape.budget_s), shape.seq_len
    layers = {
        "wq": (shape.dim, shape.dim),
        "w1": (shape.dim, shape.ffn_dim),
        "w2": (shape.ffn_dim, shape.dim),
        "head": (shape.dim, shape.vocab_size),
    }
    rows = []
    for name, (inputs, outputs) in layers.items():
        timing = clock.timing(product_runs((tokens, inputs, outputs), "bfloat16", device))
        tflop_s = 6 * tokens * inputs * outputs / timing.median_s / 1e12
        rows.append(
            {
                "layer": name,
                "tokens": tokens,
                "inputs": inputs,
                "outputs": outputs,
                "tflop_s": tflop_s,
                **_plain(timing),
            }
        )
    return {"dtype": "bfloat16", "products": rows, "copy_gb_s": copy_rate(clock) / 1e9}


def measure_attention(shape: GpuShape, device: torch.device) -> Figures:
    """One layer's causal attention of one sequence by each kernel, and by what torch picks; with the GPU
    kernels' names. Operations are counted causally, as half of the square."""
    one = AttentionShape(1, shape.heads, shape.kv_heads, shape.dim // shape.heads, shape.seq_len)
    found: Figures = {"shape": str(one), "dtype": "bfloat16"}
    for kernel in ("", *KERNELS):
        devices = KERNELS.get(kernel, (device.type,))
        if device.type in devices:
            found[kernel or "default"] = _or_reason(partial(_time_attention, one, kernel, shape, device))
        else:
            found[kernel] = {"reason": f"runs on {' and '.join(devices)} only"}
    return found


def _time_attention(one: AttentionShape, kernel: str, shape: GpuShape, device: torch.device) -> Figures:
    attention: Callable[..., Tensor] = CausalAttention()
    attention.kernel = kernel  # type: ignore[attr-defined]
    if kernel == "flex":
        attention = _within_one_document(one, device)
    forward_runs, both_runs = attention_runs(
        torch.compile(attention, backend=shape.backend), one, "bfloat16", device
    )
    clock = Timer(device, shape.budget_s)
    forward, both = clock.timing(forward_runs), clock.timing(both_runs)
    flops = attention_work(one)
    backward_s = both.median_s - forward.median_s
    return {
        "forward": _plain(forward),
        "both": _plain(both),
        "forward_tflop_s": flops[0] / forward.median_s / 1e12,
        "backward_tflop_s": flops[1] / backward_s / 1e12,
        "kernels": kernel_names(both_runs[0], device),
    }


def _within_one_document(one: AttentionShape, device: torch.device) -> Callable[..., Tensor]:
    """flex attention with a mask of one document, which is what it is for."""
    attention = CausalAttention()
    documents = within_documents(torch.zeros(one.batch, one.seq, dtype=torch.long, device=device))
    return lambda q, k, v: attention(q, k, v, documents)


def measure_head_and_loss(shape: GpuShape, device: torch.device) -> Figures:
    """Output projection and cross entropy of one sequence, forward and both gradients: all logits at once,
    compiled and not, and in chunks; seconds, their ratio to plain compiled, and on a GPU the peak of memory
    beyond inputs and gradients."""
    ways: dict[str, tuple[int, str]] = {"plain eager": (0, ""), "plain compiled": (0, shape.backend)}
    ways |= {
        f"chunks of {times * shape.loss_chunk_tokens}": (times * shape.loss_chunk_tokens, shape.backend)
        for times in CHUNKS
    }
    found: Figures = {"dtype": "bfloat16", "tokens": shape.seq_len, "vocab_size": shape.vocab_size}
    for name, way in ways.items():
        found[name] = _or_reason(lambda way=way: _time_loss(way[0], way[1], shape, device))  # type: ignore[misc]
    plain = found["plain compiled"].get("median_s")
    for name in ways:
        if plain and "median_s" in found[name]:
            found[name]["over_plain_compiled"] = found[name]["median_s"] / plain
    return found


def _time_loss(chunk_tokens: int, backend: str, shape: GpuShape, device: torch.device) -> Figures:
    output = Projection(shape.dim, shape.vocab_size, bias=False, device=device, dtype=torch.bfloat16)
    loss, h = (
        LinearCrossEntropySum(),
        draw((1, shape.seq_len, shape.dim), "bfloat16", device).requires_grad_(),
    )
    loss.chunk_tokens = chunk_tokens
    targets = torch.randint(0, shape.vocab_size, (1, shape.seq_len), device=device)
    function: Callable[[], Tensor] = lambda: loss(h, output, targets)  # noqa: E731
    function = torch.compile(function, backend=backend) if backend else function

    def run() -> tuple[Tensor, ...]:
        return torch.autograd.grad(function(), (h, output.weight))

    timing = Timer(device, shape.budget_s).timing([run])
    return {**_plain(timing), **_peak_of(run, device)}


def _peak_of(run: Callable[[], tuple[Tensor, ...]], device: torch.device) -> Figures:
    """The most that a run allocates beyond what it returns; nothing on a CPU, which does not count."""
    if device.type != "cuda":
        return {}
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    returned = sum(x.nbytes for x in run())
    return {
        "extra_gib": (torch.cuda.max_memory_allocated() - before - returned) / GIB,
        "gradients_gib": returned / GIB,
    }


def measure_optimizer(shape: GpuShape, device: torch.device) -> Figures:
    """One update of a model with the fewest layers, by dtype of weights and moments: torch's fused AdamW
    where all is float32, else ours. GB/s are of the bytes that have to be read and written."""
    found: Figures = {}
    for (storage, state), parameter_bytes in OPTIMIZERS.items():
        name = f"weights {storage}, moments {state}"
        found[name] = _or_reason(partial(_time_update, storage, state, parameter_bytes, shape, device))
    return found


def _time_update(
    storage: str, state: str, parameter_bytes: int, shape: GpuShape, device: torch.device
) -> Figures:
    model = draw_model(shape, shape.layers[0], storage, device)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer = build_optimizer(model, OptimConfig(state_dtype=state))  # type: ignore[arg-type]
    optimizer.found_inf = torch.zeros((), device=device)  # type: ignore[attr-defined]
    optimizer.grad_scale = torch.ones((), device=device)  # type: ignore[attr-defined]
    timing = Timer(device, shape.budget_s).timing([optimizer.step])
    parameters = sum(p.numel() for p in model.parameters())
    gb_s = parameters * parameter_bytes / timing.median_s / 1e9
    return {
        "class": type(optimizer).__name__,
        "parameters": parameters,
        "gb_s": gb_s,
        **_plain(timing),
        "kernels": kernel_names(optimizer.step, device),
    }


def draw_model(shape: GpuShape, layers: int, dtype: str, device: torch.device) -> Llama:
    """The whole model on one device with random weights of a dtype; RoPE's tables in float32."""
    with torch.device("meta"):
        model = Llama(shape.model(layers))
    for parameter in model.parameters():
        parameter.data = parameter.data.to(getattr(torch, dtype))
    model.to_empty(device=device)
    init_weights(model, seed=0)
    return model


def _plain(timing: Timing) -> Figures:
    return dataclasses.asdict(timing)


def _or_reason(measure: Callable[[], Figures]) -> Figures:
    """Figures, or why there are none: what a device or a library cannot do must not cost the other
    figures."""
    torch.compiler.reset()  # ways that share code would share its limit of recompilations
    try:
        return measure()
    except Exception as error:
        return {"reason": f"{type(error).__name__}: {error}".splitlines()[0][:300]}


PARTS: Mapping[str, Callable[[GpuShape, torch.device], Figures]] = {
    "rooflines": measure_rooflines,
    "attention": measure_attention,
    "head and loss": measure_head_and_loss,
    "optimizer": measure_optimizer,
}
