"""A run of train.main with a slow unit and a late all-gather, for test_trace_run.py. Arguments: those of
train.main.

The forward of SLOW sleeps. All-gathers are asynchronous, as on a GPU (over gloo FSDP2 waits in each launch),
and each unit starts the next unit's all-gather in its forward, except the unit before LATE.
"""

import sys
import time
from typing import Any

from torch.distributed.fsdp import FSDPModule

import meshwright.train.main
from meshwright.models.llama import Llama
from meshwright.train.build_model import build_model
from meshwright.train.config_parser import parse_config
from meshwright.train.distributed.exit import exit_process
from meshwright.train.distributed.ranks import read_rank_info

SLOW, LATE, BEFORE_LATE = "layers.2", "layers.4", "layers.3"
SLEEP_S = 0.1


def build_slowed(*arguments: Any) -> Llama:
    """Build the model of the plan, with the slow unit and the late all-gather."""
    model = build_model(*arguments)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module._set_unshard_async_op(True)
    before = model.get_submodule(BEFORE_LATE)
    assert isinstance(before, FSDPModule)
    before.set_modules_to_forward_prefetch([])
    model.get_submodule(f"{SLOW}.attention").register_forward_pre_hook(
        lambda module, inputs: time.sleep(SLEEP_S)
    )
    return model


if __name__ == "__main__":
    ranks = read_rank_info()
    meshwright.train.main.build_model = build_slowed
    meshwright.train.main.run(parse_config(sys.argv[1:]), ranks)
    exit_process(ranks, 0)
