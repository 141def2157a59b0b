"""Cross entropy of next-token prediction. Shapes: B batch, T tokens, V vocabulary."""

import torch.nn.functional as F
from torch import Tensor

IGNORE_INDEX = -100  # a target that counts for nothing: padding


def cross_entropy_sum(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    """Sum over tokens of -log p(target), in nats: float32 scalar. Targets of IGNORE_INDEX add nothing.

    A sum, not a mean: whoever knows the whole global batch divides by its number of tokens, once.
    """
    logits = logits_BTV.flatten(0, 1).float()
    return F.cross_entropy(logits, targets_BT.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")
