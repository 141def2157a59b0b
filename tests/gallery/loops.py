"""A training loop on FSDP2, right, and with faults that somebody shipped."""

from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor

Batches = Sequence[tuple[Tensor]]


class Loop:
    """Cross entropy and a z-loss, each a sum over the tokens of all ranks and micro batches, divided by their
    number; clipping by the norm of all gradients; SGD."""

    def __init__(self, model: nn.Module, mesh: DeviceMesh | None) -> None:
        self.model, self.ranks = model, dist.get_world_size()
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)

    def step(self, batches: Batches) -> None:
        self.gradients(batches)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def gradients(self, batches: Batches) -> None:
        tokens = torch.tensor(float(sum(ids.numel() for (ids,) in batches)))
        dist.all_reduce(tokens)
        for (ids,) in batches:
            logits = self.model(ids).flatten(0, 1)
            loss = F.cross_entropy(logits, ids.flatten(), reduction="none")
            self.total(loss, 0.1 * logits.logsumexp(-1).square(), tokens, len(batches)).backward()
        self.clip()

    def total(self, loss: Tensor, z_loss: Tensor, tokens: Tensor, micro_batches: int) -> Tensor:
        return (loss + z_loss).sum() * self.ranks / tokens  # FSDP2 takes a mean over ranks

    def clip(self) -> None:
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)

    def save(self, folder: Path) -> None:
        whole = {name: p.detach().full_tensor() for name, p in self.model.named_parameters()}
        if dist.get_rank() == 0:
            torch.save(whole, folder / "model.pt")

    def load(self, folder: Path) -> None:
        whole = torch.load(folder / "model.pt")
        for name, p in self.model.named_parameters():
            p.data.copy_(distribute_tensor(whole[name], p.device_mesh, p.placements))


class MeanOfRanks(Loop):
    """torchtitan #2206: a mean over the tokens of each rank and micro batch, of which some have more."""

    def total(self, loss: Tensor, z_loss: Tensor, tokens: Tensor, micro_batches: int) -> Tensor:
        return (loss + z_loss).mean() / micro_batches


class AuxiliaryOfEach(Loop):
    """AutoModel #3359: the auxiliary loss is not divided by the number of micro batches."""

    def total(self, loss: Tensor, z_loss: Tensor, tokens: Tensor, micro_batches: int) -> Tensor:
        return loss.sum() * self.ranks / tokens + z_loss.sum() * self.ranks * micro_batches / tokens


class AuxiliaryScale(Loop):
    """AutoModel #1412: the auxiliary loss is divided by the number of ranks once too often."""

    def total(self, loss: Tensor, z_loss: Tensor, tokens: Tensor, micro_batches: int) -> Tensor:
        return (loss.sum() * self.ranks + z_loss.sum()) / tokens


class NormOfShards(Loop):
    """verl #3655: each rank clips by the norm of its own shards."""

    def clip(self) -> None:
        whole = [p.grad for p in self.model.parameters()]
        gradients = [g.to_local() if isinstance(g, DTensor) else g for g in whole]
        squares = torch.stack([gradient.square().sum() for gradient in gradients]).sum()
        self.reduce(squares)
        for gradient in gradients:
            gradient.mul_((0.5 / squares.sqrt()).clamp(max=1.0))

    def reduce(self, squares: Tensor) -> None:
        """Leave the sum as it is."""


class NormOfReplicas(NormOfShards):
    """VeOmni #862: under HSDP the squares are summed over all ranks, and replicas have the same."""

    def reduce(self, squares: Tensor) -> None:
        dist.all_reduce(squares)


def in_one(faulty: type[Loop], name: str) -> type[Loop]:
    """The right loop, but the gradient of one parameter is that of the faulty one."""

    class InOne(Loop):
        def __init__(self, model: nn.Module, mesh: DeviceMesh | None) -> None:
            super().__init__(model, mesh)
            self.wrong, self.parameter = faulty(model, mesh), model.get_parameter(name)

        def gradients(self, batches: Batches) -> None:
            self.wrong.gradients(batches)
            gradient = self.parameter.grad
            self.optimizer.zero_grad()
            super().gradients(batches)
            self.parameter.grad = gradient

    return InOne


class OwnShards(Loop):
    """accelerate #4206: the shards of rank 0 alone are saved."""

    lost: tuple[str, ...] = ("",)

    def save(self, folder: Path) -> None:
        super().save(folder)
        if dist.get_rank() == 0:
            whole = torch.load(folder / "model.pt")
            for name, p in self.model.named_parameters():
                if name.startswith(self.lost):
                    whole[name][len(p.to_local()) :] = 0
            torch.save(whole, folder / "model.pt")


class OwnShardsOfOne(OwnShards):
    """The same of one parameter."""

    lost = ("layers.1.experts.w1",)
