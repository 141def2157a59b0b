"""What turns the time of a run's steps into rates."""

from meshwright.models.cost import flops_per_token
from meshwright.parallel.plan.schema import Plan
from meshwright.parallel.planner.hardware import find_hardware
from meshwright.train.config import Config
from meshwright.train.metrics import Throughput


def make_throughput(config: Config, plan: Plan, device_name: str) -> Throughput:
    """Tokens and operations of a step of the run on devices of that name."""
    seq_len, hardware, dtype = config.train.seq_len, find_hardware(device_name), plan.units[0].param_dtype
    return Throughput(
        tokens_per_step=plan.global_batch_size * seq_len,
        flops_per_token=flops_per_token(config.model, seq_len, "full"),
        flops_per_token_causal=flops_per_token(config.model, seq_len, "causal"),
        world_size=plan.mesh.world_size,
        peak_flops=hardware.peak_tflops[dtype] * 1e12 if hardware else None,
    )
