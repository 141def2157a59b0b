"""Rules for single values of a plan: each function gives the mistakes that it finds. `validate` calls them
all."""

import difflib
import math
from collections.abc import Iterable, Iterator, Mapping

from meshwright.parallel.config import CompileConfig
from meshwright.parallel.plan.mistakes import Mistake
from meshwright.parallel.plan.schema import DTYPES, MeshPlan, ModelUnits, Plan, UnitPlan

# What a sharding table may say of a module; parallel/tensor_parallel.py has what each does.
STYLE_NAMES = (
    *("vocab", "sequence", "colwise", "rowwise", "logits", "gathered_logits"),
    *("whole_vocab", "whole_sequence", "whole_colwise", "whole_rowwise", "whole_logits"),
)
SAVING_BACKENDS = ("inductor", "aot_eager_decomp_partition")  # whose partitioner knows a memory budget
USUAL_BACKENDS = (*SAVING_BACKENDS, "aot_eager", "eager")  # known without asking torch, which takes seconds
LEAST_CHUNK_TOKENS = 64  # of the loss


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint at the end of a message, or ""."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f" Did you mean {near[0]}?" if near else ""


def choice_mistakes(field: str, value: str, known: Iterable[str]) -> Iterator[Mistake]:
    """One of a few names."""
    if value not in known:
        yield Mistake(field, f"={value} is not one of {', '.join(known)}")


def dtype_mistakes(field: str, value: str) -> Iterator[Mistake]:
    """A dtype of parameters, gradients or outputs."""
    if value == "float16":
        yield Mistake(
            field,
            "=float16 needs a gradient scaler, which this trainer does not have: "
            "use bfloat16, which has float32's range",
        )
    else:
        yield from choice_mistakes(field, value, DTYPES)


def storage_mistakes(plan: Plan) -> Iterator[Mistake]:
    """Parameters stored in bfloat16 and gathered in float32 would send zeros."""
    if plan.storage_dtype == "bfloat16" and any(unit.param_dtype == "float32" for unit in plan.units):
        yield Mistake(
            "storage_dtype",
            "=bfloat16 with param_dtype=float32 would send and multiply twice the bytes that "
            "there are: use param_dtype=bfloat16",
        )


def kernel_mistakes(plan: Plan, model: ModelUnits) -> Iterator[Mistake]:
    """An attention that the model does not have, and chunks too small or of gathered logits."""
    kernels, chunk = model.attention_kernels, plan.loss_chunk_tokens
    if plan.attention not in kernels:
        hint = nearest(plan.attention, kernels)
        yield Mistake("attention", f"={plan.attention} is not one of {', '.join(kernels)}.{hint}")
    if chunk and chunk < LEAST_CHUNK_TOKENS:
        yield Mistake(
            "loss_chunk_tokens",
            f"={chunk} must be 0 (all at once) or at least {LEAST_CHUNK_TOKENS}: products "
            "of fewer tokens are slow",
        )
    if chunk and "gathered_logits" in plan.tensor.styles.values():
        yield Mistake(
            "loss_chunk_tokens",
            f"={chunk} is for logits that stay split over tp: use 0, or loss_parallel=true",
        )


def async_tp_mistakes(plan: Plan) -> Iterator[Mistake]:
    """Inductor cuts collectives up beside products, and only those that gather or scatter tokens."""
    if not plan.async_tp:
        return
    if plan.mesh.tp == 1:
        yield Mistake("async_tp", "=true, but tp=1 has no collectives: use false, or tp > 1")
    elif not plan.tensor.sequence_parallel:
        yield Mistake(
            "async_tp",
            "=true needs sequence_parallel=true, whose gathers and scatters stand beside products: "
            "an all-reduce cannot be cut up so",
        )
    if not plan.compile.enabled or plan.compile.backend != "inductor":
        yield Mistake(
            "async_tp",
            "=true is done by inductor, and blocks are not compiled by it: use "
            "compile.backend=inductor, or async_tp=false",
        )


