"""Muon: the momentum of a matrix is orthogonalised before it is its update, the same on every mesh.

Source: Keller Jordan (https://kellerjordan.github.io/posts/muon/), and torch.optim.Muon, whose formula and
constants these are (torch/optim/_muon.py, 2.9 to 2.13). The orthogonalisation needs whole matrices, of which
each rank has a part: each is owned by one rank (exchange.py).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from meshwright.parallel.fsdp import local_part
from meshwright.parallel.model.kinds import ParameterKind
from meshwright.parallel.model.owners import ITERATIONS, make_rounds, newton_schulz_flops
from meshwright.parallel.plan.schema import innermost
from meshwright.train.checkpoint.layout import TensorPart
from meshwright.train.checkpoint.shards import degrees, sharding_of
from meshwright.train.optim.exchange import Matrix, MatrixExchange, MatrixPiece

# of the quintic polynomial, whose iterates bring every singular value from 0 to 1 near 1; and the least norm
COEFFICIENTS, EPS = (3.4445, -4.7750, 2.0315), 1e-7

# factor of the learning rate for a matrix of outputs x inputs, by torch's names
LR_FACTORS: dict[str, Callable[[int, int], float]] = {
    "match_rms_adamw": lambda outputs, inputs: 0.2 * math.sqrt(max(outputs, inputs)),
    "original": lambda outputs, inputs: math.sqrt(max(1.0, outputs / inputs)),
}


def orthogonalise(matrices: Tensor) -> Tensor:
    """Return matrices[n, rows, columns] with singular values of about 1 (0.7 to 1.2), by Newton-Schulz."""
    a, b, c = COEFFICIENTS
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices
    x = x / torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp(min=EPS)
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def orthogonalise_all(matrices: Sequence[Tensor]) -> list[Tensor]:
    """Return matrices orthogonalised, all of one shape as one batch, each in its own shape."""
    results: list[Tensor] = [*matrices]
    for shape in dict.fromkeys(matrix.shape[-2:] for matrix in matrices):
        alike = [i for i, matrix in enumerate(matrices) if matrix.shape[-2:] == shape]
        batch = orthogonalise(torch.stack([matrices[i].view(shape) for i in alike]))
        for i, result in zip(alike, batch, strict=True):
            results[i] = result.view(matrices[i].shape)
    return results


@dataclass(frozen=True)
class Owned:
    """How matrices are given to their owners.

    Args:
        blocks: of the model, as `Plan.blocks`; consecutive ones are exchanged together
        mesh: None: one process has all
        dtype: in which they are exchanged and orthogonalised
        device: type of the device on which they are; parameters may be in host memory
    """

    blocks: Sequence[str]
    mesh: DeviceMesh | None
    dtype: torch.dtype
    device: str


class Muon(torch.optim.Optimizer):
    """Muon with Nesterov momentum and decoupled weight decay, for matrices on any mesh.

    Two scalars on the device work as in torch's fused AdamW: gradients are divided by `grad_scale`, and with
    `found_inf` at 1 nothing changes. A step never waits for the device.
    """

    _step_supports_amp_scaling = True
    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None

    def __init__(
        self,
        groups: Sequence[Mapping[str, Any]],
        named: Mapping[str, Tensor],
        kinds: Mapping[str, ParameterKind],
        owned: Owned,
        adjust_lr_fn: str = "match_rms_adamw",
        momentum: float = 0.95,
    ) -> None:
        """`groups`: params, lr, weight_decay. `named`: their parameters, in the order of the model, and
        `kinds` their kinds. `adjust_lr_fn`: of LR_FACTORS."""
        super().__init__([dict(group) for group in groups], {"momentum": momentum})
        self._named, self._kinds, self._owned = dict(named), dict(kinds), owned
        self._lr_factor = LR_FACTORS[adjust_lr_fn]
        self._rounds = dict[frozenset[str], list[MatrixExchange]]()
        for p in named.values():
            self.state[p]["momentum_buffer"] = torch.zeros_like(p)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all matrices that have a gradient. Every rank must call it.

        The exchanges of the next round and of the last one's results go on while this one is computed.
        """
        rounds = self._rounds_of(frozenset(n for n, p in self._named.items() if p.grad is not None))
        coming = self._give(rounds[0]) if rounds else None
        returning: Callable[[], list[tuple[MatrixPiece, Tensor]]] | None = None
        for number, this in enumerate(rounds):
            assert coming is not None
            matrices = coming()
            coming = self._give(rounds[number + 1]) if number + 1 < len(rounds) else None
            results = orthogonalise_all(matrices)
            if returning is not None:
                self._apply(returning())
            returning = this.to_all(results)
        if returning is not None:
            self._apply(returning())

    def _rounds_of(self, names: frozenset[str]) -> list[MatrixExchange]:
        """Return the exchanges of a step in which these parameters have a gradient."""
        if names not in self._rounds:
            matrices = [m for name in self._named if name in names for m in self._matrices(name)]
            owned, of_blocks = self._owned, dict[str | None, list[Matrix]]()
            for matrix in matrices:
                of_blocks.setdefault(innermost(matrix.name, owned.blocks), []).append(matrix)
            mesh, rank = (degrees(owned.mesh), owned.mesh.get_rank()) if owned.mesh else ((), 0)
            ranks = math.prod(degree for _, degree in mesh)
            self._rounds[names] = [
                MatrixExchange(together, mesh, rank, owned.dtype, owned.device)
                for together in make_rounds([*of_blocks.values()], lambda matrix: matrix.cost, ranks)
            ]
        return self._rounds[names]

    def _matrices(self, name: str) -> list[Matrix]:
        kind, sharding = self._kinds[name], sharding_of(self._named[name])
        regions = [TensorPart(*region) for region in kind.matrices]
        return [
            Matrix(name, kind.shape, sharding, region, newton_schulz_flops(*region.sizes[-2:]))
            for region in regions
        ]

    def _give(self, exchange: MatrixExchange) -> Callable[[], list[Tensor]]:
        """Update the momentum of a round's parameters and decay their weights, and begin to give the updates
        to their owners."""
        groups = {p: group for group in self.param_groups for p in group["params"]}
        updates = {name: self._momentum(self._named[name], groups) for name in exchange.names}
        return exchange.to_owners(updates)

    def _momentum(self, p: Tensor, groups: Mapping[Tensor, Mapping[str, Any]]) -> Tensor:
        assert p.grad is not None
        weight, gradient = local_part(p), local_part(p.grad)
        buffer, group = local_part(self.state[p]["momentum_buffer"]), groups[p]
        if self.grad_scale is not None:
            gradient = gradient / self.grad_scale.to(weight.device)
        if self.found_inf is not None:
            # with its momentum, which is finite, as the gradient, a momentum stays what it is
            gradient = torch.where(self.found_inf.to(weight.device) != 0, buffer, gradient)
        buffer.lerp_(gradient, 1 - group["momentum"])
        weight.mul_(1 - group["lr"] * group["weight_decay"] * self._keep(weight.device))
        return gradient.lerp(buffer, group["momentum"])

    def _apply(self, results: Sequence[tuple[MatrixPiece, Tensor]]) -> None:
        """Subtract this rank's parts of the orthogonal updates."""
        rates = {p: group["lr"] for group in self.param_groups for p in group["params"]}
        for piece, update in results:
            matrix = piece.matrix
            p = self._named[matrix.name]
            weight, dim = local_part(p), self._kinds[matrix.name].dim
            outputs = matrix.region.sizes[dim]
            rate = rates[p] * self._lr_factor(outputs, math.prod(matrix.region.sizes[-2:]) // outputs)
            update = update.to(weight.device, weight.dtype)
            weight[piece.in_part].sub_(update * (rate * self._keep(weight.device)))

    def _keep(self, device: torch.device) -> Tensor | float:
        """1, or 0 in a step that changes nothing."""
        return 1.0 if self.found_inf is None else 1 - self.found_inf.to(device)
