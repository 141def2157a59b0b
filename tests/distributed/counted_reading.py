"""The rank program of test_init_from_mesh.py: load initial weights, counting the elements read."""

import gc
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from meshwright.train.checkpoint import reader
from meshwright.train.checkpoint.initial_weights import find_weights, load_weights
from meshwright.train.data.sequences import Batch
from meshwright.train.model.trained_model import loss_of_forward
from meshwright.train.step import train_step
from tests.support.sharded import build_sharded


class Counted:
    """A safetensors file that counts the elements read from it. Slices only: full tensors cannot be read."""

    open, taken = reader.safe_open, dict[str, list[int]]()

    def __init__(self, filename: str, framework: str) -> None:
        self.file = Counted.open(filename, framework=framework)

    def __enter__(self) -> "Counted":
        self.file.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.file.__exit__(*error)

    def keys(self) -> list[str]:
        return list(self.file.keys())

    def metadata(self) -> Any:
        return self.file.metadata()

    def get_slice(self, name: str) -> Any:
        return _Slice(name, self.file.get_slice(name))


class _Slice:
    def __init__(self, name: str, part: Any) -> None:
        self.name, self.part = name, part
        self.get_shape, self.get_dtype = part.get_shape, part.get_dtype

    def __getitem__(self, where: Any) -> Tensor:
        taken = self.part[where]
        Counted.taken.setdefault(self.name, []).append(taken.numel())
        return taken


def run_case(arguments: Sequence[str], tokens: Tensor) -> dict[str, Any]:
    """Return the weights, the elements read of each, and the loss of the first step on tokens[sequence, T +
    1]."""
    run = build_sharded(arguments)
    weights, model = find_weights(run.config.checkpoint.init_from, run.config.model), run.model
    assert weights
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)
    Counted.taken.clear()
    load_weights(weights, model)
    local = {
        weights.names[name]: (p.to_local() if isinstance(p, DTensor) else p).numel()
        for name, p in model.named_parameters()
    }
    full = {
        name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
        for name, p in model.named_parameters()
    }
    shape = run.shape
    own = tokens.chunk(shape.data_parallel)[shape.data_rank]
    batch = Batch(own[:, :-1].contiguous(), own[:, 1:].contiguous())
    result = train_step(run.sharded, run.optimizer, [batch], 0.0, loss_of_forward)
    return {"loss": result.loss.item(), "taken": dict(Counted.taken), "local": local, "weights": full}


def run_cases(cases: Mapping[str, Sequence[str]], tokens: Tensor) -> dict[str, dict[str, Any]]:
    reader.safe_open = Counted  # this process ends with the test
    results = {}
    for name, arguments in cases.items():
        results[name] = run_case(arguments, tokens)
        gc.collect()
    return results
