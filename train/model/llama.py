"""Our Llama as train/ and tools/ use it."""

import dataclasses
from collections.abc import Mapping
from functools import cached_property

import torch
from torch import Tensor, nn

from meshwright.models.cost import forward_flops
from meshwright.models.llama import Llama, LlamaConfig, block_linears, init_weights
from meshwright.models.size import count_parameters
from meshwright.parallel.fsdp import copy_shard
from meshwright.parallel.model.describe import describe
from meshwright.parallel.model.materialize import allocate
from meshwright.parallel.plan.schema import ModelUnits, Plan
from meshwright.parallel.sharded_model import ShardedModel
from meshwright.train.config import TrainingJob
from meshwright.train.data.sequences import Batch
from meshwright.train.model.source import AttentionHeads, LossOf

BLOCKS = "layers."
BLOCK = f"{BLOCKS}0"  # stands for every block


class LlamaSource:
    """A Llama of a shape (`ModelSource`)."""

    logits = "head.output", "head.loss"

    def __init__(self, config: LlamaConfig) -> None:
        self.config = config

    @cached_property
    def units(self) -> ModelUnits:
        return describe(self.new())

    @property
    def parameters(self) -> int:
        return count_parameters(self.config).total

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def max_seq_len(self) -> int:
        return self.config.max_seq_len

    @property
    def linears(self) -> list[tuple[int, int]]:
        blocks = [(inputs, outputs) for outputs, inputs in block_linears(self.config).values()]
        return [*blocks, (self.config.dim, self.config.vocab_size)]

    @property
    def attention(self) -> AttentionHeads:
        return AttentionHeads(self.config.n_heads, self.config.n_kv_heads, self.config.head_dim)

    def tables(self, tokens: int) -> int:
        """Of models.rope: cosines and sines of half of a head's channels."""
        return tokens * self.config.head_dim * torch.float32.itemsize

    def check(self, job: TrainingJob) -> None:
        """Everything can be trained: Config has checked the shape."""

    def new(self, z_loss: float = 0.0) -> Llama:
        with torch.device("meta"):
            model = Llama(self.config)
        model.head.loss.z_loss = z_loss
        return model

    def forward_flops(self, seq_len: int) -> tuple[float, float]:
        return forward_flops(self.config, seq_len)

    def initialise(self, sharded: ShardedModel, seed: int) -> None:
        """As `init_weights`."""
        allocate(sharded)
        assert isinstance(sharded.model, Llama)
        init_weights(sharded.model, seed, copy_shard)

    def loss(self, plan: Plan, z_loss: float) -> LossOf:
        return loss_of_llama

    def texts(self) -> Mapping[str, str]:
        return {}

    def kinds(self, seq_len: int) -> Mapping[str, str]:
        return {name: BLOCK if name.startswith(BLOCKS) else name for name in self.units.modules}

    def compiled(self, module: str, plan: Plan, unit_compiled: bool) -> bool:
        return unit_compiled and module != "tok_embeddings" and plan.compile.backend != "eager"

    @property
    def trace_key(self) -> LlamaConfig:
        """A model of one block, whose tables are inputs of the modules."""
        return dataclasses.replace(self.config, n_layers=1, rope_scaling=None)


def loss_of_llama(model: nn.Module, batch: Batch, divisor: Tensor | None = None) -> Tensor:
    """Return the loss, which our Llama computes itself."""
    loss: Tensor = model(batch.tokens, batch.targets, batch.first, divisor, batch.positions)
    return loss
