"""The configuration: one frozen dataclass per section, whose types have the bounds of its numbers, and
the rules between keys."""

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from msgspec import Meta

from meshwright.models.config import LlamaConfig
from meshwright.parallel.config import Auto, Kind, ParallelConfig
from meshwright.parallel.structure import OPTIONAL, Amount, Count, Natural, Positive, Share, convert_fields

Period = Annotated[int, Meta(ge=-1, le=2**63 - 1)]  # steps between events; 0 is never
DecayRate = Annotated[float, Meta(ge=0, lt=1)]
Limit = Annotated[float, Meta(ge=0, le=1e6)]  # seconds or hours; 0 is none


def check_name(key: str, name: str) -> None:
    """Raise ValueError unless a key's value names something in a module, as MODULE:NAME."""
    module, colon, attribute = name.partition(":")
    if not (module and colon and attribute):
        raise ValueError(
            f"{key}={name} must be MODULE:NAME, such as mine:build, with mine.py in this folder or installed"
        )


LIST_SUFFIX = ".urls"  # of a file with a URL a line


def is_remote(source: str) -> bool:
    """Whether a source of data is a URL (SCHEME://) or a list of them."""
    return "://" in source or source.endswith(LIST_SUFFIX)


def check_source(key: str, source: str) -> None:
    """Raise ValueError, without it, for a URL with what may be secret: a config is stored and printed."""
    scheme, _, rest = source.partition("://")
    if rest and ("?" in rest or "#" in rest or ("@" in rest and scheme != "hf")):
        raise ValueError(
            f"{key} is a {scheme}:// URL with a user, a ? or a #, which may be secret: put it into a file "
            f"whose name ends in {LIST_SUFFIX}, one URL a line, and name that file (a pattern can have * but "
            "not ?)"
        )


VerifyMode = Literal["full", "size"]
_HELD_OUT = 0.02


@dataclass(frozen=True)
class CheckpointConfig:
    """When to save, and what to resume from.

    Args:
        every: optimizer steps between checkpoints; the last step and a stop are also saved; -1 saves only
            these, 0 never
        keep: number of newest checkpoints to keep; 0 keeps all
        keep_every: additionally keep every checkpoint whose step is a multiple of this number; 0 is off
        asynchronous: copy the state to host memory and write it in the background; false pauses training
            until the checkpoint is written (so does a CPU run without memory for the copy)
        on_error: when a save fails, stop ends the run as failed after the step, warn prints a warning and
            continues training, and after a last save that failed the run ends as failed too. If a save would
            fail (folder, disk space, dtype of a tensor, on a GPU host memory for the copy), stop reports a
            config error before the first step and warn a warning
        resume: auto resumes from the newest checkpoint of run.dir that passes verification, or starts from
            step 0 if there is none; none starts from step 0, and the path of a checkpoint from there, in a
            run.dir without newer checkpoints of another start. The same command again goes on
        verify: comparison with the manifest before loading: full hashes every byte, size compares file sizes
            only
        init_from: initial weights at step 0: a safetensors file or a folder of them, such as a Hugging Face
            model's; a state_dict of torch.save (alone, or under model or state_dict); or a checkpoint, whose
            optimizer state is not loaded; null is random initialization. Ignored by a run that resumes
        init_strict: refuse init_from unless its names are exactly the model's; false leaves others out, and
            tensors that it does not have keep their random initialization
        changed_model: resume, or take weights, although the saved config is of another model of equal shapes
            (other heads, rope_theta, an argument of the factory ...), which is refused otherwise
    """

    every: Period = -1
    keep: Natural = 2
    keep_every: Natural = 0
    asynchronous: bool = True
    on_error: Literal["stop", "warn"] = "stop"
    resume: str = "auto"
    verify: VerifyMode = "full"
    init_from: str | None = None
    init_strict: bool = True
    changed_model: bool = False


