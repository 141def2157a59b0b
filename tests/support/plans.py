"""A small model description with the same fields as a Llama's, and plans for it."""

import dataclasses
from typing import Any

import yaml

from meshwright.parallel.config import CompileConfig, Float8Config, ParallelConfig
from meshwright.parallel.plan.make import RunShape, make_plan
from meshwright.parallel.plan.schema import ModelUnits, Plan
from meshwright.parallel.planner.workload import Phase

STYLES = {
    "embedding": {"embed": "vocab"},
    "attention": {"layers.*.norm": "sequence", "layers.*.wq": "colwise", "layers.*.wo": "rowwise"},
    "feed_forward": {"layers.*.ffn_norm": "sequence", "layers.*.w1": "colwise", "layers.*.w2": "rowwise"},
    "head": {"head.norm": "sequence", "head.output": "logits", "head.loss": "loss"},
}
TP_DIVIDES = {
    "embedding": {"model.vocab_size": 96},
    "attention": {"model.n_heads": 16, "model.n_kv_heads": 8},
    "feed_forward": {"model.ffn_dim": 48},
    "head": {"model.vocab_size": 96},
}
EMBEDDING, BLOCK, HEAD = 800, 400, 1000  # parameters


def make_model(n_layers: int = 4, tied: bool = False) -> ModelUnits:
    blocks = [f"layers.{i}" for i in range(n_layers)]
    alone = [(block,) for block in blocks]
    return ModelUnits(
        modules={
            "embed": EMBEDDING,
            **dict.fromkeys(blocks, BLOCK),
            "head": HEAD - EMBEDDING if tied else HEAD,
        },
        units=[*alone, ("embed", "head")] if tied else [("embed",), *alone, ("head",)],
        compiled=frozenset({*blocks, "head"}),
        checkpointed=frozenset(blocks),
        styles=STYLES,
        tp_divides=TP_DIVIDES,
        shared_parts=frozenset({"embedding", "head"} if tied else ()),
        attention_ops=("aten._scaled_dot_product_flash_attention",),
        attention_cores=("layers.*.core",),
        core_heads={"model.n_kv_heads": 8},
        shifted_kernels={"cpu": "cpu", "cudnn": "flash"},
        linears={"layers.*.wq": (64, 32), "layers.*.wo": (32, 64), "layers.*.w1": (48, 32)},
    )


MODEL, TIED = make_model(), make_model(tied=True)
SEQ_LEN = 64
MODELS = {
    "tied": TIED,
    "kernels": dataclasses.replace(MODEL, attention_kernels=("cpu", "math", "flash")),
    "odd": dataclasses.replace(MODEL, linears={"layers.*.wq": (40, 32)}),
}
SECTIONS: dict[str, Any] = {"model": MODELS.get, "compile": CompileConfig, "float8": Float8Config}


def plan_of(
    world_size: int = 8,
    micro: int | str = 1,
    global_batch: int = -1,
    *,
    model: ModelUnits = MODEL,
    per_node: int = 8,
    seq_len: int = SEQ_LEN,
    **keys: Any,
) -> Plan:
    return make_plan(
        ParallelConfig(**keys), model, RunShape(world_size, per_node, seq_len, micro, global_batch)
    )


def keys_from(text: str) -> dict[str, Any]:
    """The arguments of plan_of that a row names."""
    keys = yaml.safe_load(f"{{{text}}}")
    made = {name: SECTIONS[name] for name in keys if name in SECTIONS}
    return keys | {
        n: make(**keys[n]) if isinstance(keys[n], dict) else make(keys[n]) for n, make in made.items()
    }


def check_facts(message: str, facts: str) -> None:
    """Assert that a message has each of these facts, such as "tp=3 ... must divide ... 1, 2 or 4"."""
    assert [fact for fact in facts.split(" ... ") if fact not in message] == [], message


def change(plan: Plan, index: int, **keys: Any) -> Plan:
    """The plan with other keys of one unit, as by a hand edit of its file."""
    units = list(plan.units)
    units[index] = dataclasses.replace(units[index], **keys)
    return dataclasses.replace(plan, units=tuple(units))


def fullest(phase: Phase, micro_batch_size: int) -> float:
    """Bytes at the moment of peak memory."""
    return max(moment.at(micro_batch_size) for moment in phase.live_bytes)
