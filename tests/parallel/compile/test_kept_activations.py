"""The memory that compiled modules really keep for the backward equals the planner's reading of the
compiler's graphs."""

import dataclasses
import gc
from collections.abc import Callable, Iterator

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from meshwright.models.config import LlamaConfig
from meshwright.models.llama import Llama
from meshwright.parallel.activation_checkpoint import recompute
from meshwright.parallel.planner.tracing.eager import TracedModule
from meshwright.parallel.planner.tracing.trace import capture_joint, compiled_workload

SEQUENCES, TOKENS = 2, 128
MODEL = LlamaConfig(
    dim=64, n_layers=1, n_heads=4, n_kv_heads=2, ffn_dim=192, vocab_size=512, max_seq_len=TOKENS
)
SAVED = {"none": None, "selective": ("aten.mm",)}


@pytest.fixture(autouse=True)
def _reset_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


def block(mode: str) -> Callable[[int], TracedModule]:
    def build(sequences: int) -> TracedModule:
        module = Llama(MODEL).layers[0]
        if SAVED[mode] is not None:
            recompute(module, SAVED[mode])
        tables = tuple(torch.ones(TOKENS, MODEL.head_dim // 2) for _ in range(2))
        return TracedModule(module, (hidden(sequences), *tables), tables=tables)

    return build


def head(sequences: int) -> TracedModule:
    targets = torch.zeros(sequences, TOKENS, dtype=torch.int64)
    return TracedModule(Llama(MODEL).head, (hidden(sequences), targets))


def hidden(sequences: int) -> torch.Tensor:
    return torch.ones(sequences, TOKENS, MODEL.dim, requires_grad=True).clone()


def kept_bytes(build: Callable[[int], TracedModule]) -> int:
    """Bytes that the compiled module keeps: allocated and not freed by its forward, without its result, plus
    the inputs that its caller keeps for it."""
    subject = build(SEQUENCES)
    subject.module.compile(fullgraph=True)
    first, rest = subject.args[0].detach().requires_grad_(), subject.args[1:]
    subject = dataclasses.replace(subject, args=())

    def forward() -> torch.Tensor:  # on a copy that only the backward can keep
        return subject.module(first.clone(), *rest)

    forward().sum().backward()
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiled:
        result = forward()
    events = profiled.profiler.kineto_results.events()
    allocated = sum(event.nbytes() for event in events if event.name() == "[memory]")
    return (
        allocated
        - result.untyped_storage().nbytes()
        + sum(tensor.nbytes for tensor in rest if not any(tensor is table for table in subject.tables))
    )


@pytest.mark.slow
@pytest.mark.sampled(10)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # from inductor's own imports
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo hides it
@pytest.mark.parametrize(
    "build", [block("none"), block("selective"), head], ids=["none", "selective", "head"]
)
def test_a_compiled_module_keeps_what_its_trace_says(build: Callable[[int], TracedModule]) -> None:
    """The allocator rounds scalars up by a few bytes."""
    expected = compiled_workload(capture_joint(build)).saved_bytes.at(SEQUENCES)
    assert kept_bytes(build) == pytest.approx(expected, abs=64)
