"""Models of others, as functions for `model.factory`, and the keys of train.main for them."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.zoo import case
from tests.support.launch import TINY

VOCABULARY = 264  # of bytes, with the special ids of our tokenizer
HF_SIZES = {**case.HF_SIZES, "num_hidden_layers": 2, "vocab_size": VOCABULARY}
RUN = TINY[5:]  # the keys of a tiny run without those of our Llama's shape


def causal_lm(model_type: str, **changes: Any) -> list[str]:
    """The keys of a small model of transformers."""
    args = {"model_type": model_type, **HF_SIZES, **changes}
    given = [f"--model.args.{key}={'null' if value is None else value}" for key, value in args.items()]
    return ["--model.factory=meshwright.models.from_transformers:causal_lm", *given]


class Mixer(nn.Module):
    """A block without attention: a mean of the tokens before, and a feed-forward part."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 64), nn.Linear(64, width)

    def forward(self, x: Tensor) -> Tensor:
        seen = torch.arange(1, x.shape[1] + 1, device=x.device)[:, None]
        return x + self.down(self.up(self.norm(x.cumsum(1) / seen)).relu())


class Core(nn.Module):
    """Causal attention: q, k and v[B, T, heads, H] -> [B, T, heads, H]."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        of_heads = (x.transpose(1, 2) for x in (q, k, v))
        return nn.functional.scaled_dot_product_attention(*of_heads, is_causal=True).transpose(1, 2)


class Attention(nn.Module):
    """A block of attention only, with `heads` heads."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.norm = heads, nn.LayerNorm(width)
        self.qkv, self.core, self.out = nn.Linear(width, 3 * width), Core(), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).unbind(2)
        return x + self.out(self.core(q, k, v).flatten(2))


class Positioned(nn.Module):
    """A model of one's own that says where its attention is, and takes positions."""

    attention_cores = ("blocks.*.core",)

    def __init__(self, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.ids, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(64, width)
        self.blocks = nn.ModuleList(Attention(width, heads) for _ in range(3))
        self.logits = nn.Linear(width, VOCABULARY)

    def forward(self, ids: Tensor, positions: Tensor | None = None) -> Tensor:
        if positions is None:
            positions = torch.arange(ids.shape[1], device=ids.device)
        x = self.ids(ids) + self.places(positions)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.logits(x)
        return logits


class Scores(nn.Linear):
    """Logits, or with targets the loss."""

    def forward(self, x: Tensor, targets: Tensor | None = None, divisor: Tensor | float = 1.0) -> Tensor:
        logits = super().forward(x)
        if targets is None:
            return logits
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / divisor


class Publishing(nn.Module):
    """A model of one's own that computes its loss, and writes its initial values."""

    logits_and_loss, config = ("scores", "scores"), SimpleNamespace(vocab_size=VOCABULARY, max_seq_len=48)

    def __init__(self) -> None:
        super().__init__()
        self.ids, self.scores = nn.Embedding(VOCABULARY, 16), Scores(16, VOCABULARY)
        self.blocks = nn.ModuleList(Mixer(16) for _ in range(2))

    def set_z_loss(self, z_loss: float) -> None: ...

    def initialise(self, seed: int, copy: Any) -> None:
        for parameter in self.parameters():
            copy(parameter, torch.full(parameter.shape, 0.01 * seed))

    def forward(
        self, tokens: Tensor, targets: Any = None, first: Any = None, divisor: Any = 1.0, *_: Any
    ) -> Any:
        x = self.ids(tokens)
        for block in self.blocks:
            x = block(x)
        return self.scores(x, targets, 1.0 if divisor is None else divisor)


class Inside(nn.Module):
    """Positions beside blocks in containers, which have no forward."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.randn(64, width))
        self.blocks = nn.ModuleList(nn.ModuleList([Mixer(width), nn.Linear(width, width)]) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.positions[: x.shape[1]]
        for mixer, linear in self.blocks:
            x = linear(mixer(x))
        return x


class Rooted(nn.Module):
    """Parameters of the model itself, one of them a scalar; of modules that are never called, one of them
    shared with a module that is; and of a module whose weight is read outside of it too."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.bias, self.scale = nn.Parameter(torch.randn(width)), nn.Parameter(torch.ones(()))
        self.ids, self.never_called = nn.Embedding(VOCABULARY, width), nn.Embedding(4, width)
        self.shared, self.first, self.again = (nn.Linear(width, width) for _ in range(3))
        self.first.weight = self.shared.weight
        self.inside, self.logits = Inside(width), nn.Linear(width, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.first(self.ids(ids)) + self.bias + self.never_called.weight[1]
        x = self.inside(self.again(x))
        logits: Tensor = self.logits(x @ self.again.weight.t() * self.scale)
        return logits


def rooted() -> nn.Module:
    """A model whose units are not only modules that are called one after the other."""
    return Rooted()


def mixer(width: int = 32, n_layers: int = 2) -> nn.Module:
    """A model of one's own that gives logits. Its blocks are not in a list of their own."""
    blocks = [Mixer(width) for _ in range(n_layers)]
    return nn.Sequential(nn.Embedding(VOCABULARY, width), *blocks, nn.Linear(width, VOCABULARY))


class Features(nn.Sequential):
    """A model with random numbers that no checkpoint has: a buffer and a list."""

    waves: Tensor

    def __init__(self) -> None:
        super().__init__(*mixer())
        self.register_buffer("waves", torch.empty(VOCABULARY), persistent=False)
        self.offsets = [torch.rand(VOCABULARY)]
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.waves.uniform_()

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = super().forward(ids) * self.waves + self.offsets[0]
        return logits


def features() -> nn.Module:
    """A model of random features."""
    return Features()


def anchored() -> nn.Module:
    """That model with a list of tensors, of which one depends on its parameters, and of a module."""
    model = Features()
    model.offsets = [model.offsets[0], model[-1].bias.detach() + 1, model[1]]
    return model


def regression() -> tuple[nn.Module, tuple[Tensor]]:
    """A model without tokens and logits."""
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)), (torch.zeros(2, 8),)


