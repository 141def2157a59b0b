"""The cases of `bench gpu`, the most important first: Llama 8B's shape with fewer or all of its layers, a
tiny one that shows that the suite works, and pairs of runs on the same data whose losses are compared."""

import dataclasses
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.models.llama import LlamaConfig
from meshwright.tools.bench.train_run import read_rows
from meshwright.tools.processes import make_environment, python_command, run_to_end

COMMON = (
    "--data.source=stdlib",
    "--checkpoint.every=0",
    "--train.eval_every=0",
    "--metrics.tensorboard=false",
    "--parallel.plan=manual",
    "--parallel.param_dtype=bfloat16",
)
STEPS_PER_REPORT = 2  # a report waits for the GPU
STEPS = 10  # 4 to warm up, then three reports of 2


@dataclass(frozen=True)
class GpuShape:
    """A model's width and its depths, from few layers to all; and how plain peers are compiled."""

    name: str
    dim: int
    heads: int
    kv_heads: int
    ffn_dim: int
    vocab_size: int
    seq_len: int
    layers: tuple[int, int, int, int]
    backend: str
    loss_chunk_tokens: int
    float8_min_dim: int
    budget_s: float

    def model(self, layers: int) -> LlamaConfig:
        """The model with so many layers."""
        return LlamaConfig(
            self.dim, layers, self.heads, self.kv_heads, self.ffn_dim, self.vocab_size, self.seq_len
        )


# Llama 3 8B (arXiv 2407.21783, table 3); chunks of 2,048 tokens keep the head's products at full speed.
LLAMA_8B = GpuShape("8b", 4096, 32, 8, 14336, 128256, 8192, (4, 8, 16, 32), "inductor", 2048, 1024, 1.0)
TINY = GpuShape("tiny", 32, 4, 2, 64, 264, 64, (1, 1, 1, 2), "aot_eager", 16, 16, 0.02)
SHAPES = {shape.name: shape for shape in (LLAMA_8B, TINY)}
TENSORWISE = "float8 tensorwise"
# What is switched on beside the rest of a run, by its name.
VARIANTS = {
    "": (),
    TENSORWISE: ("--parallel.float8.recipe=tensorwise",),
    "float8 rowwise": ("--parallel.float8.recipe=rowwise",),
    "joined projections": ("--parallel.fused_projections=true",),
    "half recomputed": ("--parallel.activation_checkpoint_blocks={half}",),
}


