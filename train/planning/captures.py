"""Keeps what was traced: a trace takes seconds and depends only on its case, the code and torch.

Captures of the shapes in configs/ come with the package (`benchmarks.captures` makes them), those of others
are in a folder of the user.
"""

import contextlib
import hashlib
import lzma
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import msgspec
import torch

from meshwright.models.config import LlamaConfig
from meshwright.parallel.plan.schema import ContextPlan
from meshwright.parallel.planner.workload import ModuleWorkload
from meshwright.train.config import ModelConfig
from meshwright.train.files import write_atomically

SHIPPED = Path(__file__).parents[2] / "configs" / "captures"
# code that a trace depends on
TRACED_CODE = (
    *("models/**/*.py", "parallel/**/*.py", "train/model/*.py"),
    *("train/planning/trace_*.py", "train/planning/captures.py"),
)


@dataclass(frozen=True)
class TraceCase:
    """Everything that the workload of a module on one rank depends on, and nothing else that a search varies.

    `model`: of one block if all are alike; `code`: a hash of that of the model; `module`: of `kinds`;
    `styles`: as in TensorPlan; `frozen`: names of its parameters that are not trained; `float8`: patterns of
    the linears that multiply in float8; `on_cuda`: run eagerly by the kernels of CUDA; the other fields are
    those of Plan and UnitPlan. `sequences`: 1, or 2 for every larger micro batch, and if not compiled.
    `seq_len`, `cp`: of a module without attention's cores the tokens of a rank, and 1.
    """

    model: ModelConfig
    code: str
    module: str
    sequences: int
    seq_len: int
    tp: int
    sequence_parallel: bool
    styles: tuple[tuple[str, str], ...]
    dtype: str
    compiled: bool
    activation_checkpoint: str
    saved_ops: tuple[str, ...]
    activation_budget: float
    attention: str
    on_cuda: bool
    loss_chunk_tokens: int
    fused_projections: bool
    frozen: tuple[str, ...]
    document_mask: bool
    float8: tuple[str, ...]
    cp: int
    context: ContextPlan


def remember(folder: Path | None, case: TraceCase, trace: Callable[[], ModuleWorkload]) -> ModuleWorkload:
    """Return the workload of a case as the package or `folder` has it, or trace it and write it to `folder`.
    A file there that cannot be read or written is ignored."""
    if (work := find_capture(folder, case)) is None:
        work = trace()
        with contextlib.suppress(OSError, ValueError):  # ValueError: not a valid path
            if folder:
                folder.mkdir(parents=True, exist_ok=True)
                write_atomically(_path(folder, case), msgspec.json.encode(work))
    return work


def find_capture(folder: Path | None, case: TraceCase) -> ModuleWorkload | None:
    """Return the workload of a case as the package or `folder` has it; None if neither does."""
    content: bytes | msgspec.Raw | None = _shipped(case.model).get(shipped_key(case))
    with contextlib.suppress(OSError, ValueError):
        if folder:
            content = content or _path(folder, case).read_bytes()
        return msgspec.json.decode(content, type=ModuleWorkload) if content else None
    return None


def _path(folder: Path, case: TraceCase) -> Path:
    """Return the file of a case in the user's folder: of this code and this torch alone."""
    key = hashlib.sha256(f"{case!r} {torch.__version__} {_digest_of_code()}".encode()).hexdigest()
    return folder / f"work-{key[:32]}.json"


@cache
def _digest_of_code() -> str:
    """Return a hash of the code that is traced and of the code that traces it."""
    root, digest = Path(__file__).parents[2], hashlib.sha256()
    for pattern in TRACED_CODE:
        for path in sorted(root.glob(pattern)):
            digest.update(path.read_bytes())
    return digest.hexdigest()


def shipped_path(model: ModelConfig) -> Path:
    """Return the file of the captures of a Llama's shape, of this torch version up to its patches: compressed
    JSON, `shipped_key` of the case -> workload. A test checks that our code still traces the same."""
    assert isinstance(model, LlamaConfig), "only our own model's code is known"
    version = ".".join(torch.__version__.split(".")[:2])
    sizes = model.dim, model.n_heads, model.n_kv_heads, model.ffn_dim, model.vocab_size
    name = "-".join(map(str, ("llama", *sizes, *["tied"] * model.tie_embeddings)))
    return SHIPPED / f"torch-{version}" / f"{name}.json.xz"


def shipped_key(case: TraceCase) -> str:
    """Return the key of a case among those of its shape: all of it but the code."""
    return hashlib.sha256(repr(replace(case, code="")).encode()).hexdigest()[:16]


@cache
def _shipped(model: ModelConfig) -> Mapping[str, msgspec.Raw]:
    """Return the captures of a model that come with the package, none of them decoded. A file that cannot be
    read is ignored, as one of the user's."""
    if isinstance(model, LlamaConfig):
        with contextlib.suppress(OSError, ValueError, lzma.LZMAError):
            packed = shipped_path(model).read_bytes()
            return msgspec.json.decode(lzma.decompress(packed), type=dict[str, msgspec.Raw])
    return {}
