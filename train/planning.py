"""Config -> plan: the part of a run that needs no process group and no device."""

import torch

from models.attention import ATTENTION_OPS, KERNELS, WITHIN_DOCUMENTS
from models.llama import SHARDING, LlamaConfig, fsdp_units, tp_divides
from models.size import count_parameters
from parallel.make_plan import Job, make_plan
from parallel.plan import ModelUnits, Plan, PlanError
from parallel.planner.hardware import Hardware, find_hardware
from train.config import Config
from train.plan_from_file import read_plan

HOPPER = (9, 0)  # CUDA compute capability


def plan_run(config: Config, world_size: int, gpus_per_node: int | None = None, attention: str = "cpu") -> Plan:
    """The plan of a run on `world_size` processes: made from the config, or read from the file it names.

    Without `gpus_per_node` all processes share a node. `attention`: of `best_attention`, for a GPU. Raises PlanError with all
    mistakes in one report.
    """
    model = model_units(config.model)
    if config.parallel.plan == "auto":
        raise PlanError("parallel.plan=auto is for train.main and tools.plan, which know the machine. Let tools.plan choose, "
                        "with --save FILE, and use --parallel.plan=FILE")  # fmt: skip
    if config.parallel.plan == "manual":
        return make_plan(config.parallel, model, make_job(config, world_size, gpus_per_node or world_size, attention))
    return read_plan(config, model, world_size)


def make_job(config: Config, world_size: int, gpus_per_node: int, attention: str) -> Job:
    """What the plan is made for; `attention` as in `plan_run`."""
    train = config.train
    return Job(world_size, gpus_per_node, train.seq_len, train.micro_batch_size, train.global_batch_size, attention)


def best_attention(config: Config, hardware: Hardware | None) -> str:
    """The attention kernel that `auto` means on such devices; None is a CPU. Few can keep documents apart."""
    best = next(iter(hardware.attention_kernels)) if hardware else "cpu"
    return best if best in WITHIN_DOCUMENTS or not config.data.document_mask else "flex"


def attention_here(config: Config, device: torch.device, device_name: str) -> str:
    """The same for the device at hand. One that no file in configs/hardware describes gets cuDNN's from Hopper on."""
    kind = find_hardware(device_name)
    if device.type == "cpu" or kind:
        return best_attention(config, kind if device.type == "cuda" else None)
    best = "cudnn" if torch.cuda.get_device_capability(device) >= HOPPER else "flash"
    return "flex" if config.data.document_mask else best


def check_attention(config: Config, plan: Plan, device_type: str) -> None:
    """Raise PlanError for an attention kernel that cannot do what is asked on this kind of device ("cpu" or "cuda")."""
    kernel, apart = plan.attention, config.data.document_mask
    able = [name for name, devices in KERNELS.items() if device_type in devices and _suits(name, apart)]
    if kernel not in able:
        what = f"a {device_type} device{' with data.document_mask=true' if apart else ' without data.document_mask'}"
        raise PlanError(f"parallel.attention={kernel} is no kernel for {what}: use auto, or {', '.join(able)}")


def _suits(kernel: str, documents_apart: bool) -> bool:
    return kernel in WITHIN_DOCUMENTS if documents_apart else kernel != "flex"


def model_units(config: LlamaConfig) -> ModelUnits:
    """What a Llama publishes of itself, in the planner's terms."""
    counts = count_parameters(config)
    blocks = {f"layers.{i}": counts.block for i in range(config.n_layers)}
    return ModelUnits(
        modules={"tok_embeddings": counts.embedding, **blocks, "head": counts.head},
        units=fsdp_units(config),
        compiled=frozenset({*blocks, "head"}),
        checkpointed=frozenset(blocks),
        styles=SHARDING,
        tp_divides=tp_divides(config),
        shared_parts=frozenset({"embedding", "head"} if config.tie_embeddings else ()),
        attention_ops=ATTENTION_OPS,
        attention_kernels=tuple(KERNELS),
    )
