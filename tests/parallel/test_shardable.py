"""`parallel/shardable.py` documents the complete interface between a model and `parallel/`."""

import ast
import inspect
from pathlib import Path

import torch

from meshwright.models.llama import Llama, LlamaConfig
from meshwright.parallel.shardable import ATTRIBUTES, ShardableModel

PARALLEL = Path(__file__).parents[2] / "parallel"
TARGETS = ("model", "module")  # variable names of changed models and modules


def attributes_in(source: str) -> set[str]:
    """Return the attributes set on variables in TARGETS, except for torch's own `forward` and `weight`."""
    targets = [
        target
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Attribute)
        and isinstance(target.value, ast.Name)
        and target.value.id in TARGETS
    ]
    return {target.attr for target in targets} - {"forward", "weight"}


def test_every_mark_on_a_model_is_in_the_table() -> None:
    found = set[str]().union(*(attributes_in(path.read_text("utf-8")) for path in PARALLEL.rglob("*.py")))
    assert found == ATTRIBUTES.keys()


def test_a_new_mark_is_found() -> None:
    assert attributes_in("def f(module):\n    module.secret = 1\n    module.forward = g") == {"secret"}


def test_llama_fulfils_the_protocol() -> None:
    with torch.device("meta"):
        model = Llama(LlamaConfig())
    assert isinstance(model, ShardableModel)
    expected = inspect.signature(ShardableModel.choose_kernels).parameters
    assert list(inspect.signature(Llama.choose_kernels).parameters) == list(expected)
