"""The plain way to train: one process, eager, whole batches, nothing of parallel/ or of the training step."""

import torch
import torch.nn.functional as F
from torch import Tensor

from models.llama import Llama, init_weights
from models.loss import IGNORE_INDEX
from train.config import Config
from train.data.loader import read_batch
from train.data.order import sample_indices
from train.data.tokens import load_tokens
from train.optim import learning_rate


def pad_unevenly(tokens: Tensor, targets: Tensor) -> Tensor:
    """Targets with an end of each row ignored whose length depends on the row's content alone."""
    T = tokens.shape[1]
    kept = T - tokens.sum(dim=1) % (T - 1)
    return targets.masked_fill(torch.arange(T) >= kept[:, None], IGNORE_INDEX)


def train_plainly(config: Config, steps: int, uneven: bool) -> dict[str, object]:
    """Losses, gradient norms, first gradients and initial weights of plain training on the same data."""
    model = Llama(config.model)
    init_weights(model, config.run.seed)
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    matrices = [p for name, p in model.named_parameters() if p.dim() > 1 and "tok_embeddings" not in name]
    others = [p for name, p in model.named_parameters() if p.dim() == 1 or "tok_embeddings" in name]
    groups = [{"params": matrices, "weight_decay": config.optim.weight_decay}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=config.optim.betas, eps=config.optim.eps, foreach=False)
    tokens = load_tokens(config.data).train
    n, G, T = (len(tokens) - 1) // config.train.seq_len, config.train.global_batch_size, config.train.seq_len
    losses, norms, grads = [], [], {}
    for step in range(1, steps + 1):
        batch = read_batch(tokens, sample_indices((step - 1) * G, G, n, config.run.seed), T)
        targets = pad_unevenly(batch.tokens, batch.targets) if uneven else batch.targets
        loss = F.cross_entropy(model(batch.tokens).flatten(0, 1), targets.flatten(), ignore_index=IGNORE_INDEX)
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), config.train.grad_clip).item())
        grads = grads or {name: p.grad.clone() for name, p in model.named_parameters()}
        losses.append(loss.item())
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(config.optim, step, steps)
        optimizer.step()
        optimizer.zero_grad()
    return {"losses": losses, "norms": norms, "grads": grads, "weights": weights}