@dataclass(frozen=True)
class DataConfig:
    """Text to train on.

    Args:
        source: stdlib (the source code of this Python's standard library); a file, folder or glob of text
            files (.txt, .md, source code ...: one document per file) or of record files (.jsonl[.gz|.zst],
            .parquet, .arrow: one document per record); a folder written by tools.prepare_data; or a URL of
            such files, in which {000..127} stands for many, or a .urls file with one URL a line
        factory: instead of source: MODULE:FUNCTION, a function of yours that returns the sequences at given
            positions of an endless order (docs/your-training.md); null: source
        mixture: instead of source: source -> mixture weight, its share of the sequences, such as {/data/web:
            0.7, /data/code: 0.3}
        validation: validation sets, name -> source, such as {wiki: /data/wiki.jsonl}: all their documents are
            for evaluation, in addition to the held-out documents
        tokenizer: bytes (every byte is a token, and 256 separates documents), or a tokenizer.json or its
            folder; auto is the tokenizer of prepared data, else bytes
        bos: token before each document: auto (the one that the tokenizer puts in front of a text, if it is
            not eos), none, or a token such as <s>
        eos: token after each document: auto, or a token such as </s>
        text_field: field of a record that contains its text
        skip_bad: number of bad records (invalid JSON or UTF-8, no such field ...) that are left out and
            counted when the run tokenizes text; one more is an error
        eval_fraction: fraction of documents held out for evaluation, chosen by a hash of their names;
            prepared data has its own held-out documents, and a stream none
        packing: true concatenates documents and cuts the stream into sequences; false makes one sequence of
            each document, truncated or padded
        document_mask: with packing, attention does not cross document boundaries, and positions restart in
            each document
        verify: full compares prepared shards with their checksums at first use and after every change; size
            compares only file sizes
        cache_dir: folder for tokenized text; null is ~/.cache/meshwright, or without a home a temporary one
        stream: true reads the training text while the run goes on, a part at a time, in place of tokenizing
            all of it before; so are sources that are URLs (http://, s3://, gs://, hf://) and lists of them
            (.urls)
        lanes: of a stream: number of places at which it is read in turn; auto is the smallest multiple of the
            first run's data-parallel degree that is at least 64. The order of sequences depends on it
        cache_gib: of a stream: size of the tokens that each node keeps in data.cache_dir
        workers: of a stream: processes of each rank that tokenize; auto is all cores but one
        fetch_s: seconds for which a request to a source of URLs may go on failing before the run ends; 0 is
            no limit
        prefetch: number of optimizer steps whose batches the loader prepares ahead
    """

    source: str = "stdlib"
    factory: str | None = None
    mixture: dict[str, Positive] = field(default_factory=dict)
    validation: dict[str, str] = field(default_factory=dict)
    tokenizer: str = "auto"
    bos: str = "auto"
    eos: str = "auto"
    text_field: str = "text"
    skip_bad: Natural = 0
    eval_fraction: Annotated[float, Meta(ge=0, le=0.999)] = _HELD_OUT
    packing: bool = True
    document_mask: bool = False
    verify: VerifyMode = "full"
    cache_dir: str | None = None
    stream: bool = False
    lanes: Count | Auto = "auto"
    cache_gib: Positive = 32.0
    workers: Count | Auto = "auto"
    fetch_s: Limit = 300.0
    prefetch: Count = 2

    @property
    def training_sources(self) -> tuple[str, ...]:
        """The training sources, none for a `factory`."""
        return () if self.factory else tuple(self.mixture) or (self.source,)

    @property
    def streamed(self) -> bool:
        """Whether the training text is read while the run goes on."""
        return self.stream or any(map(is_remote, self.training_sources))

    def __post_init__(self) -> None:
        if not self.source:
            raise ValueError("data.source is empty: name a file, a folder or a glob, or use stdlib")
        if self.factory is not None:
            check_name("data.factory", self.factory)
            if self.mixture or self.source != "stdlib" or self.document_mask:
                raise ValueError(
                    f"data.factory={self.factory} gives whole sequences, in place of data.source, "
                    "data.mixture and data.document_mask: remove these"
                )
        if self.streamed and self.eval_fraction not in (0, _HELD_OUT):
            raise ValueError(
                f"data.eval_fraction={self.eval_fraction}, but a stream holds no documents out: remove it "
                "and use data.validation"
            )
        for name, source in self.validation.items():
            if not (name and source):
                raise ValueError(f"data.validation: {{{name!r}: {source!r}}} needs a name and a source")
            check_source(f"data.validation.{name}", source)
        for source in self.training_sources:
            check_source("data.mixture" if self.mixture else "data.source", source)
        if self.document_mask and not self.packing:
            raise ValueError(
                "data.document_mask needs packing: with data.packing=false every sequence is one document; "
                "remove one of the two keys"
            )


