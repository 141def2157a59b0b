"""Rules for single values of a plan: each function yields mistakes. `validate` calls all of them."""

import difflib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

from meshwright.parallel.config import CompileConfig
from meshwright.parallel.plan.mistakes import Mistake
from meshwright.parallel.plan.schema import MeshPlan, ModelUnits, Plan, TensorPlan, find_style

# Styles of modules in a sharding table; parallel/tensor_parallel.py implements them.
STYLE_NAMES = (
    *("vocab", "sequence", "colwise", "rowwise", "logits", "gathered_logits"),
    *("whole_vocab", "whole_sequence", "whole_colwise", "whole_rowwise", "whole_logits"),
    *("own_colwise", "own_gathered", "own_rowwise", "per_head"),
)
OWN_INPUT_STYLES = {"own_colwise", "own_gathered", "own_rowwise"}  # of models whose norms gather no tokens
BUDGET_BACKENDS = ("inductor", "aot_eager_decomp_partition")  # their partitioner supports a memory budget
COMMON_BACKENDS = (*BUDGET_BACKENDS, "aot_eager", "eager")  # not looked up: torch's list takes seconds
MIN_CHUNK_TOKENS = 64  # of the loss


def nearest(name: str, known: Iterable[str]) -> str:
    """Return the hint " Did you mean NAME?" for the end of a message, or ""."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f" Did you mean {near[0]}?" if near else ""


def storage_mistakes(plan: Plan) -> Iterator[Mistake]:
    """Refuse parameters stored in bfloat16 but gathered in float32: half of the bits would be zeros."""
    if plan.storage_dtype == "bfloat16" and any(unit.param_dtype == "float32" for unit in plan.units):
        yield Mistake(
            "storage_dtype",
            "=bfloat16 with param_dtype=float32 gathers and computes in float32 without any gain in "
            "precision: use param_dtype=bfloat16",
        )


def kernel_mistakes(plan: Plan, model: ModelUnits) -> Iterator[Mistake]:
    """Check that the model has the attention kernel, and that the loss chunks fit the logits."""
    kernels, chunk = model.attention_kernels, plan.loss_chunk_tokens
    if not kernels:
        given = {"attention": plan.attention, "loss_chunk_tokens": chunk}
        given["fused_projections"] = plan.fused_projections
        for key, value in given.items():
            if value:
                yield Mistake(key, f"={value} is a switch that this model does not have: leave it out")
        return
    if plan.attention not in kernels:
        hint = nearest(plan.attention, kernels)
        yield Mistake("attention", f"={plan.attention} is not one of {', '.join(kernels)}.{hint}")
    if chunk and chunk < MIN_CHUNK_TOKENS:
        yield Mistake(
            "loss_chunk_tokens",
            f"={chunk} must be 0 (all at the same time) or at least {MIN_CHUNK_TOKENS}: products "
            "of fewer tokens are slow",
        )
    if chunk and "gathered_logits" in plan.tensor.styles.values():
        yield Mistake(
            "loss_chunk_tokens",
            f"={chunk} needs logits that stay split over tp: use 0, or loss_parallel=true",
        )


def async_tp_mistakes(plan: Plan) -> Iterator[Mistake]:
    """Check async tp: inductor splits only all-gathers and reduce-scatters of tokens next to products."""
    if not plan.async_tp:
        return
    if plan.mesh.tp == 1:
        yield Mistake("async_tp", "=true, but tp=1 has no collectives: use false, or tp > 1")
    elif not plan.tensor.sequence_parallel:
        yield Mistake(
            "async_tp",
            "=true needs sequence_parallel=true, whose all-gathers and reduce-scatters are next to products: "
            "async tp cannot split an all-reduce: set it, or use async_tp=false",
        )
    if not plan.compile.enabled or plan.compile.backend != "inductor":
        yield Mistake(
            "async_tp",
            "=true needs inductor, which does not compile the blocks of this plan: use "
            "compile.enabled=true with compile.backend=inductor, or async_tp=false",
        )


def compile_mistakes(config: CompileConfig) -> Iterator[Mistake]:
    """Check that torch has the compile backend, and that the backend has the mode."""
    backend, mode = config.backend, config.mode
    if backend not in COMMON_BACKENDS:
        from torch._dynamo import list_backends

        if backend not in (known := list_backends(exclude_tags=())):
            hint = nearest(backend, known) or " Use inductor."
            yield Mistake("compile.backend", f"={backend} is not a backend of this torch.{hint}")
            return
    if mode != "default" and backend != "inductor":
        yield Mistake("compile.mode", f"={mode} is for backend inductor, not {backend}: use default")
    elif mode != "default":
        from torch._inductor import list_mode_options

        if mode not in (modes := list_mode_options()):
            yield Mistake("compile.mode", f"={mode} is not one of {', '.join(modes)}")


def reshard_mistakes(reshard: bool | int, mesh: MeshPlan) -> Iterator[Mistake]:
    """Check an int `reshard_after_forward`, the size of the smaller groups that keep the parameters: it must
    divide dp_shard, and be neither 1 nor dp_shard.

    With tp it hangs: FSDP2 creates the smaller process groups for one tp rank's shards at a time, but every
    process of the run must take part in creating one (tests/distributed/test_torch_faults.py).
    """
    shard, tp = mesh.shards, mesh.tp
    name = "dp_shard" if mesh.cp == 1 else "dp_shard x cp"
    if type(reshard) is not int:
        return
    if tp > 1:
        yield Mistake(
            "units.reshard_after_forward",
            f"={reshard} with tp={tp} hangs in torch (2.11 and 2.13): FSDP2 creates the "
            "smaller groups without regard to tp: use true or false",
        )
    elif not 1 < reshard < shard or shard % reshard:
        use = ", ".join(["true", "false", *(str(d) for d in range(2, shard) if shard % d == 0)])
        yield Mistake(
            "units.reshard_after_forward",
            f"={reshard} must divide {name}={shard} and be smaller: use {use} (an int "
            "is the size of the groups that keep the parameters)",
        )


def tensor_mistakes(tp: int, parts: Iterable[str], tokens: int, model: ModelUnits) -> Iterator[Mistake]:
    """Check every size that the tp degree must divide; messages list the valid degrees.

    `tokens`: per sequence, or 0 without sequence parallelism.
    """
    sizes = {key: value for part in parts for key, value in model.tp_divides.get(part, {}).items()}
    if tokens:
        sizes["train.seq_len"] = tokens
    common = math.gcd(*sizes.values())
    valid = ", ".join(str(d) for d in range(1, common + 1) if common % d == 0)
    for key, value in sizes.items():
        if value % tp == 0:
            continue
        message = f"={tp} must divide {key}={value}. Use {' or '.join(valid.rsplit(', ', 1))}."
        if key == "model.vocab_size" and 128 % tp == 0:
            message += (
                f" Or pad it to {-(-value // 128) * 128}: unused token ids cost their rows of memory, and "
                "the model soon learns not to predict them."
            )
        yield Mistake("mesh.tp", message)


def written_mistakes(mesh: MeshPlan, written: Sequence[str]) -> Iterator[Mistake]:
    """Refuse buffers that each rank would write from its own part of the batch, such as running means."""
    if written and mesh.world_size > mesh.tp:
        yield Mistake(
            "",
            f"the forward writes {', '.join(written[:3])}{' ...' * (len(written) > 3)}, and each rank would "
            "have its own: use eval() of these modules, or make them equal yourself and say so: "
            f"model.written_buffers = ({written[0]!r}, ...)",
        )


def unsharded_mistakes(plan: Plan, model: ModelUnits) -> Iterator[Mistake]:
    """Check the parameters that every rank keeps whole."""
    if set(plan.unsharded) != set(model.unsharded):
        wanted = f"{list(model.unsharded)}, as describe(unsharded=...) or the key model.unsharded says"
        yield Mistake("unsharded", f"={list(plan.unsharded)} must be {wanted}")
    elif plan.unsharded and plan.cpu_offload:
        message = f"=true would leave {plan.unsharded[0]}, which is unsharded, on the host"
        yield Mistake("cpu_offload", message)


def context_mistakes(plan: Plan, model: ModelUnits, seq_len: int) -> Iterator[Mistake]:
    """Check context parallelism: the model's cores, the sizes that the degree must divide, and the attention
    kernel. Messages list the valid degrees."""
    cp, tp, context = plan.mesh.cp, plan.mesh.tp, plan.context
    cores = model.attention_cores if cp > 1 else ()
    if context.cores != cores:
        yield Mistake("context.cores", f"={list(context.cores)} must be {list(cores)} with cp={cp}")
    if cp == 1:
        return
    if not cores:
        why = model.why_no_cores or (
            "this model has no module that takes queries, keys and values to attention's output"
        )
        yield Mistake("mesh.cp", f"={cp}, but {why}; or use cp=1")
        return
    parts = {"2 x cp" if context.exchange == "gather" else "cp": cp * (1 + (context.exchange == "gather"))}
    parts |= {"tp": tp} if plan.tensor.sequence_parallel else {}
    if seq_len % (together := math.prod(parts.values())):
        yield Mistake(
            "mesh.cp",
            f"={cp}: {' x '.join(parts)} = {together} must divide train.seq_len={seq_len}: use a length such "
            f"as {max(1, seq_len // together) * together}, or another degree",
        )
    yield from (_gather_mistakes if context.exchange == "gather" else _heads_mistakes)(plan, model)


def _gather_mistakes(plan: Plan, model: ModelUnits) -> Iterator[Mistake]:
    """Check that attention can have fewer queries than keys."""
    if not model.shifted_kernels:
        yield Mistake("context.exchange", "=gather is for models with kernels of ours: use heads")
    elif plan.attention not in (able := sorted({*model.shifted_kernels.values()})):
        yield Mistake(
            "attention",
            f"={plan.attention} does not align fewer queries than keys with the last keys, which "
            f"cp_exchange=gather needs: use {' or '.join(able)}, or cp_exchange=heads",
        )


def _heads_mistakes(plan: Plan, model: ModelUnits) -> Iterator[Mistake]:
    """Check that every rank of cp can have whole heads."""
    cp, tp = plan.mesh.cp, plan.mesh.tp
    for key, heads in heads_of_rank(plan.tensor, tp, model).items():
        if heads % cp:
            whole = model.core_heads[key]
            per_rank = f"{key}={whole}" if heads == whole else f"{key}={whole} / tp={tp}"
            degrees = [str(d) for d in range(1, heads + 1) if heads % d == 0]
            yield Mistake(
                "mesh.cp",
                f"={cp} must divide {per_rank} with cp_exchange=heads: use {' or '.join(degrees)}"
                + (", or cp_exchange=gather" if model.shifted_kernels else ""),
            )


def heads_of_rank(tensor: TensorPlan, tp: int, model: ModelUnits) -> dict[str, int]:
    """Return the key-value heads of the attention cores of one tp rank, by config key; tp splits them unless
    the plan leaves attention whole."""
    whole = {
        key
        for part, table in model.styles.items()
        if any(find_style(tensor, pattern) == "whole_colwise" for pattern in table)
        for key in model.tp_divides.get(part, {})
    }
    return {key: heads if key in whole else heads // tp for key, heads in model.core_heads.items()}


def splits_tokens(styles: Mapping[str, str]) -> bool:
    """Whether sequence parallelism is possible: a norm gathers the tokens, and no linear layer of its own
    expects all of them."""
    used = set(styles.values())
    return bool(used & {"sequence", "whole_sequence"}) and not used & OWN_INPUT_STYLES


def split_styles(table: Mapping[str, str], unsplit: bool = False, gathered: bool = False) -> dict[str, str]:
    """Return the styles of one part of a model: split over the tp axis, with `gathered` logits or not; or, if
    `unsplit`, the styles of unsplit weights."""
    if unsplit:
        return {pattern: f"whole_{style}" for pattern, style in table.items() if style != "loss"}
    if gathered:
        names = {pattern: style for pattern, style in table.items() if style != "loss"}
        return {p: "gathered_logits" if style == "logits" else style for p, style in names.items()}
    return dict(table)