def compile_mistakes(config: CompileConfig) -> Iterator[Mistake]:
    """Names that torch does not know, and a mode that the backend does not have."""
    backend, mode = config.backend, config.mode
    if backend not in USUAL_BACKENDS:
        from torch._dynamo import list_backends

        if backend not in (known := list_backends(exclude_tags=())):
            yield Mistake(
                "compile.backend", f"={backend} is no backend of this torch.{nearest(backend, known)}"
            )
            return
    if mode != "default" and backend != "inductor":
        yield Mistake("compile.mode", f"={mode} is for backend inductor, not {backend}: leave it at default")
    elif mode != "default":
        from torch._inductor import list_mode_options

        yield from choice_mistakes("compile.mode", mode, list_mode_options())


def budget_mistakes(unit: UnitPlan, backend: str) -> Iterator[Mistake]:
    """A budget is the compiler's: it needs one, and a share to keep."""
    if not 0 <= (budget := unit.activation_budget) <= 1:
        yield Mistake(
            "units.activation_budget", f"={budget} must lie between 0 (recompute all) and 1 (keep all)"
        )
    if not unit.compiled:
        yield Mistake(
            "units.activation_checkpoint",
            "=budget is the compiler's choice, and compiling is off: use full or selective, or compile",
        )
    elif backend not in SAVING_BACKENDS:
        yield Mistake(
            "units.activation_checkpoint",
            "=budget needs a compile backend that chooses what to keep "
            f"({', '.join(SAVING_BACKENDS)}), not {backend}",
        )


def reshard_mistakes(reshard: bool | int, mesh: MeshPlan) -> Iterator[Mistake]:
    """An int is a smaller group that keeps the parameters together: it must divide dp_shard and be neither
    end of it.

    Beside tp torch mixes such groups up: FSDP2 makes them for one tp rank's shards at a time, where every
    process of the run has to take part, and processes wait for each other for ever
    (tests/distributed/test_torch_faults.py).
    """
    shard, tp = mesh.dp_shard, mesh.tp
    if type(reshard) is not int or min(vars(mesh).values()) < 1:  # a degree below 1 is said already
        return
    if tp > 1:
        yield Mistake(
            "units.reshard_after_forward",
            f"={reshard} with tp={tp} hangs in torch (2.11 and 2.13 do), whose FSDP2 "
            "makes the smaller groups without regard to tp: use true or false",
        )
    elif not 1 < reshard < shard or shard % reshard:
        use = ", ".join(["true", "false", *(str(d) for d in range(2, shard) if shard % d == 0)])
        yield Mistake(
            "units.reshard_after_forward",
            f"={reshard} must divide dp_shard={shard} and be smaller: use {use} (false "
            "is what groups of 1 would be)",
        )


def tensor_mistakes(tp: int, parts: Iterable[str], tokens: int, model: ModelUnits) -> Iterator[Mistake]:
    """Everything that the tp degree must divide, with the degrees that would do. `tokens`: per sequence, or 0
    if they are not shared out."""
    sizes = {key: value for part in parts for key, value in model.tp_divides.get(part, {}).items()}
    if tokens:
        sizes["train.seq_len"] = tokens
    common = math.gcd(*sizes.values())
    valid = ", ".join(str(d) for d in range(1, common + 1) if common % d == 0)
    for key, value in sizes.items():
        if tp <= 1 or value % tp == 0:
            continue
        says = f"={tp} must divide {key}={value}. Use {' or '.join(valid.rsplit(', ', 1))}."
        if key == "model.vocab_size" and 128 % tp == 0:
            says += (
                f" Or pad it to {-(-value // 128) * 128}: ids no text has cost their rows and are soon never "
                "predicted."
            )
        yield Mistake("mesh.tp", says)


def split_styles(table: Mapping[str, str], whole: bool = False, gathered: bool = False) -> dict[str, str]:
    """The styles of one part of a model: split over the tp axis, with its logits `gathered` or not, or left
    `whole`."""
    if whole:
        return {pattern: f"whole_{style}" for pattern, style in table.items() if style != "loss"}
    if gathered:
        names = {pattern: style for pattern, style in table.items() if style != "loss"}
        return {p: "gathered_logits" if style == "logits" else style for p, style in names.items()}
    return dict(table)