@dataclass(frozen=True)
class TimeoutConfig:
    """Timeouts in seconds: a run that exceeds one ends and reports which rank is behind; 0 is no timeout.

    Args:
        setup_s: from the start to the first step or evaluation (rendezvous, planning, weights), without
            preparing the corpus
        data_s: preparing the corpus; no timeout by default, because its duration grows with the corpus
        first_step_s: the first step of a run, which compiles
        step_s: any other step, including the wait for its data
        evaluation_s: one evaluation
        checkpoint_s: saving one checkpoint
    """

    setup_s: Limit = 1800.0
    data_s: Limit = 0.0
    first_step_s: Limit = 3600.0
    step_s: Limit = 600.0
    evaluation_s: Limit = 3600.0
    checkpoint_s: Limit = 3600.0


@dataclass(frozen=True)
class RunConfig:
    """Folder, seed, device and time limits of a run.

    Args:
        dir: folder of the run; the same command resumes the run in it. null is runs/ plus the config's name,
            or without a config that of the factory's module
        seed: seed of the initial weights and of the data order
        device: auto uses GPUs, and the CPU on a machine without one; or cpu, or cuda. Every local process
            needs its own GPU
        threads: CPU threads per process; 0 divides the cores among the local processes
        max_hours: save and stop after this many hours; 0 is no limit
        expandable_segments: on a GPU, let the allocator's memory segments grow, which avoids fragmentation;
            ignored if PYTORCH_CUDA_ALLOC_CONF or PYTORCH_ALLOC_CONF is set
        grace_s: grace period in seconds: after a signal, a process that has not stopped by then exits without
            saving. torchrun gives its workers 30, or --shutdown-timeout (torch 2.13); Slurm:
            --signal=TERM@180
        timeouts: timeouts in seconds, one for each phase of the run
    """

    dir: str | None = None
    seed: Natural = 0
    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads: Annotated[int, Meta(ge=0, le=4096)] = 0
    expandable_segments: bool = True
    max_hours: Limit = 0.0
    grace_s: Annotated[float, Meta(ge=1, le=1e6)] = 120.0
    timeouts: TimeoutConfig = field(default_factory=TimeoutConfig)


