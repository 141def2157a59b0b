"""What passes between a model and its parallelisation is written down, all of it."""

import ast
import inspect
from pathlib import Path

import torch

from meshwright.models.llama import Llama, LlamaConfig
from meshwright.parallel.shardable import ATTRIBUTES, ShardableModel

PARALLEL = Path(__file__).parents[2] / "parallel"
MARKED = ("model", "module")  # what the appliers call what they change


def marks_in(source: str) -> set[str]:
    """Attributes that are set on what is called a model or a module, but torch's own."""
    targets = [
        target
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Attribute)
        and isinstance(target.value, ast.Name)
        and target.value.id in MARKED
    ]
    return {target.attr for target in targets} - {"forward", "weight"}


def test_every_mark_on_a_model_is_in_the_table() -> None:
    found = set[str]().union(*(marks_in(path.read_text("utf-8")) for path in PARALLEL.rglob("*.py")))
    assert found == ATTRIBUTES.keys()


def test_a_new_mark_is_found() -> None:
    assert marks_in("def f(module):\n    module.secret = 1\n    module.forward = g") == {"secret"}


def test_llama_fulfils_the_protocol() -> None:
    with torch.device("meta"):
        model = Llama(LlamaConfig())
    assert isinstance(model, ShardableModel)
    asked = inspect.signature(ShardableModel.choose_kernels).parameters
    assert list(inspect.signature(Llama.choose_kernels).parameters) == list(asked)
