"""What train/ and tools/ ask of a model, whether our Llama or one of yours."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn

from meshwright.parallel.plan.schema import ModelUnits, Plan
from meshwright.parallel.sharded_model import ShardedModel
from meshwright.train.config import TrainingJob
from meshwright.train.data.sequences import Batch

# model, micro batch, divisor (None: 1) -> the loss in nats, summed over tokens and divided
LossOf = Callable[[nn.Module, Batch, Tensor | None], Tensor]


@dataclass(frozen=True)
class AttentionHeads:
    """The attention of a block: query heads, key and value heads, and channels of a head."""

    heads: int
    kv_heads: int
    head_dim: int


class ModelSource(Protocol):
    """A model: its description, its figures, and how it is built, filled, trained and traced."""

    @property
    def units(self) -> ModelUnits:
        """What planning needs."""

    @property
    def parameters(self) -> int:
        """The number of parameters; a tied weight counts once."""

    @property
    def vocab_size(self) -> int:
        """The number of token ids."""

    @property
    def max_seq_len(self) -> int | None:
        """The longest sequence in tokens; None: any."""

    @property
    def linears(self) -> list[tuple[int, int]]:
        """Inputs and outputs of each linear layer of a block, and of the head."""

    @property
    def attention(self) -> AttentionHeads | None:
        """The attention of a block; None: unknown."""

    def tables(self, tokens: int) -> int:
        """Return the bytes of buffers and position tables for a rank's tokens of a sequence."""

    @property
    def logits(self) -> tuple[str, str]:
        """The modules that compute the logits and the loss."""

    def check(self, job: TrainingJob) -> None:
        """Raise ConfigError if the model cannot be trained so by train.main."""

    def new(self, z_loss: float = 0.0) -> nn.Module:
        """Return the model on the meta device. `z_loss`: of a model that computes its loss itself."""

    def forward_flops(self, seq_len: int) -> tuple[float, float]:
        """Return the operations of a forward per token: of products with weights, and of causal attention."""

    def initialise(self, sharded: ShardedModel, seed: int) -> None:
        """Allocate the tensors of a sharded model and write initial values, the same on every mesh."""

    def loss(self, plan: Plan, z_loss: float) -> LossOf:
        """Return the loss of training, compiled if the plan says so."""

    def texts(self) -> Mapping[str, str]:
        """Return files about the model that each checkpoint keeps, by name."""

    def kinds(self, seq_len: int) -> Mapping[str, str]:
        """Return for each module the one that is traced for it, because it computes the same."""

    def compiled(self, module: str, plan: Plan, unit_compiled: bool) -> bool:
        """Whether a module is traced as compiled."""

    @property
    def trace_key(self) -> Any:
        """What stands for the model's shape and code in a TraceCase, by its repr."""