def loss_only() -> nn.Module:
    """A model that takes tokens and gives a loss of its own."""

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mixer()

        def forward(self, ids: Tensor) -> Tensor:
            logits: Tensor = self.inner(ids)
            return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())

    return Loss()


def nothing() -> str:
    """Not a model."""
    return "model"


def dropping() -> nn.Module:
    """A model of one's own with dropout between its blocks."""
    drop = nn.Dropout(0.5)
    blocks = [part for _ in range(2) for part in (Mixer(32), drop)]
    return nn.Sequential(nn.Embedding(VOCABULARY, 32), *blocks, nn.Linear(32, VOCABULARY))


class Notes:
    """What a block keeps between forwards, where nobody looks for tensors."""

    last: Tensor | None = None


class Noting(Mixer):
    """A block whose forward keeps a tensor that has a gradient."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.notes = Notes()

    def forward(self, x: Tensor) -> Tensor:
        self.notes.last = super().forward(x)
        return self.notes.last


def noting() -> nn.Module:
    """A model that trains, but cannot be copied after a forward, and so not traced."""
    return nn.Sequential(nn.Embedding(VOCABULARY, 32), Noting(32), Noting(32), nn.Linear(32, VOCABULARY))


class Scaled(nn.Module):
    """A product with a buffer that is saved, before one that is not."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("scale", torch.empty(width))
        self.register_buffer("shift", torch.empty(width), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.scale.copy_(torch.linspace(0.5, 1.5, self.scale.numel()))
        self.shift.zero_()

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale + self.shift


class NanoGPT(nn.Module):
    """A GPT as researchers write it: learned positions, and a head tied to the embedding."""

    def __init__(self, width: int = 32, layers: int = 2) -> None:
        super().__init__()
        parts = {"wte": nn.Embedding(VOCABULARY, width), "wpe": nn.Embedding(64, width)}
        blocks = nn.ModuleList(Attention(width, 4) for _ in range(layers))
        self.transformer = nn.ModuleDict({**parts, "h": blocks, "scaled": Scaled(width)})
        self.lm_head = nn.Linear(width, VOCABULARY, bias=False)
        self.transformer.wte.weight = self.lm_head.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.transformer.wte(ids) + self.transformer.wpe(torch.arange(ids.shape[1], device=ids.device))
        for block in self.transformer.h:
            x = block(x)
        logits: Tensor = self.lm_head(self.transformer.scaled(x))
        return logits


class Nano(NanoGPT):
    """A GPT whose forward, as that of nanoGPT, returns logits of the last token alone, or with targets those
    of all tokens and a mean loss, and refuses a length that no config publishes."""

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> Any:
        assert idx.shape[1] <= 48, f"{idx.shape[1]} tokens are too many"
        logits = super().forward(idx)
        if targets is None:
            return logits[:, [-1]], None
        return logits, nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def nano() -> tuple[nn.Module, dict[str, Tensor], Any]:
    """That GPT, the example that makes it return all logits, and a loss that no process can be sent."""
    ids = torch.zeros(2, 16, dtype=torch.int64)
    return Nano(), {"idx": ids, "targets": ids}, lambda outputs, _: outputs[1]
