"""The configuration: one frozen dataclass per section, with the bounds of its numbers. Dataclasses only."""

import dataclasses
import math
import sys
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, Literal

from meshwright.models.llama import LlamaConfig
from meshwright.parallel.config import ParallelConfig


def bounded(default: float, low: float, high: float = math.inf) -> Any:
    """A dataclass field with a default, whose value must lie between `low` and `high`, both included."""
    return field(default=default, metadata={"bounds": (low, high)})


def check_bounds(section: str, config: Any) -> None:
    """ValueError that names key, value and bounds if a bounded field of a config section, or of one in it,
    lies outside."""
    for item in fields(config):
        low, high = item.metadata.get("bounds", (None, None))
        value = getattr(config, item.name)
        if is_dataclass(value):
            check_bounds(f"{section}.{item.name}", value)
        elif low is not None and not (low <= value <= min(high, sys.float_info.max)):
            rule = f"be a number of at least {low}" if high == math.inf else f"lie between {low} and {high}"
            raise ValueError(f"{section}.{item.name}={value} must {rule}")


VerifyMode = Literal["full", "size"]


@dataclass(frozen=True)
class CheckpointConfig:
    """When to save and where to go on.

    Args:
        every: optimizer steps between checkpoints; the last step and a stop are saved too; 0 is never
        keep: how many of the newest checkpoints stay; 0 keeps all
        keep_every: checkpoints of steps that this number divides stay for good; 0 is none
        asynchronous: write beside the training, from a copy in host memory; false lets the training wait (as
            a CPU without room for the copy does anyway)
        on_error: what a failed save does: stop ends the run as failed after the step; warn says so and trains
            on. Too little host memory for the copy, which GPUs take before the first step, is an error of the
            config, or likewise a warning
        resume: auto goes on from the newest checkpoint of run.dir that verifies, or starts if there is none;
            none starts anew; or the path of a checkpoint
        verify: what is compared with the manifest before a tensor is used: full hashes every byte; size only
            the files' sizes
        init_from: weights to start with at step 0: folder of a Hugging Face Llama (config.json,
            *.safetensors), or a checkpoint, of which the optimizer's state is left; null draws random ones. A
            run that resumes does not read them
    """

    every: int = bounded(0, low=0)
    keep: int = bounded(2, low=0)
    keep_every: int = bounded(0, low=0)
    asynchronous: bool = True
    on_error: Literal["stop", "warn"] = "stop"
    resume: str = "auto"
    verify: VerifyMode = "full"
    init_from: str | None = None


@dataclass(frozen=True)
class DataConfig:
    """Text to train on.

    Args:
        source: stdlib (the source code of this Python's standard library); a file, folder or glob of text
            (.txt, .md, source
            code ...: one document each) or of records (.jsonl[.gz|.zst], .parquet, .arrow: a document each);
                or a folder
            that tools.prepare_data has written
        mixture: instead of source: name of a source -> its share of the sequences, as in {/data/web: 0.7,
            /data/code: 0.3}
        validation: name -> source, each evaluated whole besides what is held out, as in {wiki:
            /data/wiki.jsonl}
        tokenizer: bytes (every byte is a token, and 256 separates documents), or a tokenizer.json or the
            folder it lies in; auto is the one that prepared data was made with, else bytes
        bos: token in front of each document: auto (as the tokenizer's own files say), none, or a token such
            as <s>
        eos: token after each document: auto, or a token such as </s>
        text_field: field of a record that holds its text
        eval_fraction: share of documents kept for evaluation, chosen by a hash of their names; prepared data
            has its own
        packing: true puts documents one after another and cuts the stream into sequences; false gives every
            document a sequence of its own, clipped or padded
        document_mask: with packing, attention does not cross documents, and positions begin anew in each
        verify: full compares prepared shards with their checksums once, and again when they have changed;
            size only their sizes
        cache_dir: folder of tokenised text; null is ~/.cache/meshwright
        prefetch: how many optimizer steps of batches the loader prepares ahead
    """

    source: str = "stdlib"
    mixture: dict[str, float] = field(default_factory=dict)
    validation: dict[str, str] = field(default_factory=dict)
    tokenizer: str = "auto"
    bos: str = "auto"
    eos: str = "auto"
    text_field: str = "text"
    eval_fraction: float = bounded(0.02, low=0, high=0.999)
    packing: bool = True
    document_mask: bool = False
    verify: VerifyMode = "full"
    cache_dir: str | None = None
    prefetch: int = bounded(2, low=1)

    def __post_init__(self) -> None:
        if not self.source:
            raise ValueError("data.source is empty: name a file, a folder or a glob, or use stdlib")
        for source, weight in self.mixture.items():
            if not 0 < weight < float("inf"):
                raise ValueError(
                    f"data.mixture: {source} has the weight {weight}, which must be greater than 0"
                )
        if self.document_mask and not self.packing:
            raise ValueError(
                "data.document_mask is for packed sequences: with data.packing=false each has one document "
                "anyway"
            )


