"""Models as people write them by hand, in the manner of well-known code."""

import math

import torch
from einops import rearrange, repeat
from einops.layers.torch import Rearrange
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.zoo.case import TOKENS, VOCABULARY

WIDTH, HEADS = 32, 4


def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    """Attention of [rows, tokens, width] tensors with HEADS heads."""
    q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2).flatten(2)


class GPTAttention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.c_attn = nn.Linear(width, 3 * width)
        self.c_proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(attend(*self.c_attn(x).split(x.shape[-1], dim=2), causal=True))


class GPTMLP(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.c_fc, self.gelu = nn.Linear(width, 4 * width), nn.GELU()
        self.c_proj = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(self.gelu(self.c_fc(x)))


class GPTBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(width), GPTAttention(width)
        self.ln_2, self.mlp = nn.LayerNorm(width), GPTMLP(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class NanoGPT(nn.Module):
    """In the manner of nanoGPT: a tied head, `_init_weights` by `apply`, residual projections scaled by the
    depth in the constructor, and a forward that returns logits and loss."""

    def __init__(self, layers: int = 3, width: int = WIDTH) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(VOCABULARY, width),
                "wpe": nn.Embedding(64, width),
                "h": nn.ModuleList([GPTBlock(width) for _ in range(layers)]),
                "ln_f": nn.LayerNorm(width),
            }
        )
        self.lm_head = nn.Linear(width, VOCABULARY, bias=False)
        self.transformer.wte.weight = self.lm_head.weight
        self.apply(self._init_weights)
        for name, parameter in self.named_parameters():
            if name.endswith("c_proj.weight"):
                nn.init.normal_(parameter, mean=0.0, std=0.02 / math.sqrt(2 * layers))

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, mean=0.0, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        positions = torch.arange(idx.shape[1], dtype=torch.long, device=idx.device)
        x = self.transformer.wte(idx) + self.transformer.wpe(positions)
        for block in self.transformer.h:
            x = block(x)
        logits = self.lm_head(self.transformer.ln_f(x))
        loss = None if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return logits, loss


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps, self.weight = eps, nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


class LlamaAttention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x: Tensor, freqs_cis: Tensor) -> Tensor:
        rows, tokens, _ = x.shape

        def rotated(t: Tensor) -> Tensor:
            pairs = torch.view_as_complex(t.view(rows, tokens, HEADS, -1, 2))
            return torch.view_as_real(pairs * freqs_cis[None, :, None]).flatten(2)

        return self.wo(attend(rotated(self.wq(x)), rotated(self.wk(x)), self.wv(x), causal=True))


