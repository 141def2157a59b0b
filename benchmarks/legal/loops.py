"""Training loops as people write them, each right: the same steps on one process and on a mesh, also from a
checkpoint."""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from benchmarks.legal.shardings import data_mesh
from benchmarks.zoo.case import logits_of


class Loop:
    """Cross entropy summed over all tokens of a step and divided by their number, which is that of all ranks;
    gradients are reduced in the last micro batch; clipping; AdamW; checkpoints by torch.distributed."""

    def __init__(self, model: nn.Module, mesh: DeviceMesh | None) -> None:
        self.model = model
        data = data_mesh(mesh) if mesh is not None else None
        self.groups = [data.get_group(axis) for axis in data.mesh_dim_names or ()] if data is not None else []
        self.ranks = data.size() if data is not None else 1
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)

    def step(self, batches: Sequence[Any]) -> Tensor:
        tokens = torch.tensor(float(sum(ids_of(batch)[:, 1:].numel() for batch in batches)))
        for group in self.groups:
            dist.all_reduce(tokens, group=group)
        total = torch.zeros(())
        for number, batch in enumerate(batches):
            with self.accumulating(number < len(batches) - 1):
                ids = ids_of(batch)
                logits = logits_of(self.model(**batch) if isinstance(batch, Mapping) else self.model(*batch))
                loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="sum")
                (loss * self.ranks / tokens).backward()  # the gradients become a mean over ranks
                total += loss.detach() / tokens
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0, foreach=False)
        self.optimizer.step()
        self.optimizer.zero_grad()
        for group in self.groups:
            dist.all_reduce(total, group=group)
        return total

    def accumulating(self, more: bool) -> Any:
        """Reduce no gradients if there are more micro batches."""
        if isinstance(self.model, FSDPModule):
            self.model.set_requires_gradient_sync(not more)
        ddp = isinstance(self.model, DistributedDataParallel)
        return self.model.no_sync() if ddp and more else nullcontext()

    def save(self, folder: Path) -> None:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=folder)

    def load(self, folder: Path) -> None:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        dcp.load({"model": model, "optimizer": optimizer}, checkpoint_id=folder)
        set_state_dict(self.model, self.optimizer, model_state_dict=model, optim_state_dict=optimizer)


def ids_of(batch: Any) -> Tensor:
    ids: Tensor = batch["input_ids"] if isinstance(batch, Mapping) else batch[0]
    return ids
