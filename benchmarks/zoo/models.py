"""The models to try, by name."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from benchmarks.zoo import handwritten as by_hand
from benchmarks.zoo import published as hub
from benchmarks.zoo.case import (
    ROWS,
    Batch,
    Case,
    each_token,
    ids,
    images_as,
    next_token,
    numbers,
    sign_class,
    squared_error,
    target_tokens,
    tokens_as,
)


def causal(kind: str, special: str, compiled: bool = False, **changes: object) -> Case:
    build = partial(hub.causal, kind, **changes)
    return Case("causal LM", special, build, tokens_as("input_ids"), next_token, compiled=compiled)


def encoder(model: str, config: str, special: str, **changes: object) -> Case:
    build = partial(hub.hf, model, config, **hub.NO_DROPOUT, pad_token_id=0, **changes)
    return Case("encoder", special, build, tokens_as("input_ids"), each_token)


def encoder_decoder(
    kind: str, special: str, batch: Callable[[int], Batch] = hub.two_texts, **sizes: object
) -> Case:
    build = partial(hub.hf, f"{kind}ForConditionalGeneration", f"{kind}Config", **sizes)
    return Case("encoder-decoder", special, build, batch, target_tokens)


def image_classes(
    kind: str, special: str, build: object, name: str = "x", size: int = 16, **more: object
) -> Case:
    return Case(kind, special, build, images_as(name, size), sign_class, **more)  # type: ignore[arg-type]


def timm_vit(special: str, name: str) -> Case:
    return image_classes("vision", special, partial(hub.timm_model, name, **hub.TIMM_VIT))


def by_hand_lm(special: str, build: object, name: str = "tokens", **more: object) -> Case:
    return Case("hand-written", special, build, tokens_as(name), next_token, **more)  # type: ignore[arg-type]


def with_frozen_norms(case: Case) -> Case:
    """Return the case with batch norms in eval mode, in which they write no running statistics."""
    return replace(case, build=lambda: hub.freeze_norms(case.build()))


def sounds(seed: int) -> Batch:
    return {"input_values": numbers(ROWS, 64, seed=seed)}


def diffusion_batch(seed: int) -> Batch:
    return {
        "x": numbers(ROWS, 3, 16, 16, seed=seed),
        "t": ids(seed, tokens=1)[:, 0],
        "y": ids(seed)[:, 0] % 11,
    }


def pairs(seed: int) -> Batch:
    return {"image": numbers(ROWS, 3, 16, 16, seed=seed), "text": ids(seed)}


def translations(seed: int) -> Batch:
    return {"src": ids(seed), "tgt": ids(seed + 100, tokens=10)}


NANO_STYLES = {"transformer.h.*.mlp.c_fc": "own_colwise", "transformer.h.*.mlp.c_proj": "rowwise"}
LLAMA_STYLES = {
    "layers.*.feed_forward.w1": "own_colwise",
    "layers.*.feed_forward.w3": "own_colwise",
    "layers.*.feed_forward.w2": "rowwise",
}
DIT_STYLES = {"blocks.*.mlp.c_fc": "own_colwise", "blocks.*.mlp.c_proj": "rowwise"}
MIXER_STYLES = {"*.mlp_channels.c_fc": "own_colwise", "*.mlp_channels.c_proj": "rowwise"}

CASES: dict[str, Case] = {
    "Llama": causal("Llama", "rotary positions, grouped heads", compiled=True),
    "Qwen2": causal("Qwen2", "biases of queries, keys, values"),
    "Qwen3": causal("Qwen3", "norms of each head"),
    "Mistral": causal("Mistral", "a window of attention", sliding_window=4),
    "OLMo 2": causal("Olmo2", "norms after the blocks"),
    "Phi": causal("Phi", "attention beside the feed-forward, biases", partial_rotary_factor=0.5),
    "Phi-3": causal("Phi3", "fused products"),
    "Gemma": Case(
        "causal LM",
        "scaled embedding, a mask given by the caller",
        partial(hub.causal, "Gemma"),
        hub.gemma_batch,
        next_token,
    ),
    "Gemma 2": causal("Gemma2", "two kinds of attention in turn, soft caps", **hub.ALTERNATING),
    "Gemma 3": causal("Gemma3Text", "two kinds of attention, norms of each head", True, **hub.ALTERNATING),
    "GPT-2": causal("GPT2", "Conv1D, learned positions, tied head", True, **hub.GPT2, **hub.GPT2_DROPOUT),
    "Mixtral": causal("Mixtral", "experts", num_local_experts=4),
    "Qwen3-MoE": causal("Qwen3Moe", "experts", num_experts=4, decoder_sparse_step=1, **hub.EXPERTS),
    "DeepSeek-V3": causal(
        "DeepseekV3",
        "latent attention, routed and shared experts, a dense first layer",
        n_routed_experts=4,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        num_key_value_heads=4,
        **hub.EXPERTS,
        **hub.LATENT,
    ),
    "RecurrentGemma": causal(
        "RecurrentGemma", "a recurrence with every third attention", lru_width=32, attention_window_size=8
    ),
    "Mamba": causal("Mamba", "state space", **hub.STATES, time_step_rank=4),
    "Mamba 2": causal(
        "Mamba2", "state space, heads", **hub.STATES, num_heads=4, head_dim=16, n_groups=1, chunk_size=4
    ),
    "Falcon-Mamba": causal("FalconMamba", "state space, norms inside", **hub.STATES, time_step_rank=4),
    "BERT": encoder("BertForMaskedLM", "BertConfig", "token types, a tied decoder"),
    "RoBERTa": encoder("RobertaForMaskedLM", "RobertaConfig", "positions from padding"),
    "ModernBERT": encoder(
        "ModernBertForMaskedLM", "ModernBertConfig", "local and global attention", attention_dropout=0.0
    ),
    "ViT of transformers": image_classes(
        "encoder",
        "class token, learned positions",
        partial(hub.hf, "ViTForImageClassification", "ViTConfig", **hub.NO_DROPOUT, **hub.TINY_IMAGES),
        "pixel_values",
    ),
    "wav2vec 2.0": Case("encoder", "sound: convolutions, weight norm", hub.wav2vec2, sounds, sign_class),
    "T5": encoder_decoder(
        "T5",
        "one embedding for both, relative positions in the first blocks",
        **hub.T5,
        decoder_start_token_id=0,
    ),
    "BART": encoder_decoder(
        "Bart", "one embedding for both, learned positions", **hub.ENCODER_DECODER, pad_token_id=0
    ),
    "Whisper": encoder_decoder(
        "Whisper",
        "sound: convolutions, frozen positions",
        hub.whisper_batch,
        **hub.ENCODER_DECODER,
        **hub.WHISPER,
    ),
    "torchvision ViT": image_classes("vision", "bare class token and positions", hub.torchvision_vit),
    "torchvision ResNet-18": image_classes(
        "vision", "batch norms, which write statistics", hub.resnet18, way_out=with_frozen_norms
    ),
    "torchvision Swin": image_classes("vision", "shifted windows, bare tables", hub.swin),
    "torchvision ConvNeXt": image_classes("vision", "bare layer scales", hub.convnext),
    "timm ViT": timm_vit("bare class token and positions", "vit_tiny_patch16_224"),
    "timm DeiT": timm_vit("a bare token of distillation, two heads", "deit_tiny_distilled_patch16_224"),
    "timm ConvNeXt": image_classes(
        "vision",
        "bare layer scales",
        partial(hub.timm_model, "convnext_atto", depths=(1, 1, 2, 1), dims=(8, 8, 16, 16)),
        size=64,
    ),
    "DiT": Case(
        "diffusion",
        "timesteps, adaLN-zero, frozen bare positions",
        by_hand.DiT,
        diffusion_batch,
        squared_error,
        {"styles": DIT_STYLES},
    ),
    "U-Net": Case("diffusion", "skips over levels", by_hand.UNet, images_as("x"), squared_error),
    "nanoGPT": by_hand_lm(
        "scaled initialisation in the constructor, tied head",
        by_hand.NanoGPT,
        "idx",
        asked={"styles": NANO_STYLES},
        compiled=True,
    ),
    "Meta's reference Llama": by_hand_lm(
        "complex rotations as a buffer", by_hand.ReferenceLlama, asked={"styles": LLAMA_STYLES}
    ),
    "lucidrains' ViT": image_classes(
        "hand-written",
        "a list of lists, bare class token, a mask registered by the forward",
        by_hand.LucidViT,
        "img",
    ),
    "soft MoE": by_hand_lm("as many experts as layers", by_hand.SoftMoE),
    "LSTM": by_hand_lm(
        "no blocks", by_hand.LSTMLanguageModel, way_out=lambda case: replace(case, asked={"blocks": "rnn"})
    ),
    "looped transformer": by_hand_lm("blocks that run three times", by_hand.LoopedTransformer),
    "nn.Transformer": Case(
        "hand-written",
        "initialised as a whole, its forward looks at a mask",
        by_hand.Translator,
        translations,
        target_tokens,
        needs_values=True,
    ),
    "nn.TransformerEncoder": by_hand_lm("post-norm", partial(by_hand.Encoder, dropout=0.0), "input_ids"),
    "CLIP": Case("hand-written", "two towers, a scalar parameter", by_hand.Clip, pairs, by_hand.matching),
    "MLP-Mixer": image_classes(
        "hand-written",
        "a Sequential of everything",
        by_hand.Mixer,
        "input",
        asked={"styles": MIXER_STYLES},
        compiled=True,
    ),
}
