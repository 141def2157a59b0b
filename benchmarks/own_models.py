"""Models of transformers and torch, tiny, with an example of their arguments, and the plans under which each
must compute the same as on one process. The tests of models of one's own use them too."""

import argparse
import dataclasses
import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.support.harness import BenchResult, Measurement, run_benchmark
from meshwright.parallel.config import CompileConfig, ParallelConfig
from meshwright.parallel.model.check import compare
from meshwright.parallel.model.describe import describe
from meshwright.parallel.plan.make import RunShape, make_plan
from meshwright.tools.cli import format_table
from meshwright.tools.workers import run_workers

VOCABULARY, TOKENS, ROWS = 96, 12, 4
MADE = tuple[nn.Module, dict[str, Any]]


def ids(rows: int = ROWS) -> Tensor:
    return torch.randint(VOCABULARY, (rows, TOKENS), generator=torch.Generator().manual_seed(0))


def _transformers(kind: str, **changes: Any) -> MADE:
    import transformers

    sizes = {
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 48,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 64,
        "use_cache": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    config = getattr(transformers, f"{kind}Config")(**{**sizes, **changes})
    made = transformers.AutoModelForCausalLM.from_config(config)
    return made, {"input_ids": ids()}


def hf_llama(**changes: Any) -> MADE:
    return _transformers("Llama", **changes)


def vit(**changes: Any) -> MADE:
    """An encoder of images: a convolution, a class token, no ids."""
    import transformers

    sizes = {
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "intermediate_size": 48,
        "image_size": 16,
        "patch_size": 4,
        "num_labels": 5,
    }
    pixels = torch.randn(ROWS, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    config = transformers.ViTConfig(**{**sizes, **changes})
    return transformers.ViTForImageClassification(config), {"pixel_values": pixels}


def gemma(**changes: Any) -> MADE:
    model, example = _transformers("Gemma", **changes)
    mask = torch.ones(ROWS, TOKENS, dtype=torch.long)
    mask[1, 5:] = 0  # padding: a mask made outside of the blocks
    return model, example | {"attention_mask": mask}


class Encoder(nn.Module):
    """nn.TransformerEncoder between an embedding and a head; post-norm, with biases and dropout."""

    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 32)
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=dropout, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.head = nn.Linear(32, VOCABULARY)

    def forward(self, input_ids: Tensor) -> Tensor:
        logits: Tensor = self.head(self.encoder(self.embedding(input_ids)))
        return logits


def encoder() -> MADE:
    return Encoder(), {"input_ids": ids()}


def linears() -> MADE:
    stack = nn.Sequential(*(nn.Sequential(nn.Linear(24, 24), nn.ReLU(), nn.Dropout(0.2)) for _ in range(4)))
    return stack, {"input": torch.randn(ROWS, 24, generator=torch.Generator().manual_seed(0))}


ALTERNATING = {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 4,
}
MODELS: dict[str, Callable[..., MADE]] = {
    "transformers' Llama": hf_llama,
    "transformers' Qwen2": partial(_transformers, "Qwen2"),  # biases of queries, keys and values
    "transformers' Qwen3": partial(_transformers, "Qwen3"),  # norms of queries and keys
    "transformers' Mistral": partial(_transformers, "Mistral", sliding_window=4),
    "transformers' OLMo 2": partial(_transformers, "Olmo2"),  # norms after the blocks
    # attention and feed-forward of one norm, in parallel, with biases; half of each head is rotated
    "transformers' Phi": partial(_transformers, "Phi", partial_rotary_factor=0.5),
    "transformers' Phi 3": partial(_transformers, "Phi3"),  # queries, keys and values in one product
    # Conv1D in place of nn.Linear, learned positions, a tied head, dropout
    "transformers' GPT-2": partial(_transformers, "GPT2", n_embd=32, n_layer=3, n_head=4, n_positions=64),
    "transformers' ViT": vit,
    "transformers' Gemma": gemma,
    "transformers' Gemma 2": partial(_transformers, "Gemma2", **ALTERNATING),  # four norms, soft caps
    "transformers' Gemma 3": partial(_transformers, "Gemma3Text", **ALTERNATING),
    "torch's TransformerEncoder": encoder,
    "linears with dropout": linears,
}


def on_meta(make: Callable[..., MADE], **changes: Any) -> MADE:
    """The model without values."""
    with torch.device("meta"):
        model, _ = make(**changes)
    return model, make(**changes)[1]


# name -> processes and keys of ParallelConfig; tp only for models that publish how to split them
PLANS: dict[str, tuple[int, dict[str, Any]]] = {
    "fsdp": (2, {"activation_checkpoint": "none"}),
    "fsdp, full recomputation": (2, {"activation_checkpoint": "full"}),
    "fsdp, selective recomputation": (2, {"activation_checkpoint": "selective"}),
    "hsdp": (2, {"dp_replicate": 2, "activation_checkpoint": "full"}),
    "tp": (2, {"tp": 2, "activation_checkpoint": "full"}),
    "hsdp x tp": (4, {"dp_replicate": 2, "tp": 2, "activation_checkpoint": "full"}),
}


# models that do not publish how to split them
WITHOUT_STYLES = (
    "transformers' GPT-2",
    "transformers' ViT",
    "torch's TransformerEncoder",
    "linears with dropout",
)


def compare_in_worker(device: torch.device, name: str, plans: dict[str, Any]) -> dict[str, Any]:
    """Compare a model under each plan with the same model on one process."""
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


def compare_all(options: argparse.Namespace, overrides: Sequence[str]) -> BenchResult:
    """Compare every model under every plan. Raises BenchError if a process fails."""
    rows = []
    for name, processes in itertools.product(MODELS, (2, 4)):
        plans = {
            plan: keys
            for plan, (count, keys) in PLANS.items()
            if count == processes and ("tp" not in keys or name not in WITHOUT_STYLES)
        }
        if plans:
            settings = {"name": name, "plans": plans}
            found = run_workers("benchmarks.own_models:compare_in_worker", processes, 1, "cpu", settings)[0]
            rows += [{"model": name, "plan": plan, **result} for plan, result in found.items()]
    head = ("model", "plan", "compared", "largest difference", "above 1e-4")
    cells = [
        (
            row["model"],
            row["plan"],
            str(row["compared"]),
            f"{row['largest']:.1e}",
            str(len(row["differences"])),
        )
        for row in rows
    ]
    return BenchResult(None, {"rows": rows}, format_table(head, cells))


MEASUREMENT = Measurement(
    "own_models",
    lambda parser: None,
    compare_all,
    description=(
        "Compare outputs and gradients of tiny models of transformers and torch, sharded, recomputed, "
        "compiled and split over 2 and 4 gloo processes, with the unsharded models."
    ),
    takes_keys=False,
)

if __name__ == "__main__":
    run_benchmark(MEASUREMENT)
