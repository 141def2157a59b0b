"""Plain training: one process, eager, full batches, without parallel/ and train/step.py."""

import fnmatch
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.func import functional_call

from meshwright.models.llama import Llama
from meshwright.models.loss import IGNORE_INDEX
from meshwright.train.config import Config
from meshwright.train.data.sample_order import sample_indices
from meshwright.train.data.sequences import Batch, make_sequence_shape, read_batch
from meshwright.train.optim.optimizer import learning_rate
from tests.support.stores import load_corpus

EVALUATE_AFTER = 2  # steps


def pad_unevenly(tokens: Tensor, targets: Tensor) -> Tensor:
    """Ignore the end of each row of targets, of a length that depends only on the row's content."""
    T = tokens.shape[1]
    kept = T - tokens.sum(dim=1) % (T - 1)
    return targets.masked_fill(torch.arange(T) >= kept[:, None], IGNORE_INDEX)


def train_plainly(config: Config, steps: int, dtype: torch.dtype = torch.float32) -> dict[str, object]:
    """Train without parallelism on the config's data. Return losses, gradient norms, the first step's
    gradients, initial weights, every step's tokens[step, sequence, token], and the held-out loss after step
    EVALUATE_AFTER.

    The last step's batch is padded unevenly. Forward and backward compute in `dtype`; weights are float32.
    """
    model = Llama(config.model)
    model.initialise(config.run.seed)
    for name, p in model.named_parameters():
        p.requires_grad_(not any(fnmatch.fnmatchcase(name, pattern) for pattern in config.train.freeze))
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizers = _optimizers(model, config)
    corpus = load_corpus(config.data)
    train, held_out = corpus.sources[0].split, corpus.evaluation_sets["held_out"]
    sequences = make_sequence_shape(
        config.data, corpus.tokenizer, config.train.seq_len, config.model.vocab_size
    )
    n, G = (train.tokens - 1) // config.train.seq_len, config.train.global_batch_size
    losses, norms, seen, grads, eval_loss = [], [], [], {}, None
    for step in range(1, steps + 1):
        order = sample_indices(np.arange((step - 1) * G, step * G), n, config.run.seed)
        batch = read_batch([train], rows_of(order), sequences)
        targets = pad_unevenly(batch.tokens, batch.targets) if step == steps else batch.targets
        loss = _loss(model, batch, targets, dtype)
        loss.backward()
        grads = grads or {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), config.train.grad_clip).item())
        losses.append(loss.item())
        seen.append(batch.tokens)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(config.optim, step, steps)
            with mock.patch.object(Tensor, "bfloat16", Tensor.float):  # torch's Muon computes in bfloat16
                optimizer.step()
        model.zero_grad()
        if step == EVALUATE_AFTER:
            evaluated = read_batch([held_out], rows_of(np.arange(config.train.eval_sequences)), sequences)
            eval_loss = _loss(model, evaluated, evaluated.targets, dtype).item()
    return {
        "losses": losses,
        "norms": norms,
        "grads": grads,
        "weights": weights,
        "tokens": torch.stack(seen),
        "eval_loss": eval_loss,
    }


def rows_of(indices: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return rows[B] = (split, index) of the only split."""
    return np.stack((np.zeros_like(indices), indices), axis=1)


def _loss(model: nn.Module, batch: Batch, targets: Tensor, dtype: torch.dtype) -> Tensor:
    cast = {name: p.to(dtype) for name, p in model.named_parameters(remove_duplicate=False)}
    inputs = (batch.tokens, None, batch.first)
    logits = functional_call(model, cast, inputs) if dtype != torch.float32 else model(*inputs)
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORE_INDEX)


def _optimizers(model: nn.Module, config: Config) -> list[torch.optim.Optimizer]:
    """Return torch's AdamW, and for `optim.name=muon` torch's Muon of the matrices in blocks."""
    decay, optim = {"weight_decay": config.optim.weight_decay}, config.optim
    named = dict(model.named_parameters())
    in_blocks = [p for name, p in named.items() if p.dim() > 1 and name.startswith("layers.")]
    head = [p for name, p in named.items() if name == "head.output.weight"]
    others = [p for name, p in named.items() if p.dim() == 1 or "tok_embeddings" in name]
    muon = optim.name == "muon"
    groups = [
        {"params": head if muon else in_blocks + head, **decay},
        {"params": others, "weight_decay": 0.0},
    ]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(groups, betas=optim.betas, eps=optim.eps, foreach=False)
    ]
    if muon:
        optimizers.append(torch.optim.Muon(in_blocks, adjust_lr_fn=optim.muon.adjust_lr_fn, **decay))
    return optimizers