class LlamaFeedForward(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.w1, self.w3 = (nn.Linear(width, 2 * width, bias=False) for _ in range(2))
        self.w2 = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class LlamaBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention, self.feed_forward = LlamaAttention(width), LlamaFeedForward(width)
        self.attention_norm, self.ffn_norm = RMSNorm(width), RMSNorm(width)

    def forward(self, x: Tensor, freqs_cis: Tensor) -> Tensor:
        h = x + self.attention(self.attention_norm(x), freqs_cis)
        return h + self.feed_forward(self.ffn_norm(h))


class ReferenceLlama(nn.Module):
    """In the manner of Meta's reference: the rotations are complex numbers, computed by the constructor."""

    def __init__(self, layers: int = 3, width: int = WIDTH, longest: int = 64) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList([LlamaBlock(width) for _ in range(layers)])
        self.norm, self.output = RMSNorm(width), nn.Linear(width, VOCABULARY, bias=False)
        size = width // HEADS
        angles = torch.outer(torch.arange(longest), 10000.0 ** (-torch.arange(0, size, 2).float() / size))
        self.register_buffer("freqs_cis", torch.polar(torch.ones_like(angles), angles), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.tok_embeddings(tokens)
        for layer in self.layers:
            h = layer(h, self.freqs_cis[: tokens.shape[1]])
        return self.output(self.norm(h))


class LucidFeedForward(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.LayerNorm(dim), nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


class LucidAttention(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.to_qkv, self.to_out = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.register_buffer("mask", None, persistent=False)

    def get_mask(self, n: int, device: torch.device) -> Tensor:
        if self.mask is not None and self.mask.shape[-1] >= n:
            return self.mask[:n, :n]
        mask = torch.ones((n, n), device=device, dtype=torch.bool).triu(1)
        self.register_buffer("mask", mask, persistent=False)
        return mask

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            rearrange(t, "b n (h d) -> b h n d", h=HEADS) for t in self.to_qkv(self.norm(x)).chunk(3, dim=-1)
        )
        scores = torch.einsum("b h i d, b h j d -> b h i j", q, k) * q.shape[-1] ** -0.5
        scores = scores.masked_fill(self.get_mask(x.shape[1], x.device), -torch.finfo(scores.dtype).max)
        return self.to_out(rearrange(scores.softmax(dim=-1) @ v, "b h n d -> b n (h d)"))


class LucidViT(nn.Module):
    """In the manner of lucidrains: a ModuleList of ModuleLists, bare parameters, a mask that the first
    forward registers."""

    def __init__(self, dim: int = WIDTH, depth: int = 3, patch: int = 4) -> None:
        super().__init__()
        self.to_patch_embedding = nn.Sequential(
            Rearrange("b c (h p1) (w p2) -> b (h w) (p1 p2 c)", p1=patch, p2=patch),
            nn.LayerNorm(3 * patch**2),
            nn.Linear(3 * patch**2, dim),
            nn.LayerNorm(dim),
        )
        self.pos_embedding = nn.Parameter(torch.randn(1, (16 // patch) ** 2 + 1, dim))
        self.cls_token = nn.Parameter(torch.randn(1, 1, dim))
        self.layers = nn.ModuleList([])
        for _ in range(depth):
            self.layers.append(nn.ModuleList([LucidAttention(dim), LucidFeedForward(dim)]))
        self.norm, self.mlp_head = nn.LayerNorm(dim), nn.Linear(dim, 5)

    def forward(self, img: Tensor) -> Tensor:
        x = self.to_patch_embedding(img)
        x = torch.cat((x, repeat(self.cls_token, "1 1 d -> b 1 d", b=x.shape[0])), dim=1) + self.pos_embedding
        for attn, ff in self.layers:
            x = attn(x) + x
            x = ff(x) + x
        return self.mlp_head(self.norm(x)[:, -1])


class SoftMoEBlock(nn.Module):
    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.norm, self.gate = nn.LayerNorm(width), nn.Linear(width, experts)
        self.experts = nn.ModuleList([GPTMLP(width) for _ in range(experts)])

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        shares = self.gate(h).softmax(dim=-1)
        return x + sum(shares[..., i, None] * expert(h) for i, expert in enumerate(self.experts))


class SoftMoE(nn.Module):
    """As many experts in a layer as layers; every token uses all of them."""

    def __init__(self, layers: int = 4, experts: int = 4, width: int = WIDTH) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList([SoftMoEBlock(width, experts) for _ in range(layers)])
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class LSTMLanguageModel(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.rnn = nn.LSTM(width, width, num_layers=2, batch_first=True)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.rnn(self.embed(tokens))[0])


class LoopedTransformer(nn.Module):
    """Two blocks that run three times each, with the input added before every round."""

    def __init__(self, width: int = WIDTH, loops: int = 3) -> None:
        super().__init__()
        self.loops, self.embed = loops, nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList([GPTBlock(width) for _ in range(2)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = start = self.embed(tokens)
        for _ in range(self.loops):
            x = x + start
            for block in self.blocks:
                x = block(x)
        return self.head(self.norm(x))


class Translator(nn.Module):
    """nn.Transformer as in torch's tutorial: its own initialisation of the whole model."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(VOCABULARY, width), nn.Embedding(VOCABULARY, width)
        self.transformer = nn.Transformer(width, HEADS, 2, 2, 2 * width, dropout=0.0, batch_first=True)
        self.generator = nn.Linear(width, VOCABULARY)

    def forward(self, src: Tensor, tgt: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tgt.shape[1], device=tgt.device)
        return self.generator(self.transformer(self.source(src), self.target(tgt), tgt_mask=mask))


class DoubleConv(nn.Sequential):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(
            nn.Conv2d(inputs, outputs, 3, padding=1, bias=False),
            nn.GroupNorm(4, outputs),
            nn.SiLU(),
            nn.Conv2d(outputs, outputs, 3, padding=1),
            nn.SiLU(),
        )


class UNet(nn.Module):
    """Skips over levels: down, middle, up by transposed convolutions."""

    def __init__(self, channels: int = 8) -> None:
        super().__init__()
        self.downs = nn.ModuleList([DoubleConv(3, channels), DoubleConv(channels, 2 * channels)])
        self.middle = DoubleConv(2 * channels, 4 * channels)
        self.ups = nn.ModuleList([DoubleConv(4 * channels, 2 * channels), DoubleConv(2 * channels, channels)])
        self.scales = nn.ModuleList(
            [nn.ConvTranspose2d(n * channels, n * channels // 2, 2, stride=2) for n in (4, 2)]
        )
        self.out = nn.Conv2d(channels, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for down in self.downs:
            x = down(x)
            skips.append(x)
            x = F.max_pool2d(x, 2)
        x = self.middle(x)
        for up, scale in zip(self.ups, self.scales, strict=True):
            x = up(torch.cat((skips.pop(), scale(x)), dim=1))
        return self.out(x)


class PreNormBlock(nn.Module):
    def __init__(self, width: int, causal: bool) -> None:
        super().__init__()
        self.causal, self.norm1, self.norm2 = causal, nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = GPTMLP(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.proj(attend(*self.qkv(self.norm1(x)).chunk(3, dim=-1), causal=self.causal))
        return x + self.mlp(self.norm2(x))


class Clip(nn.Module):
    """Two towers, with bare position embeddings and a scalar temperature, in the manner of OpenAI's CLIP."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 4, stride=4, bias=False)
        self.class_embedding = nn.Parameter(width**-0.5 * torch.randn(width))
        self.image_positions = nn.Parameter(width**-0.5 * torch.randn(17, width))
        self.image_blocks = nn.ModuleList([PreNormBlock(width, causal=False) for _ in range(2)])
        self.token_embedding = nn.Embedding(VOCABULARY, width)
        self.text_positions = nn.Parameter(torch.empty(TOKENS, width))
        self.text_blocks = nn.ModuleList([PreNormBlock(width, causal=True) for _ in range(2)])
        self.ln_final, self.ln_post = nn.LayerNorm(width), nn.LayerNorm(width)
        self.text_projection = nn.Parameter(torch.empty(width, width))
        self.logit_scale = nn.Parameter(torch.ones([]) * math.log(1 / 0.07))
        nn.init.normal_(self.text_positions, std=0.01)
        nn.init.normal_(self.text_projection, std=width**-0.5)

    def forward(self, image: Tensor, text: Tensor) -> Tensor:
        """Return the similarity of each image and its text, [rows]."""
        x = self.conv1(image).flatten(2).transpose(1, 2)
        x = torch.cat((self.class_embedding.expand(x.shape[0], 1, -1), x), dim=1) + self.image_positions
        for block in self.image_blocks:
            x = block(x)
        y = self.token_embedding(text) + self.text_positions
        for block in self.text_blocks:
            y = block(y)
        images, texts = self.ln_post(x[:, 0]), self.ln_final(y[:, -1]) @ self.text_projection
        return self.logit_scale.exp() * F.cosine_similarity(images, texts)


def matching(outputs: Tensor, _batch: object) -> Tensor:
    """A loss by pair, as SigLIP's for positive ones: it needs no other ranks' pairs."""
    return F.softplus(-outputs).mean()


class MixerBlock(nn.Module):
    def __init__(self, tokens: int, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mlp_tokens, self.mlp_channels = GPTMLP(tokens), GPTMLP(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mlp_tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.mlp_channels(self.norm2(x))


class Mixer(nn.Sequential):
    """MLP-Mixer, as a Sequential."""

    def __init__(self, width: int = WIDTH, layers: int = 3) -> None:
        super().__init__(
            nn.Conv2d(3, width, 4, stride=4),
            Rearrange("b c h w -> b (h w) c"),
            *(MixerBlock(16, width) for _ in range(layers)),
            nn.LayerNorm(width),
        )
        self.append(Rearrange("b n c -> b c n"))
        self.append(nn.AdaptiveAvgPool1d(1))
        self.append(nn.Flatten())
        self.append(nn.Linear(width, 5))


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


def modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    return x * (1 + scale[:, None]) + shift[:, None]


class TimestepEmbedder(nn.Module):
    def __init__(self, width: int, frequencies: int = 16) -> None:
        super().__init__()
        self.frequencies = frequencies
        self.mlp = nn.Sequential(nn.Linear(frequencies, width), nn.SiLU(), nn.Linear(width, width))

    def forward(self, t: Tensor) -> Tensor:
        half = self.frequencies // 2
        freqs = torch.exp(-math.log(10000) * torch.arange(half, device=t.device) / half)
        angles = t[:, None].float() * freqs
        return self.mlp(torch.cat((angles.cos(), angles.sin()), dim=-1))


class DiTBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = (nn.LayerNorm(width, elementwise_affine=False, eps=1e-6) for _ in range(2))
        self.qkv, self.proj, self.mlp = nn.Linear(width, 3 * width), nn.Linear(width, width), GPTMLP(width)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        shift_a, scale_a, gate_a, shift_m, scale_m, gate_m = self.adaLN_modulation(c).chunk(6, dim=1)
        h = modulate(self.norm1(x), shift_a, scale_a)
        x = x + gate_a[:, None] * self.proj(attend(*self.qkv(h).chunk(3, dim=-1)))
        return x + gate_m[:, None] * self.mlp(modulate(self.norm2(x), shift_m, scale_m))


class DiTHead(nn.Module):
    def __init__(self, width: int, outputs: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)
        self.linear = nn.Linear(width, outputs)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 2 * width))

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        return self.linear(modulate(self.norm(x), *self.adaLN_modulation(c).chunk(2, dim=1)))


class DiT(nn.Module):
    """In the manner of Meta's DiT: frozen sine positions as a bare parameter, adaLN-zero, and an
    initialisation of the whole model in its constructor."""

    def __init__(self, width: int = WIDTH, layers: int = 3, patch: int = 4) -> None:
        super().__init__()
        self.patch, self.x_embedder = patch, nn.Conv2d(3, width, patch, stride=patch)
        self.t_embedder, self.y_embedder = TimestepEmbedder(width), nn.Embedding(11, width)
        self.pos_embed = nn.Parameter(torch.zeros(1, 16, width), requires_grad=False)
        self.blocks = nn.ModuleList([DiTBlock(width) for _ in range(layers)])
        self.final_layer = DiTHead(width, 3 * patch**2)
        self.initialize_weights()

    def initialize_weights(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)
        width = self.pos_embed.shape[-1]
        angles = torch.outer(torch.arange(16.0), 10000 ** (-torch.arange(0, width, 2) / width))
        self.pos_embed.data.copy_(torch.cat((angles.sin(), angles.cos()), dim=1))
        nn.init.normal_(self.t_embedder.mlp[0].weight, std=0.02)
        for part in (*self.blocks, self.final_layer):
            nn.init.zeros_(part.adaLN_modulation[-1].weight)
            nn.init.zeros_(part.adaLN_modulation[-1].bias)
        nn.init.zeros_(self.final_layer.linear.weight)
        nn.init.zeros_(self.final_layer.linear.bias)

    def forward(self, x: Tensor, t: Tensor, y: Tensor) -> Tensor:
        c = self.t_embedder(t) + self.y_embedder(y)
        h = self.x_embedder(x).flatten(2).transpose(1, 2) + self.pos_embed
        for block in self.blocks:
            h = block(h, c)
        p, side = self.patch, x.shape[-1] // self.patch
        return rearrange(self.final_layer(h, c), "b (h w) (p q c) -> b c (h p) (w q)", h=side, p=p, q=p)
