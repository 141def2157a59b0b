"""Trains the same model on the same tokens in several ways, and writes what each saw: `OUT`, then a JSON list of cases, each a
list of config arguments. Run by test_activation_offload.py."""

import gc
import json
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from models.llama import Llama
from parallel.compile_check import count_compiled_graphs
from parallel.mesh import build_mesh, data_parallel_group
from train.build import build_model
from train.config import parse_config
from train.ending import end_process
from train.optim import build_optimizer
from train.place import read_place
from train.planning import plan_run
from train.runtime import start_process
from train.step import Batch, train_step

STEPS = 3


def train(arguments: list[str]) -> dict[str, Any]:
    """Losses, gradient norms and compiled graphs of every step; bytes sent to host memory, and held there, after every step;
    and what one more forward, and backward, leave allocated."""
    torch._dynamo.reset()
    config = parse_config(arguments)
    plan = plan_run(config, dist.get_world_size())
    mesh = build_mesh(plan.mesh, "cpu")
    model = build_model(config, plan, mesh, torch.device("cpu"))
    optimizer = build_optimizer(model, config.optim, config.run.seed)
    generator = torch.Generator().manual_seed(dist.get_rank() // plan.mesh.tp)
    size = (plan.micro_batch_size, config.train.seq_len)
    tokens = [torch.randint(config.model.vocab_size, size, generator=generator) for _ in range(plan.accumulation)]
    seen: dict[str, list[Any]] = {"losses": [], "norms": [], "graphs": [], "sent": [], "held": []}
    for _ in range(STEPS):
        result = train_step(model, optimizer, [Batch(ids, ids) for ids in tokens], 1.0, data_parallel_group(mesh))
        offload = getattr(model, "activation_offload", None)
        seen["losses"].append(result.loss.item())
        seen["norms"].append(result.grad_norm.item())
        seen["graphs"].append(count_compiled_graphs())
        seen["sent"].append(offload.sent_bytes if offload else 0)
        seen["held"].append(offload.host_bytes if offload else 0)
    return {**seen, **measure(model, tokens[0])}


def measure(model: Llama, ids: torch.Tensor) -> dict[str, int]:
    """Bytes allocated and not freed after a forward, and after its backward without the gradients that it leaves."""
    gc.collect()
    events = []
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as forward:
        loss = model(ids, ids)
    events.append(allocated(forward))
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as backward:
        loss.backward()
        model.zero_grad(set_to_none=True)
        del loss
        gc.collect()
    return {"after_forward": events[0], "after_backward": events[0] + allocated(backward)}


def allocated(profiled: profile) -> int:
    return sum(event.nbytes() for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]")


def main() -> None:
    place = read_place()
    start_process(parse_config([]).run, place, torch.device("cpu"))
    results = [train(case) for case in json.loads(sys.argv[2])]
    if place.is_main:
        with open(sys.argv[1], "w", encoding="utf-8") as file:
            json.dump(results, file)
    dist.destroy_process_group()
    end_process(0)


if __name__ == "__main__":
    main()
