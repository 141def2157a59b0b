"""Tiny models of transformers, torchvision and timm."""

import importlib
import sys
from typing import Any

import torch
from torch import nn

from benchmarks.zoo.case import HF_SIZES, ROWS, TOKENS, Batch, ids, numbers

LIBRARY = torch.library.Library("torchvision", "FRAGMENT")


def import_torchvision() -> None:
    """Import torchvision, if it is installed. One that was built for another torch cannot load its kernels,
    and asks for two of them: they are declared, and never called."""
    try:
        importlib.import_module("torchvision")
    except ModuleNotFoundError:
        return
    except RuntimeError:  # operator torchvision::nms does not exist
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        for name in ("nms", "qnms"):
            LIBRARY.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        importlib.import_module("torchvision")


import_torchvision()  # before transformers, which imports it too

SIZES: dict[str, Any] = {**HF_SIZES, "use_cache": False}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
TINY_IMAGES = {"image_size": 16, "patch_size": 4, "num_labels": 5}
EXPERTS = {"moe_intermediate_size": 16, "num_experts_per_tok": 2}
LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "head_dim": 4,
}
STATES = {"state_size": 8, "conv_kernel": 4, "expand": 2}
GPT2 = {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64}
GPT2_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
ENCODER_DECODER = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "dropout": 0.0,
    "decoder_start_token_id": 1,
}
WHISPER = {"num_mel_bins": 8, "max_source_positions": 8, "max_target_positions": 16, "pad_token_id": 0}
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0}
TIMM_VIT = {"img_size": 16, "patch_size": 4, "embed_dim": 32, "depth": 3, "num_heads": 4}
ALTERNATING = {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 4,
}


def hf(model: str, config: str, **changes: Any) -> nn.Module:
    """Return the class `model` of transformers for a tiny config of the class `config`."""
    import transformers

    made: nn.Module = getattr(transformers, model)(getattr(transformers, config)(**{**SIZES, **changes}))
    return made


def causal(kind: str, **changes: Any) -> nn.Module:
    """Return transformers' causal language model of a kind such as "Llama"."""
    import transformers

    config = getattr(transformers, f"{kind}Config")(**{**SIZES, **changes})
    made: nn.Module = transformers.AutoModelForCausalLM.from_config(config)
    return made


def wav2vec2() -> nn.Module:
    conv = {"conv_dim": (16, 16), "conv_kernel": (4, 3), "conv_stride": (2, 2), "num_feat_extract_layers": 2}
    dropouts = dict.fromkeys(("feat_proj_dropout", "hidden_dropout", "attention_dropout", "layerdrop"), 0.0)
    rest = {"activation_dropout": 0.0, "final_dropout": 0.0, "num_conv_pos_embeddings": 4}
    masks = {"num_conv_pos_embedding_groups": 2, "mask_time_prob": 0.0, "classifier_proj_size": 16}
    name = "Wav2Vec2"
    return hf(f"{name}ForSequenceClassification", f"{name}Config", **conv, **dropouts, **rest, **masks)


def whisper_batch(seed: int) -> Batch:
    return {"input_features": numbers(ROWS, 8, 16, seed=seed), "decoder_input_ids": ids(seed)}


def two_texts(seed: int) -> Batch:
    return {"input_ids": ids(seed), "decoder_input_ids": ids(seed + 100, tokens=TOKENS - 2)}


def gemma_batch(seed: int) -> Batch:
    mask = torch.ones(ROWS, TOKENS, dtype=torch.long)
    mask[1, 5:] = 0  # padding: a mask made outside of the blocks
    return {"input_ids": ids(seed), "attention_mask": mask}


def torchvision_models() -> Any:
    import torchvision

    return torchvision.models


def torchvision_vit() -> nn.Module:
    made: nn.Module = torchvision_models().VisionTransformer(16, 4, 3, 4, 32, 48, num_classes=5)
    return made


def resnet18() -> nn.Module:
    models = torchvision_models()
    made: nn.Module = models.ResNet(models.resnet.BasicBlock, [2, 2, 2, 2], num_classes=5)
    return made


def freeze_norms(model: nn.Module) -> nn.Module:
    """Put batch norms into eval mode."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval()
    return model


def swin() -> nn.Module:
    made: nn.Module = torchvision_models().SwinTransformer(
        [2, 2], 16, [2, 2], [2, 4], [2, 2], stochastic_depth_prob=0.0, num_classes=5
    )
    return made


def convnext() -> nn.Module:
    models = torchvision_models()
    block = models.convnext.CNBlockConfig
    made: nn.Module = models.ConvNeXt([block(8, 16, 2), block(16, None, 2)], num_classes=5)
    return made


def timm_model(name: str, **sizes: Any) -> nn.Module:
    import timm

    made: nn.Module = timm.create_model(name, num_classes=5, **sizes)
    return made
