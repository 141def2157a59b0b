"""Which models and shardings are checked together, over which mesh."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from benchmarks.legal.loops import Loop
from benchmarks.legal.models import MODELS, Build, only_vectors, own_llama, own_sequence_styles, published
from benchmarks.legal.shardings import (
    Sharding,
    accelerate,
    accelerate_fsdp,
    along_last_dim,
    compiled_blocks,
    compiled_whole,
    ddp,
    ddp_of_slices,
    fsdp,
    fsdp_of_both_ends,
    fsdp_of_one_unit,
    fsdp_of_slices,
    recomputed,
    recomputed_by_transformers,
    slices,
    tp,
    tp_fsdp,
    transformers_own,
)
from benchmarks.zoo.published import GPT2

FSDP, DDP, TP = {"dp_shard": 2}, {"dp_replicate": 2}, {"tp": 2}
HSDP, FSDP_TP, DDP_TP = DDP | FSDP, FSDP | TP, DDP | TP
FULL, BY_HAND, THEIRS = "fully_shard", "parallelize_module", "transformers' own"


@dataclass(frozen=True)
class Pair:
    """A model and its sharding over a mesh.

    Args:
        degrees: of the mesh's axes
        loop: of training; None: check's own
        fault: words of the report, if the sharding is wrong and must be found; "" for one that is right
    """

    model: str
    sharding: str
    build: Build
    shard: Sharding
    degrees: dict[str, int]
    loop: type[Loop] | None = None
    fault: str = ""

    @property
    def name(self) -> str:
        mesh = " x ".join(f"{axis} {degree}" for axis, degree in self.degrees.items())
        return f"{self.model}, {self.sharding}{', loop' * bool(self.loop)}, {mesh}"


def pairs_of_every_model() -> Iterator[Pair]:
    """Yield what everyone uses, with each model."""
    without_fsdp_plan = {"GPT-2": "transformer.h.*", "GPT-NeoX": "gpt_neox.layers.*"}  # of transformers
    for name, model in MODELS.items():
        yield Pair(name, FULL, model.build, fsdp, FSDP)
        yield Pair(name, "DDP", model.build, ddp, DDP)
        yield Pair(name, f"{BY_HAND}, {FULL}", model.build, partial(tp_fsdp, styles=model.styles), FSDP_TP)
        if name == "own Llama":
            continue
        blocks = without_fsdp_plan.get(name)
        options = {"fsdp_plan": {blocks: "free_full_weight"}} if blocks else {}
        degrees = FSDP if name == "GPT-2" else FSDP_TP  # transformers has no tp plan of GPT-2
        yield Pair(name, THEIRS, model.build, partial(transformers_own, **options), degrees)


def pairs_of_some() -> Iterator[Pair]:
    """Yield what some use, each with one model."""
    of_tokens = partial(tp_fsdp, styles=own_sequence_styles)
    some = (
        ("own Llama", f"{FULL}, HSDP", fsdp, HSDP),
        ("Qwen3", f"{FULL}, HSDP", fsdp, HSDP),
        ("GLM", f"{FULL}, one unit", fsdp_of_one_unit, FSDP),
        ("Gemma 3", f"{FULL}, a unit of both ends", fsdp_of_both_ends, FSDP),
        ("Phi-3", f"{FULL}, along the last dim", along_last_dim, FSDP),
        ("Llama", f"{FULL}, compiled blocks", compiled_blocks, FSDP),
        ("own Llama", f"{FULL}, compiled whole", compiled_whole, FSDP),
        ("OLMo 2", f"{FULL}, checkpoint_wrapper", recomputed, FSDP),
        ("Qwen3", f"{FULL}, gradient_checkpointing_enable", recomputed_by_transformers, FSDP),
        ("GPT-2", "DDP, static graph", partial(ddp, static_graph=True), DDP),
        ("Phi-3", "DDP, gradients as views", partial(ddp, gradient_as_bucket_view=True), DDP),
        ("Llama", "slices by hand", slices, TP),
        ("Llama", "slices by hand, DDP", ddp_of_slices, DDP_TP),
        ("Llama", f"slices by hand, {FULL}", fsdp_of_slices, FSDP_TP),
        ("GPT-NeoX", BY_HAND, partial(tp, styles=MODELS["GPT-NeoX"].styles), TP),
        ("own Llama", f"{BY_HAND}, tokens split", partial(tp, styles=own_sequence_styles), TP),
        ("own Llama", f"{BY_HAND}, tokens split, {FULL}", of_tokens, FSDP_TP),
        ("Llama", THEIRS, transformers_own, TP),
        ("GLM", THEIRS, transformers_own, HSDP),
        ("Qwen3-MoE", f"{THEIRS}, experts over 2", partial(transformers_own, ep_size=2), FSDP),
        ("Qwen3-MoE", f"{THEIRS}, experts over 4", partial(transformers_own, ep_size=4), FSDP_TP),
        ("GPT-2", "accelerate's FSDP2 plugin", accelerate, DDP),
        ("Phi-3", "accelerate's FSDP2, without its plugin", accelerate_fsdp, FSDP),
    )
    for name, sharding, shard, degrees in some:
        yield Pair(name, sharding, MODELS[name].build, shard, degrees)


def pairs_of_variants() -> Iterator[Pair]:
    """Yield models with what others do not have."""
    vectors = partial(only_vectors, MODELS["own Llama"].build)
    yield Pair("own Llama, matrices frozen", FULL, vectors, fsdp, FSDP)
    yield Pair("own Llama, matrices frozen", "DDP", vectors, ddp, DDP)
    dropout = partial(published, "GPT2", **GPT2)  # of a tenth, as its config has it
    by_hand = partial(tp_fsdp, styles=MODELS["GPT-2"].styles)
    yield Pair("GPT-2, dropout", FULL, dropout, fsdp, FSDP)
    yield Pair("GPT-2, dropout", "DDP", dropout, ddp, DDP)
    yield Pair("GPT-2, dropout", f"{BY_HAND}, {FULL}", dropout, by_hand, FSDP_TP)
    cached = partial(published, "Mistral", attn_implementation="eager", use_cache=True, sliding_window=4)
    yield Pair("Mistral, eager attention, cache", THEIRS, cached, transformers_own, FSDP_TP)


def loops() -> Iterator[Pair]:
    """Yield shardings with the whole step of a user: loss, clipping, AdamW and checkpoints."""
    yield Pair("own Llama", FULL, own_llama, fsdp, FSDP, Loop)
    yield Pair("own Llama", f"{FULL}, HSDP", own_llama, fsdp, HSDP, Loop)
    yield Pair("GPT-2", FULL, MODELS["GPT-2"].build, fsdp, FSDP, Loop)
    yield Pair("GPT-2", "DDP", MODELS["GPT-2"].build, ddp, DDP, Loop)
    yield Pair("GPT-NeoX", FULL, MODELS["GPT-NeoX"].build, fsdp, FSDP, Loop)
    yield Pair("Llama", THEIRS, MODELS["Llama"].build, transformers_own, FSDP, Loop)
    biases = partial(published, "Qwen2")  # those of keys have no gradient but by rounding
    yield Pair("Qwen2", FULL, biases, fsdp, FSDP, Loop)


def faults() -> Iterator[Pair]:
    """Yield shardings of transformers that are wrong: they sum the gradients of the norms of queries and keys
    over tp in each micro batch, and with them those of the micro batches before, which are summed already."""
    for name in ("Qwen3", "Gemma 3", "Qwen3-MoE"):
        yield Pair(name, THEIRS, MODELS[name].build, transformers_own, TP, fault="micro batch 1 counts")


KINDS = (pairs_of_every_model, pairs_of_some, pairs_of_variants, loops, faults)
PAIRS = {pair.name: pair for pairs in KINDS for pair in pairs()}
