"""The tiny models of the gallery, whose parts a sharding replaces: what enters and leaves a split layer."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

DIM, HIDDEN, IDS, HEADS, EXPERTS, TOKENS = 16, 24, 40, 2, 4, 8


def same(x: Tensor) -> Tensor:
    return x


class Experts(nn.Module):
    """Two of four experts for each token, all computed; the probabilities of the others are 0."""

    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(EXPERTS, DIM, HIDDEN) / 4)
        self.w2 = nn.Parameter(torch.randn(EXPERTS, HIDDEN, DIM) / 4)
        self.bias = nn.Parameter(torch.randn(EXPERTS, DIM))
        self.enter, self.chances, self.leave, self.first = same, same, same, 0
        self.weighted = torch.mul  # a chance and what the expert computes
        self.bias_share = 1.0  # of what this rank adds

    def forward(self, x: Tensor, chances: Tensor) -> Tensor:
        x, chances = self.enter(x), self.chances(chances)
        y = torch.zeros_like(x)
        for i in range(len(self.w1)):
            out = F.silu(x @ self.w1[i]) @ self.w2[i] + self.bias_share * self.bias[i]
            y = y + self.weighted(chances[:, self.first + i, None], out)
        return self.leave(y)


class Router(nn.Module):
    """Softmax over experts, of which the two largest count; the tokens of each are counted while training.
    `logits`: of the last forward, as `returned` gives them to an auxiliary loss."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(EXPERTS, DIM))
        self.register_buffer("tokens", torch.zeros(EXPERTS), persistent=False)
        self.counted, self.returned = same, same

    def forward(self, x: Tensor) -> Tensor:
        logits = F.linear(x, self.weight)
        self.logits, scores = self.returned(logits), logits.softmax(-1)
        top = scores.topk(2).indices
        chosen = torch.zeros_like(scores).scatter(-1, top, 1.0)
        if self.training:
            self.tokens += self.counted(chosen.detach()).sum(0)
        return scores * chosen


class Attention(nn.Module):
    """Causal attention. `gathered` and `first`: keys and values of all tokens, and this rank's first one."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.gathered, self.first, self.first_in_evaluation = same, 0, 0

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        k, v = self.gathered(k), self.gathered(v)
        first = self.first if self.training else self.first_in_evaluation
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(first)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.out(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention = nn.RMSNorm(DIM), Attention()
        self.norm2, self.router, self.experts = nn.RMSNorm(DIM), Router(), Experts()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        h = self.norm2(x).flatten(0, 1)
        return x + self.experts(h, self.router(h)).view_as(x)


class Head(nn.Linear):
    """Logits, in chunks of half of the tokens. `enter`: what each chunk goes through; `linear`: computes its
    logits; `leave`: what these go through."""

    def __init__(self) -> None:
        super().__init__(DIM, IDS, bias=False)
        self.enter: tuple[Callable[[Tensor], Tensor], ...] = (same, same)
        self.linear: tuple[Callable[[Tensor, Tensor], Tensor], ...] = (F.linear, F.linear)
        self.leave = same

    def forward(self, x: Tensor) -> Tensor:
        parts = zip(self.enter, self.linear, x.chunk(2, 1), strict=True)
        return torch.cat([self.leave(linear(enter(part), self.weight)) for enter, linear, part in parts], 1)


class Model(nn.Module):
    """Blocks of attention and experts, an embedding tied to the head. `split`, `joined`: of the tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(IDS, DIM)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = nn.RMSNorm(DIM), Head()
        self.head.weight = self.embedding.weight
        self.split, self.joined = same, same

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(self.split(ids))
        for layer in self.layers:
            x = layer(x)
        return self.joined(self.head(self.norm(x)))


class ModelWithRouterLogits(Model):
    """Gives logits, and those of each router."""

    def forward(self, ids: Tensor) -> tuple[Tensor, ...]:
        return super().forward(ids), *(layer.router.logits for layer in self.layers)


def build() -> tuple[Model, tuple[Tensor]]:
    """The model, and ids [16, TOKENS], more than a check needs."""
    return Model(), (torch.arange(16 * TOKENS).view(16, TOKENS) * 7 % IDS,)
