"""A bound of the memory that a run needs, from sizes alone: without a trace, and without the planner.

It is far above what a run needs, but most small runs have several times as much. Every number of tensors
below is more than a step has at a time; tests compare the sum with the predictions of random plans.
"""

from meshwright.models.llama import LlamaConfig
from meshwright.parallel.memory_breakdown import GIB
from meshwright.parallel.plan.schema import Plan, sums_whole_gradients
from meshwright.train.config import TrainingJob
from meshwright.train.model.trained_model import model_of

DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
OF_PROCESS_BYTES = 2 * GIB  # what a process takes beside its tensors: at most 0.6 GiB in configs/hardware
AMPLE = 2  # times the bound: room for the allocator's overhead and for copies of what the bound counts once


def memory_bound(job: TrainingJob, plan: Plan) -> int | None:
    """Return a number of bytes that the tensors of a process never exceed in a step; None for a model of
    yours, of whose activations only a trace knows the sizes."""
    if not isinstance(job.model, LlamaConfig):
        return None
    return _state_bytes(job, plan, job.model) + _activation_bytes(job, plan, job.model)


def is_ample(bound_bytes: int, available_bytes: int) -> bool:
    """Whether a process has so much memory, on its device and its host, that it fits whatever it needs."""
    return AMPLE * bound_bytes + OF_PROCESS_BYTES <= available_bytes


def _state_bytes(job: TrainingJob, plan: Plan, model: LlamaConfig) -> int:
    """Return the bytes of parameters, gradients, moments and FSDP2's buffers, as if nothing but FSDP divided
    the parameters, and all units were gathered and reduced at once."""
    count, units = model_of(model).parameters, plan.units
    rows = 5 * model.dim + model.ffn_dim + 2  # one of each weight of a block: shards are padded by less
    values = count // plan.mesh.shards + (model.n_layers + 1) * rows
    stored = DTYPE_BYTES[plan.storage_dtype]
    gathered = max(DTYPE_BYTES[unit.param_dtype] for unit in units)
    reduced = max(DTYPE_BYTES[unit.reduce_dtype] for unit in units)
    # gradients twice: those of earlier micro batches, and what this one adds to them
    of_shard = stored + 2 * max(stored, reduced) + 2 * DTYPE_BYTES[job.state_dtype]
    whole = any(sums_whole_gradients(unit, plan) for unit in units)
    # a tied weight has two gradients, and then their sum
    tied = 2 * model.vocab_size * model.dim if model.tie_embeddings else 0
    of_units = 3 * gathered + (1 + whole) * reduced
    return values * of_shard + count * of_units + tied * max(gathered, reduced)


def _activation_bytes(job: TrainingJob, plan: Plan, model: LlamaConfig) -> int:
    """Return the bytes of activations and logits: of a step that keeps all results of all blocks, with those
    of one block's backward."""
    tokens = plan.micro_batch_size * job.seq_len
    heads, keys = model.n_heads, 2 * model.n_kv_heads * model.head_dim
    of_block = 16 * model.dim + 6 * keys + 4 * model.ffn_dim
    if plan.attention == "math":
        of_block += 4 * heads * job.seq_len
    kept = tokens if not plan.loss_chunk_tokens else min(tokens, plan.loss_chunk_tokens)
    logits = 4 * kept * model.vocab_size
    return 4 * (tokens * of_block * (model.n_layers + 2) + logits)
