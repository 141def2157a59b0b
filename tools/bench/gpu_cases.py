"""The cases of `bench gpu`, the most important first."""

from collections.abc import Iterator
from dataclasses import dataclass

from meshwright.tools.bench.gpu_curves import Curves
from meshwright.tools.bench.gpu_shapes import TENSORWISE, EndToEnd, GpuShape

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
class Case:
    """One thing to measure, under a name of its own, `repeats` times: an end-to-end run, a profiled run, a
    part, a peer, or the losses of two runs."""

    name: str
    work: EndToEnd | PeerRun | Curves | str
    profiled: bool = False
    repeats: int = 1


def make_cases(shape: GpuShape) -> list[Case]:
    """All of them in order, no name twice."""
    cases: dict[str, Case] = {}
    for case in _in_order(shape):
        cases.setdefault(case.name, case)
    return list(cases.values())


def _in_order(shape: GpuShape) -> Iterator[Case]:
    """First what the whole model does and what its peers do; then each part; then the other depths."""
    few, some, half, all_layers = shape.layers
    whole, recomputed = (EndToEnd(all_layers, 1, 1, mode, *BF16) for mode in ("none", "full"))
    eight, eight_fp32 = (EndToEnd(some, 1, 1, "none", *dtypes) for dtypes in (BF16, FP32))
    yield Case("rooflines", "rooflines")
    yield _run(whole, 3)
    yield _run(EndToEnd(all_layers, 1, 1, "none", *BF16, TENSORWISE), 3)
    yield _run(EndToEnd(all_layers, 4, 1, "none", *BF16), 3)
    yield _run(eight, 3)
    yield _run(EndToEnd(some, 1, 1, "none", *BF16, TENSORWISE), 3)
    yield _peer("plain compiled", eight)
    yield _peer(TORCHTITAN, whole, "selective")
    yield _run(recomputed, 3)
    yield Case(f"kernels: {whole.name}", whole, profiled=True)
    yield from (Case(part, part) for part in PARTS)
    yield _peer("plain compiled", recomputed)
    yield _run(eight_fp32, 3)
    yield from (_peer(name, eight_fp32) for name in (ACCELERATE, TORCHTITAN))
    yield _peer("plain eager", eight)
    yield Case(f"kernels: {eight.name}", eight, profiled=True)
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
    yield Case(curves.name, curves)


def _peer(name: str, rival: EndToEnd, checkpoint: str = "") -> Case:
    """As its rival recomputes, unless the peer has a way of its own."""
    work = PeerRun(name, rival.layers, checkpoint or rival.checkpoint, rival)
    return Case(work.name, work)


def _run(work: EndToEnd, repeats: int = 1) -> Case:
    return Case(work.name, work, repeats=repeats)