@dataclass(frozen=True)
class TimeoutConfig:
    """Seconds after which a run counts as stuck, ends, and says which rank is behind; 0: never.

    Args:
        setup_s: from the start to the first step or evaluation: joining, planning, weights, but not preparing
            the corpus
        data_s: preparing the corpus, which takes as long as it is large: never by default
        first_step_s: the first step of a run, which compiles
        step_s: any other step, with its share of loading data
        evaluation_s: one evaluation
        checkpoint_s: saving one checkpoint
    """

    setup_s: float = bounded(1800.0, low=0, high=1e6)
    data_s: float = bounded(0.0, low=0, high=1e6)
    first_step_s: float = bounded(3600.0, low=0, high=1e6)
    step_s: float = bounded(600.0, low=0, high=1e6)
    evaluation_s: float = bounded(3600.0, low=0, high=1e6)
    checkpoint_s: float = bounded(3600.0, low=0, high=1e6)


@dataclass(frozen=True)
class RunConfig:
    """Where a run lives and how long.

    Args:
        dir: folder of the run, in which the same command goes on where it stopped. null: runs/ plus the
            config's name
        seed: seed of the initial weights and of the order of the data
        device: auto takes the GPU where every local process has one, else the CPU; or cpu, or cuda
        threads: CPU threads per process; 0 shares the cores among the local processes
        max_hours: stop after this many hours, saving first; 0 is never
        expandable_segments: on a GPU, let segments of allocated memory grow instead of leaving gaps between
            them; without effect where PYTORCH_CUDA_ALLOC_CONF or PYTORCH_ALLOC_CONF is set
        grace_s: seconds a stop may take after a signal, before the process ends without saving; torchrun
            allows its workers 30, or what --shutdown-timeout (torch 2.13) says. Slurm: --signal=TERM@180
        timeouts: after which a section of the run counts as stuck
    """

    dir: str | None = None
    seed: int = bounded(0, low=0, high=2**63 - 1)
    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads: int = bounded(0, low=0, high=4096)
    expandable_segments: bool = True
    max_hours: float = bounded(0.0, low=0, high=1e6)
    grace_s: float = bounded(120.0, low=1, high=1e6)
    timeouts: TimeoutConfig = field(default_factory=TimeoutConfig)


@dataclass(frozen=True)
class TrainConfig:
    """The training loop.

    Args:
        steps: optimizer steps
        epochs: instead of steps: passes over the training text (may be a fraction); of a mixture, as many
            sequences as its sources have together; 0 means steps counts
        seq_len: tokens per sequence
        micro_batch_size: sequences per rank in one forward and backward; auto is a rank's whole share of
            global_batch_size, or 1 where that is -1; under parallel.plan=auto the planner chooses it, and
            with it the global batch where that is -1
        global_batch_size: sequences per optimizer step over all ranks; -1 is micro_batch_size x data-parallel
            degree
        grad_clip: largest global gradient norm; 0 does not clip
        z_loss: weight of the squared log-partition of the logits, which keeps them from drifting (PaLM:
            1e-4); counted in the reported loss, but not in evaluations; 0 is none
        max_skipped_steps: steps that may go without an update because their loss or gradient is not finite,
            before the run stops; 0 stops at the first
        eval_every: optimizer steps between evaluations on held-out text and data.validation, the first before
            training; 0 is never
        eval_sequences: sequences of each held-out or validation set in one evaluation, at most; 0 is all
        gc_every_steps: optimizer steps between collections of Python's cyclic garbage, on all ranks after the
            same step; 0 leaves it to Python, which stops a rank whenever it likes
        freeze: fqn patterns of parameters that are not trained, such as tok_embeddings.* or layers.0.*
    """

    steps: int = bounded(1000, low=1)
    epochs: float = bounded(0.0, low=0)
    seq_len: int = bounded(1024, low=1)
    micro_batch_size: int | Literal["auto"] = "auto"
    global_batch_size: int = -1
    grad_clip: float = bounded(1.0, low=0)
    z_loss: float = bounded(0.0, low=0)
    max_skipped_steps: int = bounded(5, low=0)
    eval_every: int = bounded(0, low=0)
    eval_sequences: int = bounded(64, low=0)
    gc_every_steps: int = bounded(50, low=0)
    freeze: tuple[str, ...] = ()


