"""A model as train/ and tools/ use it: our Llama, or one of yours.

What a model does not publish is observed in a forward of its example on fake tensors, which computes nothing.
Any model may publish, beside what `parallel.shardable` names:

- `config`, with some of the attributes of POSITIONS, HEADS, KV_HEADS and WIDTH;
- `initialise(seed, copy)`: writes all values, those of a parameter by `copy(parameter, value)`, because a
  rank may hold a shard of it;
- `forward_flops(seq_len)`: as `TrainedModel.forward_flops`, without the seconds that observing it takes;
- `table_bytes(tokens)`: the bytes of position tables that a forward computes for all blocks;
- `logits_and_loss`, the names of the modules that compute the logits and the loss, and `set_z_loss(z_loss)`:
  its forward takes (tokens, targets, first, divisor, positions), of a `Batch`, and returns the loss itself,
  in float32, summed over the targets and divided by `divisor`; `config.vocab_size` is its number of ids.
"""

import inspect
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from meshwright.models.loss import IGNORE_INDEX, LogitsLoss
from meshwright.parallel.compile.apply import compile_module
from meshwright.parallel.errors import PlanError, one_line, place_of
from meshwright.parallel.fsdp import copy_shard
from meshwright.parallel.model.attention_cores import position_argument
from meshwright.parallel.model.constructor import construct, construct_on_meta, is_constant, no_parameters
from meshwright.parallel.model.describe import describe
from meshwright.parallel.model.forward import (
    Example,
    call_arguments,
    example_or_tokens,
    one_sequence_per_row,
    run_on_fakes,
)
from meshwright.parallel.model.inputs import tokens_of, with_sizes
from meshwright.parallel.model.materialize import allocate, allocate_on, is_constructed, materialize
from meshwright.parallel.plan.rules import nearest
from meshwright.parallel.plan.schema import ModelUnits, Plan
from meshwright.parallel.sharded_model import ShardedModel
from meshwright.train.config import ModelConfig, TrainingJob
from meshwright.train.data.sequences import Batch
from meshwright.train.errors import ConfigError
from meshwright.train.user_code import find

if TYPE_CHECKING:
    from meshwright.parallel.model.parts import Loss


HF_CONFIG = "hf_config.json"  # in a checkpoint: what transformers needs to build the model
# attributes of a model's `config`: of transformers, and of our Llama
POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len")
HEADS = ("num_attention_heads", "n_heads")
KV_HEADS = ("num_key_value_heads", "n_kv_heads")
WIDTH = ("hidden_size", "dim")
# arguments of a forward that computes a loss too, which is not used: they get the tokens
TARGETS = ("targets", "labels")

# model, micro batch, divisor (None: 1) -> the loss in nats, summed over tokens and divided
LossOf = Callable[[nn.Module, Batch, Tensor | None], Tensor]


@dataclass(frozen=True)
class AttentionHeads:
    """The attention of a block: query heads, key and value heads, and channels of a head."""

    heads: int
    kv_heads: int
    head_dim: int


@cache
def model_of(config: ModelConfig) -> "TrainedModel":
    """Return the model of a config. Raises ConfigError if it cannot be built, and, when its units are asked
    for, PlanError if it cannot be described."""
    return TrainedModel(config)


