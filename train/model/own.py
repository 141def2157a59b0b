"""A model of yours, built by a function, as train/ and tools/ use it."""

import hashlib
import importlib.metadata
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from meshwright.models.loss import LogitsLoss
from meshwright.parallel.compile.apply import compile_module
from meshwright.parallel.model.attention_cores import position_argument
from meshwright.parallel.model.describe import Example, call_arguments, describe, run_on_fakes
from meshwright.parallel.model.inputs import (
    Recorded,
    TensorSpec,
    kind_of,
    record_calls,
    tokens_of,
    with_sizes,
)
from meshwright.parallel.model.materialize import materialize
from meshwright.parallel.plan.schema import ModelUnits, Plan
from meshwright.parallel.planner.tracing.eager import record_call
from meshwright.parallel.sharded_model import ShardedModel
from meshwright.train.config import FactoryConfig, TrainingJob
from meshwright.train.data.sequences import Batch
from meshwright.train.errors import ConfigError
from meshwright.train.model.factory import call_factory
from meshwright.train.model.source import AttentionHeads, LossOf

HF_CONFIG = "hf_config.json"  # in a checkpoint: what transformers needs to build the model
EXAMPLE_TOKENS = 16
LONGEST = ("max_position_embeddings", "n_positions")  # of a transformers config


