"""Rules that a plan must keep, whether its values come from config keys or from a plan file.

Each function returns the mistakes it finds, as sentences that name rule, value, place and way out.
"""

import difflib
import math
from collections.abc import Iterable, Mapping

from meshwright.parallel.config import CompileConfig
from meshwright.parallel.plan.schema import DTYPES, ModelUnits, Plan

# What a sharding table may say of a module; parallel/tensor_parallel.py has what each does.
STYLE_NAMES = (
    *("vocab", "sequence", "colwise", "rowwise", "logits", "gathered_logits"),
    *("whole_vocab", "whole_sequence", "whole_colwise", "whole_rowwise", "whole_logits"),
)


def async_tp_mistakes(plan: Plan, place: str) -> list[str]:
    """Inductor cuts collectives up beside products, and only those that gather or scatter tokens."""
    mistakes = []
    if plan.mesh.tp == 1:
        mistakes.append(f"{place}async_tp=true, but tp=1 has no collectives: use false, or tp > 1")
    elif not plan.tensor.sequence_parallel:
        mistakes.append(
            f"{place}async_tp=true needs sequence_parallel=true, whose gathers and scatters stand beside "
            "products: an all-reduce cannot be cut up so"
        )
    if not plan.compile.enabled or plan.compile.backend != "inductor":
        mistakes.append(
            f"{place}async_tp=true is done by inductor, and blocks are not compiled by it: use "
            "compile.backend=inductor, or async_tp=false"
        )
    return mistakes


SAVING_BACKENDS = ("inductor", "aot_eager_decomp_partition")  # whose partitioner knows a memory budget


def budget_mistakes(budget: float, compiled: bool, backend: str, place: str) -> list[str]:
    """A budget is the compiler's: it needs one, and a share to keep."""
    mistakes = []
    if not 0 <= budget <= 1:
        mistakes.append(
            f"{place}activation_budget={budget} must lie between 0 (recompute all) and 1 (keep all)"
        )
    if not compiled:
        mistakes.append(
            f"{place}activation_checkpoint=budget is the compiler's choice, and compiling is off: "
            "use full or selective, or compile"
        )
    elif backend not in SAVING_BACKENDS:
        mistakes.append(
            f"{place}activation_checkpoint=budget needs a compile backend that chooses what to keep "
            f"({', '.join(SAVING_BACKENDS)}), not {backend}"
        )
    return mistakes


LEAST_CHUNK_TOKENS = 64  # of the loss
USUAL_BACKENDS = (*SAVING_BACKENDS, "aot_eager", "eager")  # known without asking torch, which takes seconds


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint at the end of a message, or ""."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f" Did you mean {near[0]}?" if near else ""


def dtype_mistakes(value: str, place: str) -> list[str]:
    """`place` is what the message calls the value."""
    if value == "float16":
        return [
            f"{place}=float16 needs a gradient scaler, which this trainer does not have: "
            "use bfloat16, which has float32's range"
        ]
    return [] if value in DTYPES else [f"{place}={value} is not one of {', '.join(DTYPES)}"]


def storage_mistakes(storage: str, params: Iterable[str], place: str) -> list[str]:
    """Parameters stored in bfloat16 and gathered in float32 would send zeros."""
    if storage == "bfloat16" and "float32" in params:
        return [
            f"{place}storage_dtype=bfloat16 with param_dtype=float32 would send and multiply twice the bytes "
            "that there are: use param_dtype=bfloat16"
        ]
    return []


def kernel_mistakes(
    attention: str, loss_chunk_tokens: int, gathered: bool, model: ModelUnits, place: str
) -> list[str]:
    """An attention that the model does not have, and chunks too small or of `gathered` logits."""
    mistakes = []
    if attention not in model.attention_kernels:
        mistakes.append(
            f"{place}attention={attention} is not one of {', '.join(model.attention_kernels)}."
            + nearest(attention, model.attention_kernels)
        )
    if loss_chunk_tokens and loss_chunk_tokens < LEAST_CHUNK_TOKENS:
        mistakes.append(
            f"{place}loss_chunk_tokens={loss_chunk_tokens} must be 0 (all at once) or at least "
            f"{LEAST_CHUNK_TOKENS}: products of fewer tokens are slow"
        )
    if loss_chunk_tokens and gathered:
        mistakes.append(
            f"{place}loss_chunk_tokens={loss_chunk_tokens} is for logits that stay split over tp: use 0, or "
            "loss_parallel=true"
        )
    return mistakes


