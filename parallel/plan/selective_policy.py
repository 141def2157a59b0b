"""Selective activation checkpointing: the operators whose results a policy keeps."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from meshwright.parallel.plan.mistakes import Mistake

MATMUL = "aten.mm"
# The reductions of tp: recomputing their results would communicate again.
TP_SUMS = ("_c10d_functional.reduce_scatter_tensor", "_c10d_functional.all_reduce")
# Operators that each policy keeps in addition to attention and TP_SUMS; "OP/n" is every n-th call of OP.
POLICIES = {"matmul": (MATMUL,), "half_matmul": (f"{MATMUL}/2",), "attention": ()}


def blocks_of_every(policy: str) -> int:
    """Return N of the policy every:N, else 0."""
    number = policy.removeprefix("every:")
    return int(number) if policy != number and number.isdecimal() else 0


def saved_ops(policy: str, attention_ops: tuple[str, ...]) -> tuple[str, ...]:
    """Return the operators whose results a policy keeps; `policy` is a name or a comma-separated list."""
    if policy in POLICIES:
        return (*POLICIES[policy], *attention_ops, *TP_SUMS)
    return tuple(op.strip() for op in policy.split(",") if op.strip())


def policy_mistakes(policy: str, attention_ops: tuple[str, ...]) -> Iterator[Mistake]:
    """Check what a policy keeps."""
    yield from () if blocks_of_every(policy) else saved_ops_mistakes(saved_ops(policy, attention_ops))


def saved_ops_mistakes(ops: Sequence[str]) -> Iterator[Mistake]:
    """Check that there are operators to keep, and that this torch has them."""
    if not ops:
        yield Mistake(
            "units.saved_ops", "=[] keeps nothing: list operators, or use activation_checkpoint=full"
        )
    for op in ops:
        if not is_op(op):
            yield Mistake(
                "units.saved_ops",
                f": {op!r} is not an operator of this torch: list single ones, such as aten.mm or aten.mm/2; "
                f"a config key may also be {', '.join(POLICIES)} or every:N, with N at least 1",
            )


def find_op(text: str) -> Any:
    """Return the operator of this torch that `text`, such as aten.mm or aten.mm/2, names; else None."""
    namespace, _, name = text.partition("/")[0].partition(".")
    op = getattr(getattr(torch.ops, namespace, None), name, None) if name else None
    return op if isinstance(op, (torch._ops.OpOverloadPacket, torch._ops.HigherOrderOperator)) else None


def is_op(op: str) -> bool:
    """Whether `op`, with or without /N at its end, names an operator of this torch."""
    times = op.partition("/")[2]
    return find_op(op) is not None and (times.isdecimal() and int(times) > 0 if "/" in op else True)