@dataclass(frozen=True)
class TrainConfig:
    """The training loop.

    Args:
        steps: number of optimizer steps
        epochs: instead of steps: passes over the training text (may be a fraction), whatever the global batch
            sizes of the run's starts; counted anew if the data, seq_len or run.seed changes. For a mixture,
            one epoch has as many sequences as all its sources together; 0 uses steps
        seq_len: tokens per sequence
        micro_batch_size: sequences per rank in one forward and backward; auto is global_batch_size divided by
            the data-parallel degree, or 1 if global_batch_size is -1; with parallel.plan=auto the planner
            chooses it, and also the global batch size if that is -1
        global_batch_size: sequences per optimizer step over all ranks; -1 is micro_batch_size x data-parallel
            degree
        grad_clip: maximum global gradient norm; 0 does not clip
        z_loss: weight of the squared log-partition of the logits, which keeps them from drifting (PaLM:
            1e-4); part of the reported training loss, not of evaluations; 0 is off
        max_skipped_steps: number of steps, among 100 in a row, that may be skipped because their loss or
            gradient is not finite; one more saves the state before it and ends the run; 0: the first does
        eval_every: optimizer steps between evaluations on held-out text and data.validation, the first before
            training; a stop ends an evaluation; 0 is never
        eval_sequences: maximum number of sequences per held-out or validation set in an evaluation; 0 is all
        gc_every_steps: optimizer steps between Python garbage collections, on all ranks after the same step;
            0 leaves the timing to Python, which pauses each rank at a different moment
        freeze: fqn patterns of parameters that are not trained, such as tok_embeddings.* or layers.0.*
        loss: MODULE:FUNCTION, a function of yours of logits and targets, which returns the sum of the loss,
            in place of the cross entropy, which evaluations keep (docs/your-training.md); null: ours
        hooks: classes of yours, MODULE:CLASS, for what is to happen beside the steps (docs/your-training.md)
    """

    steps: Count = 1000
    epochs: Amount = 0.0
    seq_len: Count = 1024
    micro_batch_size: Count | Literal["auto"] = "auto"
    global_batch_size: int = -1
    grad_clip: Amount = 1.0
    z_loss: Amount = 0.0
    max_skipped_steps: Natural = 5
    eval_every: Natural = 0
    eval_sequences: Natural = 64
    gc_every_steps: Natural = 50
    freeze: tuple[str, ...] = ()
    loss: str | None = None
    hooks: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.loss is not None:
            check_name("train.loss", self.loss)
            if self.z_loss:
                raise ValueError("train.z_loss is part of the loss that train.loss replaces: remove one")
        for hook in self.hooks:
            check_name("train.hooks", hook)


@dataclass(frozen=True)
class MetricsConfig:
    """What a run reports, and how often.

    Args:
        every: optimizer steps between reports; 0 is never
        tensorboard: write TensorBoard files to run.dir/tb
        gradient_norms: add the gradient norm of each FSDP unit to every report
    """

    every: Natural = 10
    tensorboard: bool = True
    gradient_norms: bool = False


@dataclass(frozen=True)
class MuonConfig:
    """Muon, which orthogonalises the updates of matrices inside blocks (docs/optimizers.md).

    Args:
        momentum: decay rate of the momentum, which is Nesterov's
        newton_schulz_dtype: in which matrices are exchanged and orthogonalised: auto is bfloat16 on a GPU and
            float32 elsewhere
        adjust_lr_fn: factor of the learning rate of a matrix, by torch's names: match_rms_adamw (0.2 x the
            square root of its larger side, so that AdamW's learning rates hold) or original (the square root
            of outputs / inputs, if these are fewer)
        other_lr: peak learning rate of what AdamW updates; null is optim.lr
        per_head: each head of queries, keys and values is a matrix of its own
    """

    momentum: DecayRate = 0.95
    newton_schulz_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    adjust_lr_fn: Literal["match_rms_adamw", "original"] = "match_rms_adamw"
    other_lr: Amount | None = None
    per_head: bool = False


@dataclass(frozen=True)
class GroupConfig:
    """How the parameters of a pattern are updated, instead of as their kind says; null: as it says.

    Args:
        kind: matrix, which Muon orthogonalises; or embedding, head, router, vector or other, which AdamW
            updates
        lr: peak learning rate
        weight_decay: as optim.weight_decay
        parts: of a matrix: sizes along its outputs of those that are stored together
    """

    kind: Kind | None = field(default=None, metadata=OPTIONAL)
    lr: Amount | None = field(default=None, metadata=OPTIONAL)
    weight_decay: Amount | None = field(default=None, metadata=OPTIONAL)
    parts: tuple[Count, ...] = field(default=(), metadata=OPTIONAL)


