"""The process: its limits, its threads, its device's settings and its process group."""

import logging
from dataclasses import astuple
from datetime import timedelta

import torch

from meshwright.train.allocator import use_expandable_segments
from meshwright.train.cores import usable_cores
from meshwright.train.meeting import join
from meshwright.train.open_files import allow_open_files
from meshwright.train.place import Place
from meshwright.train.run_config import RunConfig


def group_timeout(config: RunConfig) -> timedelta:
    """How long a collective may wait: longer than any section, so that the watchdog speaks first; a day where
    it never does."""
    return (
        timedelta(days=1)
        if 0 in astuple(config.timeouts)
        else timedelta(seconds=max(astuple(config.timeouts)) + 60)
    )


def start_process(config: RunConfig, place: Place, device: torch.device) -> None:
    """Set limits, threads and device, and join the process group (alone too: the same code runs
    everywhere)."""
    allow_open_files()
    if device.type == "cuda":
        if config.expandable_segments:
            use_expandable_segments()
        torch.cuda.set_device(device)
    else:  # it warns of a CUDA toolkit without a GPU, which is no fault here
        logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    # OMP_NUM_THREADS does not count: torchrun sets it to 1 where nobody else has.
    torch.set_num_threads(config.threads or max(1, usable_cores() // place.local_world_size))
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    join(backend, group_timeout(config), alone=not place.under_torchrun and place.world_size == 1)
    torch.manual_seed(config.seed)