class OwnSource:
    """A model that `model.factory` builds (`ModelSource`)."""

    def __init__(self, config: FactoryConfig) -> None:
        self.config = config
        made = call_factory(config)
        self.module = made.module
        ids = torch.zeros(2, EXAMPLE_TOKENS, dtype=torch.int64, device="meta")
        name = getattr(self.module, "main_input_name", None)  # of a transformers model
        self.example: Example = made.example or ({name: ids} if name else (ids,))

    @cached_property
    def units(self) -> ModelUnits:
        blocks = self.config.blocks
        return describe(
            self.module, self.example, blocks=int(blocks) if blocks and blocks.isdigit() else blocks
        )

    @property
    def parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.module.parameters())

    @cached_property
    def vocab_size(self) -> int:
        return logits_of(self.recorded(2).results, self.config.factory).shape[-1]

    @property
    def max_seq_len(self) -> int | None:
        config = getattr(self.module, "config", None)
        return next((value for key in LONGEST if isinstance(value := getattr(config, key, None), int)), None)

    @property
    def linears(self) -> list[tuple[int, int]]:
        block = next(name for name in self.units.modules if name in self.units.checkpointed)
        parts = (*self.module.get_submodule(block).modules(), self.module.get_submodule(self.logits[0]))
        found = [(m.in_features, m.out_features) for m in parts if isinstance(m, nn.Linear)]
        # transformers' Conv1D of GPT-2: inputs x outputs
        found += [(m.nx, m.nf) for m in parts if type(m).__name__ == "Conv1D"]  # type: ignore[misc]
        return list(dict.fromkeys(found))

    @property
    def attention(self) -> AttentionHeads | None:
        config = getattr(self.module, "config", None)
        heads, width = getattr(config, "num_attention_heads", None), getattr(config, "hidden_size", None)
        if not heads or not width:
            return None
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        return AttentionHeads(heads, kv_heads, getattr(config, "head_dim", None) or width // heads)

    def tables(self, tokens: int) -> int:
        """Of the module, which has them whatever the tokens."""
        return sum(buffer.nbytes for buffer in self.module.buffers())

    @property
    def logits(self) -> tuple[str, str]:
        last = list(self.units.modules)[-1]
        return last, last

    def check(self, job: TrainingJob) -> None:
        longest, factory = self.max_seq_len, f"model.factory={self.config.factory}"
        if job.document_mask:
            raise ConfigError(
                f"data.document_mask: {factory} makes its own attention mask, which the documents of a "
                "sequence are not known to: use false"
            )
        if longest is not None and job.seq_len > longest:
            raise ConfigError(
                f"train.seq_len={job.seq_len} must not exceed the {longest} positions of {factory}: reduce it"
            )
        if not tokens_of(self.example):
            raise ConfigError(
                f"{factory}: its example has no tokens[samples, tokens] of integers, and train.main has "
                "nothing else: use your own loop (docs/your-model.md)"
            )
        others = [leaf for leaf in tree_leaves(self.example) if isinstance(leaf, Tensor)]
        if len(others) > 1:
            raise ConfigError(
                f"{factory}: its example has {len(others)} tensors, but train.main gives only tokens: "
                "return an example without the others"
            )
        logits_of(self.recorded(2).results, self.config.factory)

    def new(self, z_loss: float = 0.0) -> nn.Module:
        return call_factory(self.config).module

    @cache  # noqa: B019 (a source lives as long as the process)
    def forward_flops(self, seq_len: int) -> tuple[float, float]:
        def count(call: Callable[[], Any]) -> dict[str, float]:
            phase, _ = record_call(call, ())
            sums = {"matmul": 0.0, "attention": 0.0}
            for operation in phase.operations:
                sums[operation.kind] = sums.get(operation.kind, 0.0) + operation.flops.fixed
            return sums

        with torch.no_grad():
            sums = run_on_fakes(self.module, with_sizes(self.example, 1, seq_len), around=count)
        return sums["matmul"] / seq_len, sums["attention"] / seq_len

    def initialise(self, sharded: ShardedModel, seed: int) -> None:
        """By the modules' own initialisers."""
        materialize(sharded, seed)

    def loss(self, plan: Plan, z_loss: float) -> LossOf:
        loss = LogitsLoss(z_loss)
        if plan.compile.enabled:
            compile_module(loss, plan.compile)
        return OwnLoss(self.example, self.config.factory, loss)

    def texts(self) -> Mapping[str, str]:
        config = getattr(self.module, "config", None)
        to_json = getattr(config, "to_json_string", None)
        return {HF_CONFIG: to_json(use_diff=False)} if to_json else {}

    @cache  # noqa: B019
    def kinds(self, seq_len: int) -> Mapping[str, str]:
        calls, first = self.recorded(2, seq_len).calls, dict[tuple[object, ...], str]()
        return {
            name: first.setdefault(kind_of(self.module.get_submodule(name), calls.get(name)), name)
            for name in self.units.modules
        }

    def compiled(self, module: str, plan: Plan, unit_compiled: bool) -> bool:
        """Blocks are compiled, and the loss with the product before it."""
        return (unit_compiled and module in self.units.compiled) or (
            plan.compile.enabled and module == self.logits[0] and self.gives_logits
        )

    @cache  # noqa: B019
    def recorded(self, sequences: int, seq_len: int = 0, dtype: str = "float32") -> Recorded:
        """Return the calls of the units' modules with parameters of `dtype`; `seq_len` 0: the example's."""
        example = with_sizes(self.example, sequences, seq_len)
        return record_calls(self.module, example, self.units.modules, getattr(torch, dtype))

    @property
    def gives_logits(self) -> bool:
        """Whether the model takes tokens and gives logits, of which there is a loss."""
        return bool(tokens_of(self.example))

    @cached_property
    def trace_key(self) -> tuple[str, str]:
        return repr(self.config), code_of(self.module)


class OwnLoss(nn.Module):
    """The loss of a model that gives logits: in float32, of the targets of the batch, which are the tokens
    one position later, and divided by the number of targets of the global batch."""

    def __init__(self, example: Example, factory: str, loss: LogitsLoss) -> None:
        super().__init__()
        self.example, self.factory, self.of_logits = example, factory, loss

    def forward(self, model: nn.Module, batch: Batch, divisor: Tensor | None = None) -> Tensor:
        args, kwargs = call_arguments(tree_map_only(Tensor, lambda _: batch.tokens, self.example))
        if batch.positions is not None:
            kwargs[position_argument(model)] = batch.positions.expand_as(batch.tokens)
        logits = logits_of(model(*args, **kwargs), self.factory)
        if divisor is None:
            divisor = torch.ones((), device=logits.device)  # not None, which would compile another graph
        loss: Tensor = self.of_logits(logits, batch.targets, divisor)
        return loss


def logits_of(result: Any, factory: str) -> Any:
    """Return the logits[B, T, V] of a model's result: the result, its attribute `logits`, or the first of its
    tensors. Raises ConfigError if they are not three-dimensional."""
    logits = getattr(result, "logits", None)
    if logits is None:
        leaves = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor | TensorSpec)]
        logits = leaves[0] if leaves else None
    if logits is None or len(logits.shape) != 3:
        what = "no tensor" if logits is None else f"a tensor of shape {tuple(logits.shape)}"
        raise ConfigError(
            f"model.factory={factory}: the model gives {what}, but train.main needs logits[samples, tokens, "
            "ids]: it computes the loss itself, in float32, of targets one position later, and divides it by "
            "the tokens of the global batch, which a loss of the model's own cannot know"
        )
    return logits


def code_of(model: nn.Module) -> str:
    """Return a hash of the code of a model: versions of installed packages that its classes are from, and the
    contents of all other modules that are loaded from their folders, without packages that are installed in
    one, as in its .venv."""
    digest, folders = hashlib.sha256(), set[Path]()
    for kind in sorted({type(module) for module in model.modules()}, key=repr):
        top = kind.__module__.partition(".")[0]
        file = getattr(sys.modules.get(kind.__module__), "__file__", None)
        try:
            digest.update(f"{kind} {importlib.metadata.version(top)}".encode())
        except importlib.metadata.PackageNotFoundError:
            folders |= {Path(file).parent} if file else set()
    loaded: Sequence[Any] = list(sys.modules.values())
    files = {Path(file) for module in loaded if (file := getattr(module, "__file__", None))}
    own = (path for path in files if folders & set(path.parents) and "site-packages" not in path.parts)
    for path in sorted(path for path in own if path.suffix == ".py" and path.is_file()):  # some are made up
        digest.update(path.read_bytes())
    return digest.hexdigest()
