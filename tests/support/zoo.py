"""Models of the zoo with an example of their arguments, and the plans under which each must compute the same
as on one process."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.zoo.case import ROWS, numbers
from benchmarks.zoo.models import CASES
from meshwright.parallel.check.check import compare
from meshwright.parallel.config import CompileConfig, ParallelConfig
from meshwright.parallel.model.describe import describe
from meshwright.parallel.plan.make import RunShape, make_plan

MADE = tuple[nn.Module, dict[str, Any]]


def made(name: str, **changes: Any) -> MADE:
    """A model, with changed arguments of its constructor or config."""
    build: Callable[..., nn.Module] = CASES[name].build
    return build(**changes), CASES[name].batch(0)


def linears() -> MADE:
    stack = nn.Sequential(*(nn.Sequential(nn.Linear(24, 24), nn.ReLU(), nn.Dropout(0.2)) for _ in range(4)))
    return stack, {"input": numbers(ROWS, 24, seed=0)}


hf_llama, gemma = partial(made, "Llama"), partial(made, "Gemma")
encoder = partial(made, "nn.TransformerEncoder", dropout=0.1)
NAMES = ("Llama", "Qwen2", "Qwen3", "Mistral", "OLMo 2", "Phi", "Phi-3", "Gemma", "Gemma 2", "Gemma 3")
MODELS: dict[str, Callable[..., MADE]] = {
    **{f"transformers' {name}": partial(made, name) for name in NAMES},
    "transformers' GPT-2": partial(made, "GPT-2", resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.1),
    "transformers' ViT": partial(made, "ViT of transformers"),
    "torch's TransformerEncoder": encoder,
    "linears with dropout": linears,
}
# models that do not publish how to split them
WITHOUT_STYLES = tuple(MODELS)[-4:]
# name -> processes and keys of ParallelConfig; tp only for models that publish how to split them
PLANS: dict[str, tuple[int, dict[str, Any]]] = {
    "fsdp": (2, {"activation_checkpoint": "none"}),
    "fsdp, full recomputation": (2, {"activation_checkpoint": "full"}),
    "fsdp, selective recomputation": (2, {"activation_checkpoint": "selective"}),
    "hsdp": (2, {"dp_replicate": 2, "activation_checkpoint": "full"}),
    "tp": (2, {"tp": 2, "activation_checkpoint": "full"}),
    "hsdp x tp": (4, {"dp_replicate": 2, "tp": 2, "activation_checkpoint": "full"}),
}


def on_meta(make: Callable[..., MADE], **changes: Any) -> MADE:
    """The model without values."""
    with torch.device("meta"):
        model, _ = make(**changes)
    return model, make(**changes)[1]


def compare_plans(name: str, plans: dict[str, Any]) -> dict[str, Any]:
    """Compare a model under each plan with the same model on one process. Every rank calls it."""
    results = {}
    for plan_name, keys in plans.items():
        torch._dynamo.reset()
        model, example = on_meta(MODELS[name])
        config = ParallelConfig(compile=CompileConfig(backend="aot_eager"), **keys)
        size = dist.get_world_size()
        plan = make_plan(config, describe(model, example), RunShape(size, size, seq_len=1))
        result = compare(plan, model, example)
        differences = [dataclasses.asdict(each) for each in result["differences"]]
        results[plan_name] = result | {"differences": differences}
    return results