SCHEDULES = ("constant", "linear", "cosine", "wsd")
OPTIMIZERS = ("adamw", "muon")


@dataclass(frozen=True)
class OptimConfig:
    """An optimizer with decoupled weight decay and a learning-rate schedule.

    Args:
        name: adamw; muon, for matrices inside blocks, with AdamW for all others; or MODULE:FUNCTION, a
            function of yours of parameter groups that returns an optimizer (docs/optimizers.md)
        lr: peak learning rate
        betas: decay rates of the first and second moment
        eps: added to the square root of the second moment; greater than 0
        weight_decay: decoupled weight decay of matrices; norms and embeddings are not decayed
        warmup_steps: optimizer steps of linear warm-up from 0
        schedule: shape after warm-up: constant, linear, cosine, or wsd (warmup-stable-decay: constant, then
            linear); or MODULE:FUNCTION, a function of yours of step and number of steps, whose result times
            lr is the rate of the step, without warm-up (docs/your-training.md)
        min_lr_ratio: final learning rate as a fraction of lr (not for constant)
        decay_ratio: wsd only: fraction of all steps, at the end, in which the learning rate decays
        state_dtype: dtype of the two moments: float32, or bfloat16 with stochastic rounding, which takes half
            the memory
        muon: of name=muon
        groups: pattern of parameters -> kind, lr, weight_decay, parts of these (docs/optimizers.md)
    """

    name: str = "adamw"
    lr: Amount = 3e-4
    betas: tuple[DecayRate, DecayRate] = (0.9, 0.95)
    eps: Positive = 1e-8
    weight_decay: Amount = 0.1
    warmup_steps: Natural = 100
    schedule: str = "cosine"
    min_lr_ratio: Share = 0.1
    decay_ratio: Share = 0.2
    state_dtype: Literal["float32", "bfloat16"] = "float32"
    muon: MuonConfig = field(default_factory=MuonConfig)
    groups: dict[str, GroupConfig] = field(default_factory=dict)

    def __hash__(self) -> int:
        return hash(repr(self))

    def __post_init__(self) -> None:
        if ":" in self.name:
            check_name("optim.name", self.name)
        elif self.name not in OPTIMIZERS:
            raise ValueError(
                f"optim.name={self.name} must be {', '.join(OPTIMIZERS)}, or MODULE:FUNCTION of yours"
            )
        if self.name != "adamw" and self.state_dtype != "float32":
            raise ValueError(
                f"optim.state_dtype={self.state_dtype} is only for optim.name=adamw: use float32"
            )
        own_rates = [self.muon.other_lr, *(group.lr for group in self.groups.values())]
        if self.lr == 0 and any(own_rates):
            raise ValueError("optim.lr=0 leaves no schedule for optim.muon.other_lr and optim.groups: set it")
        if ":" in self.schedule:
            check_name("optim.schedule", self.schedule)
        elif self.schedule not in SCHEDULES:
            raise ValueError(
                f"optim.schedule={self.schedule} must be {', '.join(SCHEDULES)}, or MODULE:FUNCTION of yours"
            )


@dataclass(frozen=True)
class ProfileConfig:
    """Which steps to profile, into run.dir/profile/step-START; python -m tools.trace RUN analyzes them.

    Args:
        start: first optimizer step of the profiled window; 0 is off
        steps: length of the window in optimizer steps
        all_ranks: profile all ranks instead of rank 0 only, to see which rank waits for which
        stacks: record the Python stack of each operator; slows the profiled steps
        memory: on a GPU, write a memory snapshot with allocation stacks at the end of the window, for
            pytorch.org/memory_viz; on a CPU, add allocations to the trace
    """

    start: Natural = 0
    steps: Annotated[int, Meta(ge=1, le=100)] = 3  # a longer trace fills memory and takes minutes to write
    all_ranks: bool = False
    stacks: bool = False
    memory: bool = False


