"""What torch does by itself, where this project does something else; nothing of this project.

Run by test_torch_faults.py. `step BACKEND RECOMPUTE WAIT`: one step of an embedding and a block that torch's own styles
split over tp; prints, as JSON, the norm of each gradient, or the error. `reshard GROUP` (dp 4 x tp 2): FSDP2 with
reshard_after_forward=GROUP; prints "through" for each rank that is.
"""

import faulthandler
import json
import os
import sys
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor, wait_tensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

VOCAB, DIM, HEAD_DIM, TOKENS = 16, 8, 4, 8
HANG_S = 60  # eight groups take a second


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(DIM, DIM, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (w(x).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        return self.wo(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention = nn.RMSNorm(DIM), Attention()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attention(self.norm(x))


class Model(nn.Module):
    def __init__(self, wait: bool) -> None:
        super().__init__()
        self.embedding, self.block, self.wait = nn.Embedding(VOCAB, DIM), Block(), wait

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        assert isinstance(x, AsyncCollectiveTensor), "torch's style waits for its collective now"
        return self.block(wait_tensor(x) if self.wait else x)


def split(model: Model, mesh: Any) -> None:
    parallelize_module(model, mesh["tp"], {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "block.norm": SequenceParallel(),
        "block.attention": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
        "block.attention.w[qkv]": ColwiseParallel(),
        "block.attention.wo": RowwiseParallel(output_layouts=Shard(1)),
    })  # fmt: skip


def step(backend: str, recompute: bool, wait: bool) -> dict[str, float]:
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("dp", "tp"))
    model = Model(wait)
    split(model, mesh)
    if recompute:
        model.block = checkpoint_wrapper(model.block, preserve_rng_state=False)
    if backend != "none":
        model.block.compile(backend=backend, fullgraph=True)
    for module in (model.embedding, model.block, model):
        fully_shard(module, mesh=mesh["dp"])
    model(torch.arange(TOKENS)[None]).square().sum().backward()
    norms = {}
    for name, p in model.named_parameters():
        assert isinstance(p.grad, DTensor)
        norms[name.replace("_checkpoint_wrapped_module.", "")] = p.grad.full_tensor().norm().item()
    return norms


def shard_in_groups(group: int | bool) -> None:
    mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp"))
    for _ in range(8):
        fully_shard(nn.Linear(DIM, DIM), mesh=mesh["dp"], reshard_after_forward=group)


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    what, *arguments = sys.argv[1:]
    if what == "reshard":
        faulthandler.dump_traceback_later(HANG_S, exit=True)
        shard_in_groups(json.loads(arguments[0]))
        print("through", flush=True)
        dist.barrier()
        return
    backend, recompute, wait = arguments
    try:
        seen: dict[str, Any] = step(backend, recompute == "recompute", wait == "wait")
    except Exception as error:
        seen = {"error": f"{type(error).__name__}: {error}"}
    if dist.get_rank() == 0:
        print(json.dumps(seen), flush=True)
    os._exit(0)  # after an error a rank may wait for another


if __name__ == "__main__":
    main()