@dataclass(frozen=True)
class MetricsConfig:
    """How often a run reports.

    Args:
        every: optimizer steps between reports; 0 is never
        tensorboard: write TensorBoard files into run.dir/tb
        gradient_norms: at every report, the norm of each FSDP unit's gradient
    """

    every: int = bounded(10, low=0)
    tensorboard: bool = True
    gradient_norms: bool = False


@dataclass(frozen=True)
class OptimConfig:
    """AdamW with decoupled weight decay and a learning-rate schedule.

    Args:
        lr: peak learning rate
        betas: decay rates of the first and second moment
        eps: added to the square root of the second moment; greater than 0
        weight_decay: decoupled decay, of matrices only: norms and embeddings have none
        warmup_steps: optimizer steps of linear warm-up from 0
        schedule: shape after warm-up: constant, linear, cosine, or wsd (warmup-stable-decay: constant, then
            linear)
        min_lr_ratio: learning rate at the end, as a share of lr (not for constant)
        decay_ratio: wsd only: share of all steps, at the end, that decays
        state_dtype: of the two moments: float32, or bfloat16, rounded stochastically, which takes half the
            memory
    """

    lr: float = bounded(3e-4, low=0)
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = bounded(1e-8, low=0)
    weight_decay: float = bounded(0.1, low=0)
    warmup_steps: int = bounded(100, low=0)
    schedule: Literal["constant", "linear", "cosine", "wsd"] = "cosine"
    min_lr_ratio: float = bounded(0.1, low=0, high=1)
    decay_ratio: float = bounded(0.2, low=0, high=1)
    state_dtype: Literal["float32", "bfloat16"] = "float32"

    def __post_init__(self) -> None:
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"optim.betas={list(self.betas)} must both lie in [0, 1)")
        if self.eps == 0:
            raise ValueError(
                "optim.eps=0 must be greater than 0: a weight without a gradient so far would become 0/0"
            )


@dataclass(frozen=True)
class ProfileConfig:
    """Which steps to profile, into run.dir/profile/step-START, which python -m tools.trace RUN explains.

    Args:
        start: first optimizer step of the profiled window; 0 is never
        steps: length of the window, in optimizer steps
        all_ranks: profile every rank, not only the first: shows who waits for whom
        stacks: note where in Python each operator was called; slows the profiled steps
        memory: on a GPU, a snapshot of its memory at the end of the window, with what allocated it, for
            pytorch.org/memory_viz; on a CPU, allocations in the trace
    """

    start: int = bounded(0, low=0)
    steps: int = bounded(3, low=1, high=100)  # a trace of more fills memory, and takes minutes to write
    all_ranks: bool = False
    stacks: bool = False
    memory: bool = False


@dataclass(frozen=True)
class TrainingJob:
    """What a plan, its memory and its speed depend on: all that planning knows of a run.

    Args:
        model: its shape
        parallel: what is asked of the parallelisation
        seq_len: tokens per sequence
        micro_batch_size, global_batch_size: as in TrainConfig
        freeze: fqn patterns of parameters that are not trained
        document_mask: attention does not cross documents
        z_loss: weight of the squared log-partition of the logits
        state_dtype: of the optimizer's two moments
    """

    model: LlamaConfig
    parallel: ParallelConfig
    seq_len: int
    micro_batch_size: int | str
    global_batch_size: int
    freeze: tuple[str, ...]
    document_mask: bool
    z_loss: float
    state_dtype: Literal["float32", "bfloat16"]


@dataclass(frozen=True)
class Config:
    """Everything that describes a run. Each section documents its keys where they are used."""

    run: RunConfig = field(default_factory=RunConfig)
    model: LlamaConfig = field(default_factory=LlamaConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    profile: ProfileConfig = field(default_factory=ProfileConfig)

    @property
    def job(self) -> TrainingJob:
        """The part that is planned."""
        train = self.train
        return TrainingJob(
            model=self.model,
            parallel=self.parallel,
            seq_len=train.seq_len,
            micro_batch_size=train.micro_batch_size,
            global_batch_size=train.global_batch_size,
            freeze=train.freeze,
            document_mask=self.data.document_mask,
            z_loss=train.z_loss,
            state_dtype=self.optim.state_dtype,
        )

    def __post_init__(self) -> None:
        for section in dataclasses.fields(self):
            check_bounds(section.name, getattr(self, section.name))
        if self.train.seq_len > self.model.max_seq_len:
            raise ValueError(
                f"train.seq_len={self.train.seq_len} must not exceed "
                f"model.max_seq_len={self.model.max_seq_len}"
            )