@dataclass(frozen=True)
class FactoryConfig:
    """A model of yours, instead of the shape of our Llama (docs/your-model.md).

    Args:
        factory: MODULE:FUNCTION, a function that returns the model, or the model and an example of its
            arguments. It is called when a command names it, never because a checkpoint does
        args: keyword arguments of the function
        blocks: the modules that become units and are compiled one by one: a pattern of names, or a number of
            parameters (docs/your-model.md); null: found
        units: patterns of modules inside blocks that become units of their own
        unsharded: patterns of parameters that every rank keeps whole
        styles: pattern of modules -> tensor-parallel style (docs/your-model.md); null: what the model
            publishes; {}: none
        init: initial values. constructor: those of the function, called with run.seed as torch's seed, in one
            process of a node at a time. modules: by the modules' own initialisers, unit by unit, compared
            with the function's. auto: what the model publishes, or else constructor below 4 GiB of parameters
    """

    factory: str
    args: dict[str, Any] = field(default_factory=dict)
    blocks: str | None = None
    units: tuple[str, ...] = ()
    unsharded: tuple[str, ...] = ()
    styles: dict[str, str] | None = None
    init: Literal["auto", "constructor", "modules"] = "auto"

    def __hash__(self) -> int:
        return hash(repr(self))

    @property
    def max_seq_len(self) -> int | None:
        """The model's, which only the model itself knows."""
        return None

    @property
    def described(self) -> dict[str, Any]:
        """The options of `describe`."""
        options = {key: getattr(self, key) for key in ("blocks", "units", "unsharded", "styles")}
        if self.blocks and self.blocks.isdigit():
            options["blocks"] = int(self.blocks)
        return options

    @property
    def of_one_block(self) -> "FactoryConfig":
        """The model as it is, whose blocks may differ."""
        return self

    def __post_init__(self) -> None:
        check_name("model.factory", self.factory)


ModelConfig = LlamaConfig | FactoryConfig


@dataclass(frozen=True)
class TrainingJob:
    """The input of planning: the config values that a plan, its memory and its speed depend on. `saves`:
    checkpoints are written, and a run without the memory for it ends."""

    model: ModelConfig
    parallel: ParallelConfig
    seq_len: int
    micro_batch_size: Count | Literal["auto"]
    global_batch_size: int
    freeze: tuple[str, ...]
    document_mask: bool
    z_loss: float
    loss: str | None
    optim: OptimConfig
    saves: bool


@dataclass(frozen=True)
class Config:
    """The complete configuration of a run, one field per section."""

    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig = field(default_factory=LlamaConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    profile: ProfileConfig = field(default_factory=ProfileConfig)

    @property
    def job(self) -> TrainingJob:
        """The part of the config that planning reads."""
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
            loss=train.loss,
            optim=self.optim,
            saves=self.checkpoint.every != 0 and self.checkpoint.on_error == "stop",
        )

    def __post_init__(self) -> None:
        convert_fields(self, "")
        if self.optim.name == "muon" and self.parallel.storage_dtype != "float32":
            raise ValueError(
                f"parallel.storage_dtype={self.parallel.storage_dtype} is not for optim.name=muon, whose "
                "updates would be rounded away: use float32, or adamw, which rounds stochastically"
            )
        if self.train.epochs and (self.data.factory or self.data.streamed):
            raise ValueError(
                "train.epochs needs to know how many sequences there are, which "
                f"{'data.factory' if self.data.factory else 'a stream'} does not say: use train.steps"
            )
        if self.model.max_seq_len and self.train.seq_len > self.model.max_seq_len:
            raise ValueError(
                f"train.seq_len={self.train.seq_len} must not exceed "
                f"model.max_seq_len={self.model.max_seq_len}: reduce the first or raise the second"
            )
