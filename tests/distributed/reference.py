"""The plain way to train: one process, eager, whole batches, nothing of parallel/ or of the training step."""

import fnmatch

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from models.llama import Llama, init_weights
from models.loss import IGNORE_INDEX
from train.config import Config
from train.data.loader import read_batch
from train.data.order import sample_indices
from train.data.tokens import load_tokens
from train.optim import learning_rate

EVALUATE_AFTER = 5  # steps


def pad_unevenly(tokens: Tensor, targets: Tensor) -> Tensor:
    """Targets with an end of each row ignored whose length depends on the row's content alone."""
    T = tokens.shape[1]
    kept = T - tokens.sum(dim=1) % (T - 1)
    return targets.masked_fill(torch.arange(T) >= kept[:, None], IGNORE_INDEX)


def train_plainly(config: Config, steps: int, dtype: torch.dtype = torch.float32) -> dict[str, object]:
    """What plain training sees, on the same data: losses, gradient norms, the first step's gradients, initial weights,
    every step's tokens[step, sequence, token], and the loss on held-out text after step EVALUATE_AFTER.

    The last step's batch is padded unevenly. With another `dtype` forward and backward compute in it, from weights
    that stay float32.
    """
    model = Llama(config.model)
    init_weights(model, config.run.seed)
    for name, p in model.named_parameters():
        p.requires_grad_(not any(fnmatch.fnmatchcase(name, pattern) for pattern in config.train.freeze))
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = _optimizer(model, config)
    tokens = load_tokens(config.data)
    n, G, T = (len(tokens.train) - 1) // config.train.seq_len, config.train.global_batch_size, config.train.seq_len
    losses, norms, seen, grads, eval_loss = [], [], [], {}, None
    for step in range(1, steps + 1):
        batch = read_batch(tokens.train, sample_indices((step - 1) * G, G, n, config.run.seed), T)
        targets = pad_unevenly(batch.tokens, batch.targets) if step == steps else batch.targets
        loss = _loss(model, batch.tokens, targets, dtype)
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), config.train.grad_clip).item())
        grads = grads or {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        losses.append(loss.item())
        seen.append(batch.tokens)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(config.optim, step, steps)
        optimizer.step()
        optimizer.zero_grad()
        if step == EVALUATE_AFTER:
            held_out = read_batch(tokens.held_out, torch.arange(config.train.eval_sequences).numpy(), T)
            eval_loss = _loss(model, held_out.tokens, held_out.targets, dtype).item()
    return {"losses": losses, "norms": norms, "grads": grads, "weights": weights, "tokens": torch.stack(seen),
            "eval_loss": eval_loss}  # fmt: skip


def _loss(model: nn.Module, tokens: Tensor, targets: Tensor, dtype: torch.dtype) -> Tensor:
    cast = {name: p.to(dtype) for name, p in model.named_parameters(remove_duplicate=False)}
    logits = functional_call(model, cast, tokens) if dtype != torch.float32 else model(tokens)
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORE_INDEX)


def _optimizer(model: nn.Module, config: Config) -> torch.optim.Optimizer:
    matrices = [p for name, p in model.named_parameters() if p.dim() > 1 and "tok_embeddings" not in name]
    others = [p for name, p in model.named_parameters() if p.dim() == 1 or "tok_embeddings" in name]
    groups = [{"params": matrices, "weight_decay": config.optim.weight_decay}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, betas=config.optim.betas, eps=config.optim.eps, foreach=False)