@dataclass(frozen=True)
class EndToEnd:
    """A run of train.main: an optimizer step is `accumulation` x `micro_batch` sequences. `storage`: dtype of
    the parameters that are kept; `state`: of the optimizer's moments; `variant`: one of VARIANTS. Computation
    is in bfloat16."""

    layers: int
    accumulation: int
    micro_batch: int
    checkpoint: str
    storage: str
    state: str
    variant: str = ""

    @property
    def name(self) -> str:
        short = {"float32": "fp32", "bfloat16": "bf16"}
        batch = f"{self.accumulation} x {self.micro_batch}"
        more = f", {self.variant}" if self.variant else ""
        dtypes = f"weights {short[self.storage]}, moments {short[self.state]}"
        return f"{self.layers} layers, {batch}, {self.checkpoint}, {dtypes}{more}"

    def keys(self, shape: GpuShape) -> list[str]:
        """Config keys of train.main."""
        more = [key.format(half=max(1, self.layers // 2)) for key in VARIANTS[self.variant]]
        return [
            *COMMON,
            *model_keys(shape, self.layers),
            f"--train.micro_batch_size={self.micro_batch}",
            f"--train.global_batch_size={self.micro_batch * self.accumulation}",
            f"--parallel.activation_checkpoint={self.checkpoint}",
            f"--parallel.storage_dtype={self.storage}",
            f"--optim.state_dtype={self.state}",
            f"--parallel.compile.backend={shape.backend}",
            f"--parallel.float8.min_dim={shape.float8_min_dim}",
            *more,
            f"--train.steps={STEPS}",
        ]


def model_keys(shape: GpuShape, layers: int) -> Sequence[str]:
    """Config keys of the model and its sequences."""
    return (
        f"--model.dim={shape.dim}",
        f"--model.n_layers={layers}",
        f"--model.n_heads={shape.heads}",
        f"--model.n_kv_heads={shape.kv_heads}",
        f"--model.ffn_dim={shape.ffn_dim}",
        f"--model.vocab_size={shape.vocab_size}",
        f"--model.max_seq_len={shape.seq_len}",
        f"--train.seq_len={shape.seq_len}",
    )


WINDOW = 50  # steps whose losses are averaged: single batches differ more than the runs do


@dataclasses.dataclass(frozen=True)
class Curves:
    """A run, and the run beside it, for so many steps."""

    run: EndToEnd
    beside: EndToEnd
    steps: int

    @property
    def name(self) -> str:
        return f"losses of {self.steps} steps: {self.run.variant} beside none, {self.run.layers} layers"


def measure_curves(
    folder: Path, work: Curves, shape: GpuShape, keys: Sequence[str], threads: int, look: Callable[[], None]
) -> dict[str, Any]:
    """Both runs, one after the other. Raises BenchError if one fails."""
    losses = {}
    for name, run in (("run", work.run), ("beside", work.beside)):
        out = folder / name
        arguments = [
            *run.keys(shape),
            f"--train.steps={work.steps}",
            "--metrics.every=1",
            f"--run.threads={threads}",
            f"--run.dir={out}",
            *keys,
        ]
        run_to_end(
            [*python_command("meshwright.train.main", 1, folder / f"{name}-logs"), *arguments],
            make_environment(threads, {}),
            folder / f"{name}.log",
            look,
        )
        losses[name] = [row["loss"] for row in read_rows(out / "metrics.jsonl")]
    return compare_losses(losses["run"], losses["beside"])


def compare_losses(run: Sequence[float], beside: Sequence[float]) -> dict[str, Any]:
    """Nats: the largest difference between the means of WINDOW steps, that of the last ones, and both ends of
    the curves."""
    differences = [abs(a - b) for a, b in zip(_means(run), _means(beside), strict=True)]
    return {
        "steps": len(run),
        "first": [run[0], beside[0]],
        "last_mean": [_means(run)[-1], _means(beside)[-1]],
        "largest_difference": max(differences),
        "last_difference": differences[-1],
        "largest_of_a_step": max(abs(a - b) for a, b in zip(run, beside, strict=True)),
    }


def _means(losses: Sequence[float]) -> list[float]:
    """Of WINDOW neighbours, or of all if they are fewer."""
    window = min(WINDOW, len(losses))
    return [statistics.fmean(losses[i : i + window]) for i in range(len(losses) - window + 1)]


PARTS = ("rooflines", "attention", "head and loss", "optimizer")
ACCELERATE, TORCHTITAN = "transformers with accelerate", "torchtitan"
PLAIN_PEERS = ("plain eager", "plain compiled")
CURVE_STEPS = 500
BF16, FP32 = ("bfloat16", "bfloat16"), ("float32", "float32")


@dataclass(frozen=True)
class PeerRun:
    """Another trainer on the same model, one sequence a step, and the run of ours to compare it with."""

    peer: str
    layers: int
    checkpoint: str
    rival: EndToEnd

    @property
    def name(self) -> str:
        return f"{self.peer}: {self.layers} layers, {self.checkpoint}"


@dataclass(frozen=True)
class GpuCase:
    """One thing to measure, under a name of its own, `repeats` times: an end-to-end run, a profiled run, a
    part, a peer, or the losses of two runs."""

    name: str
    work: EndToEnd | PeerRun | Curves | str
    profiled: bool = False
    repeats: int = 1


def make_cases(shape: GpuShape) -> list[GpuCase]:
    """All of them in order, no name twice."""
    cases: dict[str, GpuCase] = {}
    for case in _in_order(shape):
        cases.setdefault(case.name, case)
    return list(cases.values())


def _in_order(shape: GpuShape) -> Iterator[GpuCase]:
    """First what the whole model does and what its peers do; then each part; then the other depths."""
    few, some, half, all_layers = shape.layers
    whole, recomputed = (EndToEnd(all_layers, 1, 1, mode, *BF16) for mode in ("none", "full"))
    eight, eight_fp32 = (EndToEnd(some, 1, 1, "none", *dtypes) for dtypes in (BF16, FP32))
    yield GpuCase("rooflines", "rooflines")
    yield _run(whole, 3)
    yield _run(EndToEnd(all_layers, 1, 1, "none", *BF16, TENSORWISE), 3)
    yield _run(EndToEnd(all_layers, 4, 1, "none", *BF16), 3)
    yield _run(eight, 3)
    yield _run(EndToEnd(some, 1, 1, "none", *BF16, TENSORWISE), 3)
    yield _peer("plain compiled", eight)
    yield _peer(TORCHTITAN, whole, "selective")
    yield _run(recomputed, 3)
    yield GpuCase(f"kernels: {whole.name}", whole, profiled=True)
    yield from (GpuCase(part, part) for part in PARTS)
    yield _peer("plain compiled", recomputed)
    yield _run(eight_fp32, 3)
    yield from (_peer(name, eight_fp32) for name in (ACCELERATE, TORCHTITAN))
    yield _peer("plain eager", eight)
    yield GpuCase(f"kernels: {eight.name}", eight, profiled=True)
    for layers in (half, few):
        yield from (_run(EndToEnd(layers, 1, 1, "none", *BF16, variant), 3) for variant in ("", TENSORWISE))
    yield from (
        _run(EndToEnd(some, 1, 1, "none", *BF16, variant))
        for variant in ("float8 rowwise", "joined projections")
    )
    yield from (
        _run(EndToEnd(all_layers, 1, 1, *way))
        for way in (
            ("offload", *BF16),
            ("full", *BF16, "half recomputed"),
            ("none", *BF16, "joined projections"),
        )
    )
    yield _run(EndToEnd(all_layers, 1, 1, "selective", *BF16))
    yield _run(EndToEnd(all_layers, 1, 1, "none", "float32", "bfloat16"))
    yield _run(EndToEnd(all_layers, 1, 2, "full", *BF16))
    for layers, micro_batch, checkpoint, dtypes in (
        (half, 1, "none", BF16),
        (half, 1, "none", FP32),
        (half, 2, "none", BF16),
        (half, 1, "full", FP32),
        (some, 2, "none", FP32),
        (some, 2, "none", BF16),
        (some, 4, "full", FP32),
        (some, 1, "selective", FP32),
        (few, 1, "none", FP32),
        (few, 4, "none", FP32),
        (few, 8, "full", FP32),
        (few, 1, "none", BF16),
    ):
        yield _run(EndToEnd(layers, 1, micro_batch, checkpoint, *dtypes))
    plain, float8 = (EndToEnd(few, 1, 1, "none", *FP32, variant) for variant in ("", TENSORWISE))
    curves = Curves(float8, plain, CURVE_STEPS)
    yield GpuCase(curves.name, curves)


def _peer(name: str, rival: EndToEnd, checkpoint: str = "") -> GpuCase:
    """As its rival recomputes, unless the peer has a way of its own."""
    work = PeerRun(name, rival.layers, checkpoint or rival.checkpoint, rival)
    return GpuCase(work.name, work)


def _run(work: EndToEnd, repeats: int = 1) -> GpuCase:
    return GpuCase(work.name, work, repeats=repeats)