class TrainedModel:
    """The model that the factory of a config returns, its parameters on the meta device: its description, its
    figures, and how it is built, filled and trained. `example`: arguments of its forward."""

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        made = call_factory(config)
        self.module, self.example = made.module, made.example

    @cached_property
    def units(self) -> ModelUnits:
        """What planning needs."""
        return describe(self.module, self.example, **self.config.described)

    @property
    def parameters(self) -> int:
        """The number of parameters; a tied weight counts once."""
        return sum(parameter.numel() for parameter in self.module.parameters())

    @cached_property
    def vocab_size(self) -> int:
        """The number of token ids."""
        if self.computes_loss:
            published: Any = self.module.config
            return int(published.vocab_size)
        return self.logits_shape()[-1]

    @cache  # noqa: B019 (a model lives as long as the process)
    def logits_shape(self, seq_len: int = 0) -> tuple[int, ...]:
        """Return the shape of the logits of two samples of `seq_len` tokens, 0: as many as the example has.
        Raises ConfigError if they are not those of every token, and PlanError if the model does not run."""
        example = with_sizes(self.example, 2, seq_len)
        result = run_on_fakes(self.module, example, torch.float32)
        shape = tuple(logits_of(result, self.config.factory).shape)
        if shape[:2] != (2, tokens_of(example)):
            raise ConfigError(
                f"model.factory={self.config.factory} gives logits{[*shape]}, but train.main needs those of "
                "all tokens: if they need targets, return these in the example: {'idx': ids, 'targets': ids}"
            )
        return shape

    @property
    def max_seq_len(self) -> int | None:
        """The longest sequence in tokens; None: any."""
        return self._published(POSITIONS)

    def _published(self, names: tuple[str, ...]) -> int | None:
        """Return the first of these attributes of the model's config that is a number."""
        config = getattr(self.module, "config", None)
        return next((value for name in names if isinstance(value := getattr(config, name, None), int)), None)

    @property
    def linears(self) -> list[tuple[int, int]]:
        """Inputs and outputs of each linear layer of a block, and of the head."""
        block = next(name for name in self.units.modules if name in self.units.checkpointed)
        parts = (*self.module.get_submodule(block).modules(), self.module.get_submodule(self.logits[0]))
        found = [(m.in_features, m.out_features) for m in parts if isinstance(m, nn.Linear)]
        # transformers' Conv1D of GPT-2: inputs x outputs
        found += [(m.nx, m.nf) for m in parts if type(m).__name__ == "Conv1D"]  # type: ignore[misc]
        return list(dict.fromkeys(found))

    @property
    def attention(self) -> AttentionHeads | None:
        """The attention of a block; None: unknown."""
        heads, width = self._published(HEADS), self._published(WIDTH)
        if not heads or not width:
            return None
        head_dim = self._published(("head_dim",)) or width // heads
        return AttentionHeads(heads, self._published(KV_HEADS) or heads, head_dim)

    def tables(self, tokens: int) -> int:
        """Return the bytes of position tables for a rank's tokens of a sequence: what the model publishes, or
        its buffers, which it has whatever the tokens."""
        if of_tokens := getattr(self.module, "table_bytes", None):
            return int(of_tokens(tokens))
        return sum(buffer.nbytes for buffer in self.module.buffers())

    @property
    def computes_loss(self) -> bool:
        """Whether the model's forward computes the loss itself; of any other its logits are used."""
        return hasattr(self.module, "logits_and_loss")

    @property
    def gives_logits(self) -> bool:
        """Whether the model takes tokens and gives logits, of which there is a loss."""
        return not self.computes_loss and bool(tokens_of(self.example))

    @property
    def logits(self) -> tuple[str, str]:
        """The modules that compute the logits and the loss."""
        last = list(self.units.modules)[-1]
        names: tuple[str, str] = getattr(self.module, "logits_and_loss", (last, last))
        return names

    def check(self, job: TrainingJob) -> None:
        """Raise ConfigError if the model cannot be trained so by train.main."""
        longest, factory = self.max_seq_len, f"model.factory={self.config.factory}"
        if longest is not None and job.seq_len > longest:
            raise ConfigError(
                f"train.seq_len={job.seq_len} must not exceed the {longest} positions of {factory}: reduce it"
            )
        if self.computes_loss:
            return
        if job.document_mask:
            raise ConfigError(
                f"data.document_mask: {factory} makes its own attention mask, which the documents of a "
                "sequence are not known to: use false"
            )
        if not tokens_of(self.example):
            raise ConfigError(
                f"{factory}: its example has no tokens[samples, tokens] of integers, and train.main has "
                "nothing else: use your own loop (docs/your-model.md)"
            )
        named = self.example.items() if isinstance(self.example, Mapping) else enumerate(self.example)
        given = [value for name, value in named if name not in TARGETS]
        if (count := sum(isinstance(leaf, Tensor) for leaf in tree_leaves(given))) > 1:
            raise ConfigError(
                f"{factory}: its example has {count} tensors beside {' and '.join(TARGETS)}, but train.main "
                "gives only tokens: return an example without the others"
            )
        self.logits_shape()
        try:
            self.logits_shape(job.seq_len if longest is None else 0)
        except PlanError as error:
            raise ConfigError(
                one_line(f"train.seq_len={job.seq_len}: {factory} does not run with it: {error.__cause__!r}")
            ) from error

    def new(self, z_loss: float = 0.0) -> nn.Module:
        """Return the model anew, its parameters on the meta device. `z_loss`: of a model that computes its
        loss itself."""
        module = call_factory(self.config).module
        if self.computes_loss:
            module.set_z_loss(z_loss)  # type: ignore[operator]
        return module

    @cache  # noqa: B019
    def forward_flops(self, seq_len: int) -> tuple[float, float]:
        """Return the operations of a forward per token: of products with weights, and of causal attention."""
        if published := getattr(self.module, "forward_flops", None):
            products, scores = published(seq_len)
            return products, scores
        from meshwright.parallel.planner.tracing.eager import record_call  # late: our Llama needs no planner

        def count(call: Callable[[], Any]) -> dict[str, float]:
            phase, _ = record_call(call, ())
            sums = {"matmul": 0.0, "attention": 0.0}
            for operation in phase.operations:
                sums[operation.kind] = sums.get(operation.kind, 0.0) + operation.flops.fixed
            return sums

        with torch.no_grad():
            sums = run_on_fakes(self.module, with_sizes(self.example, 1, seq_len), around=count)
        return sums["matmul"] / seq_len, sums["attention"] / seq_len

    def unsharded(self, device: torch.device, seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Module:
        """Return the model anew on a device, its parameters in a dtype, in which weights will be loaded: only
        what is no parameter surely has the values of a start (`initialise`). Raises ConfigError."""
        module = construct(self._build, seed) if self._init == "constructor" else self.new()
        for parameter in module.parameters():
            parameter.data = parameter.data.to(dtype)
        if self._init == "constructor":
            return module.to(device)
        allocate_on(module, device, device)
        if self._init == "published":
            with torch.no_grad():
                module.initialise(seed, Tensor.copy_)  # type: ignore[operator]
        elif empty := [name for name, tensor in no_parameters(self.module) if tensor.is_meta]:
            raise ConfigError(
                f"model.factory={self.config.factory}: {empty[0]} has a value only with init=constructor"
            )
        return module

    @property
    def _init(self) -> Literal["published", "constructor", "modules"]:
        """Where initial values are from, on any mesh and in any dtype."""
        if hasattr(self.module, "initialise") and self.config.init == "auto":
            return "published"
        return "constructor" if is_constructed(self.config.init, self.module, self._build) else "modules"

    def _build(self) -> nn.Module:
        return call_factory(self.config, values=True).module

    def initialise(self, sharded: ShardedModel, seed: int, loaded: bool = False) -> None:
        """Allocate the tensors of a sharded model and write initial values, the same on every mesh: as the
        model publishes it, or as `model.init` says. `loaded`: what a checkpoint has will be loaded, so that
        only other buffers and attributes need the values of the start."""
        if (init := self._init) == "published":
            allocate(sharded)
            with torch.no_grad():
                sharded.model.initialise(seed, copy_shard)  # type: ignore[operator]
        elif loaded and is_constant(self._build, self.module):
            allocate(sharded)
        else:
            materialize(sharded, seed, build=self._build, init=init)

    def loss(self, plan: Plan, z_loss: float, name: str | None = None) -> LossOf:
        """Return the loss of training: of a function of yours, with a `name` (`train.loss`); else what the
        model computes, or that of its logits, compiled if the plan says so. Raises ConfigError."""
        if name is not None:
            given = find_loss(name, self.vocab_size)
            return lambda model, batch, divisor: (
                given(self.logits_of_batch(model, batch), batch.targets)
                / (1.0 if divisor is None else divisor)
            )
        if self.computes_loss:
            return loss_of_forward
        loss = LogitsLoss(z_loss)
        if plan.compile.enabled:
            compile_module(loss, plan.compile)
        return LossOfLogits(self.logits_of_batch, loss)

    def logits_of_batch(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the logits[B, t, V] of a batch."""
        if self.computes_loss:
            logits = model(batch.tokens, None, batch.first, None, batch.positions)
            from meshwright.parallel.tensor_parallel import whole_logits  # late: few runs need it

            return whole_logits(model.get_submodule(self.logits[0]), logits)  # type: ignore[arg-type]
        args, kwargs = call_arguments(tree_map_only(Tensor, lambda _: batch.tokens, self.example))
        if batch.positions is not None:
            kwargs[position_argument(model)] = batch.positions.expand_as(batch.tokens)
        with one_sequence_per_row():
            logits_of_model: Tensor = logits_of(model(*args, **kwargs), self.config.factory)
        return logits_of_model


def texts_of(model: nn.Module) -> Mapping[str, str]:
    """Return files about a model that each checkpoint keeps, by name."""
    config: Any = getattr(model, "config", None)
    of_transformers = hasattr(config, "to_json_string") and hasattr(config, "from_dict")
    return {HF_CONFIG: config.to_json_string(use_diff=False)} if of_transformers else {}


def loss_of_forward(model: nn.Module, batch: Batch, divisor: Tensor | None = None) -> Tensor:
    """Return the loss, which the model's forward computes."""
    loss: Tensor = model(batch.tokens, batch.targets, batch.first, divisor, batch.positions)
    return loss


class LossOfLogits(nn.Module):
    """The loss of a model that gives logits: in float32, of the targets of the batch, which are the tokens
    one position later, and divided by the number of targets of the global batch."""

    def __init__(self, logits: Callable[[nn.Module, Batch], Tensor], loss: LogitsLoss) -> None:
        super().__init__()
        self.logits, self.of_logits = logits, loss

    def forward(self, model: nn.Module, batch: Batch, divisor: Tensor | None = None) -> Tensor:
        logits = self.logits(model, batch)
        if divisor is None:
            divisor = torch.ones((), device=logits.device)  # not None, which would compile another graph
        loss: Tensor = self.of_logits(logits, batch.targets, divisor)
        return loss


def find_loss(name: str, vocab_size: int) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the function that `train.loss` names. Raises ConfigError if it is not a sum over the targets
    that count, which the rest of training relies on."""
    function: Callable[[Tensor, Tensor], Tensor] = find("train.loss", name)
    if isinstance(function, nn.Module) and [*function.parameters()]:
        raise ConfigError(
            f"train.loss={name} has parameters, which nothing would train: put them in the model"
        )
    try:
        inspect.signature(function).bind(None, None)
    except TypeError as error:
        raise ConfigError(f"train.loss={name} must be a function of logits and targets: {error}") from error
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 4, vocab_size, generator=generator, requires_grad=True)
    targets = torch.randint(vocab_size, (2, 4), generator=generator)
    once, twice = function(logits, targets), function(torch.cat((logits, logits)), targets.repeat(2, 1))
    nothing = function(logits, torch.full_like(targets, IGNORE_INDEX))
    if not all(isinstance(loss, Tensor) and loss.dim() == 0 for loss in (once, twice, nothing)):
        raise ConfigError(f"train.loss={name} must return a scalar tensor, not {once!r}")
    if not once.requires_grad:
        raise ConfigError(f"train.loss={name} must have a gradient, but returned {once!r}")
    if not torch.allclose(twice, 2 * once, rtol=1e-3) or nothing.item() != 0:
        raise ConfigError(
            f"train.loss={name} must return the sum over the targets that are not {IGNORE_INDEX}: of random "
            f"logits it is {once.item():.6g}, of the same twice {twice.item():.6g}, and without targets "
            f"{nothing.item():.6g}. Training divides it by the targets of the global batch"
        )
    return function


def logits_of(result: Any, factory: str) -> Any:
    """Return the logits[B, T, V] of a model's result: the result, its attribute `logits`, or the first of its
    tensors. Raises ConfigError if they are not three-dimensional."""
    logits = getattr(result, "logits", None)
    if logits is None:
        leaves = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        logits = leaves[0] if leaves else None
    if logits is None or len(logits.shape) != 3:
        what = "no tensor" if logits is None else f"a tensor of shape {tuple(logits.shape)}"
        raise ConfigError(
            f"model.factory={factory}: the model gives {what}, but train.main needs logits[samples, tokens, "
            "ids]: it computes the loss itself, in float32, of targets one position later, and divides it by "
            "the tokens of the global batch, which a loss of the model's own cannot know"
        )
    return logits


RESULT = "a model, or a model and an example of its arguments (a dict or a tuple), and if you like a loss"


@dataclass(frozen=True)
class OwnModel:
    """What a factory returns.

    `example`: arguments of one forward, of which only shapes and dtypes count: tokens, if the factory returns
    the model alone. `loss`: a function of outputs and example, for `check`.
    """

    module: nn.Module
    example: Example
    loss: "Loss | None"


def call_factory(config: ModelConfig, values: bool = False) -> OwnModel:
    """Call the factory. Without `values` parameters are on the meta device, where they take no memory.

    Raises ConfigError if no command has named it, as when a checkpoint does, and if there is no such
    function, it raises anything, or returns something else.
    """
    named = f"model.factory={config.factory}"
    function = find("model.factory", config.factory)
    try:
        call = partial(function, **config.args)
        result = call() if values else construct_on_meta(call)[0]
    except (Exception, SystemExit) as error:
        given = one_line(", ".join(f"{key}={value!r}" for key, value in config.args.items()), 200)
        raise ConfigError(
            one_line(
                f"{named}({given}): {type(error).__name__}: {error}{place_of(error)}: "
                f"{_doubtful(function, config.args, error)}correct the function, or its arguments with "
                "--model.args.KEY=VALUE"
            )
        ) from error
    parts = result if isinstance(result, tuple) else (result,)
    if not (1 <= len(parts) <= 3 and isinstance(parts[0], nn.Module) and _is_example(*parts[1:2])):
        raise ConfigError(f"{named} must return {RESULT}")
    module, example, loss = (*parts, None, None)[:3]
    return OwnModel(module, example_or_tokens(module, example), loss)


def _doubtful(function: Callable[..., Any], args: Mapping[str, Any], error: BaseException) -> str:
    """Return which arguments an error seems to be about: unknown ones, and text where none is expected."""
    known: Mapping[str, inspect.Parameter] = {}
    with suppress(TypeError, ValueError):  # of a builtin
        known = inspect.signature(function).parameters
    found = ""
    for key, value in args.items():
        if key not in known and f"'{key}'" in str(error):
            found += f"there is no model.args.{key}.{nearest(key, known)} "
        elif isinstance(value, str) and isinstance(error, TypeError) and "str" not in str(known.get(key)):
            found += f"model.args.{key}={value!r} is text: "
    return found


def _is_example(value: object = None) -> bool:
    return isinstance(value, Mapping | tuple | list | None)
