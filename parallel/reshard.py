"""What a forward without a backward leaves to do."""

from torch import nn
from torch.distributed.fsdp import FSDPModule


def reshard_units(model: nn.Module) -> None:
    """Free every gathered parameter: without a backward, FSDP2 keeps those of the last unit."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