def compile_mistakes(config: CompileConfig, place: str) -> list[str]:
    """Names that torch does not know, and a mode that the backend does not have."""
    if config.backend not in USUAL_BACKENDS:
        from torch._dynamo import list_backends

        if config.backend not in (known := list_backends(exclude_tags=())):
            return [
                f"{place}backend={config.backend} is no backend of this "
                f"torch.{nearest(config.backend, known)}"
            ]
    if config.mode == "default":
        return []
    if config.backend != "inductor":
        return [
            f"{place}mode={config.mode} is for backend inductor, not {config.backend}: leave it at default"
        ]
    from torch._inductor import list_mode_options

    known = list(list_mode_options())
    return [] if config.mode in known else [f"{place}mode={config.mode} is not one of {', '.join(known)}"]


def reshard_mistakes(reshard: bool | int | str, shard: int, tp: int, place: str) -> list[str]:
    """An int is a smaller group that keeps the parameters together: it must divide dp_shard and be neither
    end of it.

    Beside tp torch mixes such groups up: FSDP2 makes them for one tp rank's shards at a time, where every
    process of the run has to take part, and processes wait for each other for ever
    (tests/distributed/test_torch_faults.py).
    """
    if type(reshard) is not int:
        return []
    if tp > 1:
        return [
            f"{place}reshard_after_forward={reshard} with tp={tp} hangs in torch (2.11 and 2.13 do), whose "
            "FSDP2 makes the smaller groups without regard to tp: use true or false"
        ]
    if 1 < reshard < shard and shard % reshard == 0:
        return []
    others = [str(d) for d in range(2, shard) if shard % d == 0]
    return [
        f"{place}reshard_after_forward={reshard} must divide dp_shard={shard} and be smaller: "
        f"use {', '.join(['true', 'false', *others])} (false is what groups of 1 would be)"
    ]


def tensor_mistakes(tp: int, parts: Iterable[str], tokens: int, model: ModelUnits, place: str) -> list[str]:
    """Everything that the tp degree must divide, with the degrees that would do. `tokens`: per sequence, or 0
    if they are not shared out."""
    sizes = {key: value for part in parts for key, value in model.tp_divides[part].items()}
    if tokens:
        sizes["train.seq_len"] = tokens
    common = math.gcd(*sizes.values())
    valid = ", ".join(str(d) for d in range(1, common + 1) if common % d == 0)
    pad = {
        key: f" Or pad it to {-(-value // 128) * 128}: ids no text has cost their rows and are soon never "
        "predicted."
        for key, value in sizes.items()
        if key == "model.vocab_size" and 128 % max(tp, 1) == 0
    }
    return [
        f"{place}tp={tp} must divide {key}={value}. Use "
        f"{' or '.join(valid.rsplit(', ', 1))}.{pad.get(key, '')}"
        for key, value in sizes.items()
        if tp > 1 and value % tp
    ]


def batch_mistakes(micro_batch_size: int, global_batch_size: int, data_parallel: int) -> list[str]:
    """Sequences of a micro batch on every rank, several times over, are the global batch."""
    if micro_batch_size < 1:
        return [f"train.micro_batch_size={micro_batch_size} must be at least 1"]
    once = micro_batch_size * data_parallel
    if global_batch_size == -1 or (global_batch_size > 0 and global_batch_size % once == 0):
        return []
    nearest = max(1, round(global_batch_size / once)) * once
    return [
        f"train.global_batch_size={global_batch_size} must be a multiple of micro_batch_size x data-parallel "
        f"degree = {micro_batch_size} x {data_parallel}: the nearest is {nearest}, or use -1"
    ]


def split_styles(table: Mapping[str, str], whole: bool = False, gathered: bool = False) -> dict[str, str]:
    """The styles of one part of a model: split over the tp axis, with its logits `gathered` or not, or left
    `whole`."""
    styles = dict(table)
    if whole:
        return {pattern: f"whole_{style}" for pattern, style in styles.items() if style != "loss"}
    if gathered:
        return {
            p: "gathered_logits" if style == "logits" else style
            for p, style in styles.items()
            if style != "loss"
        }
    return styles
