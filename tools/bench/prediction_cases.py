"""The runs that predictions are compared with: small models on a CPU with gloo, parts of Llama 8B on one
GPU."""

from dataclasses import dataclass

COMMON = ("--data.source=stdlib", "--checkpoint.every=0", "--train.eval_every=0", "--parallel.plan=manual")


@dataclass(frozen=True)
class Case:
    """A run: `model` names its model and global batch. Of cases alike in model and processes, all with
    `choice`, a planner would choose one; `keys` are config keys of train.main."""

    name: str
    model: str
    processes: int
    keys: tuple[str, ...]
    choice: bool = True

    @property
    def sweep(self) -> str:
        return f"{self.model}, {self.processes} processes"


MODELS = {
    "small": (
        "--model.dim=256",
        "--model.n_layers=4",
        "--model.n_heads=4",
        "--model.n_kv_heads=4",
        "--model.ffn_dim=768",
        "--model.vocab_size=2048",
        "--model.max_seq_len=256",
        "--train.seq_len=256",
        "--train.global_batch_size=8",
    ),
    "large": (
        "--model.dim=512",
        "--model.n_layers=4",
        "--model.n_heads=8",
        "--model.n_kv_heads=4",
        "--model.ffn_dim=1536",
        "--model.vocab_size=2048",
        "--model.max_seq_len=256",
        "--train.seq_len=256",
        "--train.global_batch_size=4",
    ),
}
BATCH = {"small": 8, "large": 4}
LLAMA_8B = (
    "--model.dim=4096",
    "--model.n_heads=32",
    "--model.n_kv_heads=8",
    "--model.ffn_dim=14336",
    "--model.vocab_size=128256",
    "--model.max_seq_len=8192",
    "--parallel.param_dtype=bfloat16",
)


def cpu_cases() -> list[Case]:
    """1 to 4 ranks of two models. The small one at 2 ranks is tried with every mix of degrees, with and
    without full checkpointing."""
    sweep = [
        _case("small", degrees, mode)
        for degrees in ((2, 1, 1), (1, 2, 1), (1, 1, 2))
        for mode in ("none", "full")
    ]
    return [
        _case("small", (1, 1, 1), "none"),
        *sweep,
        _case("small", (1, 2, 1), "selective"),
        _case("small", (1, 2, 1), "none", compiled=False),
        _case("small", (2, 2, 1), "none"),
        _case("small", (1, 2, 2), "none"),
        _case("large", (1, 2, 1), "none"),
        _case("large", (1, 2, 1), "full"),
        _case("large", (1, 1, 2), "none"),
        _case("large", (1, 4, 1), "none"),
    ]


def gpu_cases() -> list[Case]:
    """One GPU: blocks of the 8B, more or fewer, sequences of 2048 to 8192, every checkpointing mode, one
    micro batch or several. Whether a device has the memory for them, whoever runs them looks."""
    rows = [
        (4, 8192, 1, 1, "none"),
        (4, 8192, 2, 1, "none"),
        (4, 2048, 4, 1, "none"),
        (4, 8192, 1, 4, "none"),
        (8, 4096, 1, 1, "none"),
        (8, 4096, 2, 1, "selective"),
        (8, 8192, 1, 1, "selective"),
        (8, 8192, 1, 2, "full"),
        (12, 4096, 1, 1, "full"),
        (16, 8192, 1, 1, "full"),
        (16, 2048, 2, 1, "selective"),
        (32, 2048, 1, 1, "full"),
    ]
    return [_gpu_case(*row) for row in rows]


def _case(model: str, degrees: tuple[int, int, int], mode: str, compiled: bool = True) -> Case:
    """`degrees` of dp_replicate, dp_shard, tp; the global batch in one micro batch."""
    replicate, shard, tp = degrees
    keys = (
        f"--parallel.dp_replicate={replicate}",
        f"--parallel.dp_shard={shard}",
        f"--parallel.tp={tp}",
        f"--parallel.activation_checkpoint={mode}",
        f"--parallel.compile.enabled={str(compiled).lower()}",
        f"--train.micro_batch_size={BATCH[model] // (replicate * shard)}",
    )
    name = " ".join([model, f"{replicate}x{shard}x{tp}", mode, *([] if compiled else ["eager"])])
    return Case(name, model, replicate * shard * tp, (*COMMON, *MODELS[model], *keys), compiled)


def _gpu_case(layers: int, seq_len: int, micro_batch_size: int, accumulation: int, mode: str) -> Case:
    keys = (
        f"--model.n_layers={layers}",
        f"--train.seq_len={seq_len}",
        f"--train.micro_batch_size={micro_batch_size}",
        f"--train.global_batch_size={micro_batch_size * accumulation}",
        f"--parallel.activation_checkpoint={mode}",
    )
    name = f"{layers} layers, {accumulation} x {micro_batch_size} x {seq_len}, {mode}"
    return Case(name, f"{layers} layers, {seq_len}", 1, (*COMMON, *LLAMA_8B, *keys), choice=False)
