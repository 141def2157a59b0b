"""The gallery: faults that were shipped, each wherever it can be, in one tensor of many, and mended."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torch import nn

from meshwright.parallel.check.subject import Subject
from meshwright.parallel.plan.schema import MeshPlan
from tests.gallery import loops, shardings
from tests.gallery.models import Model, ModelWithRouterLogits, build

DP, REPLICAS, TP, CP = MeshPlan(1, 2, 1), MeshPlan(2, 1, 1), MeshPlan(1, 1, 2), MeshPlan(1, 1, 1, 2)
ALL, WEIGHT = ("layers",), "layers.1.experts.w1"


@dataclass(frozen=True)
class Fault:
    """A fault.

    Args:
        what: in a few words
        where: the public reference
        wrong: the sharding with it
        right: the sharding without it
        one: the sharding with it in one place
        says: a pattern of what the first line of the report must say
        one_says: the same, with the fault in one place; "": as everywhere
        loop: with the fault; `one_loop`: in one place
    """

    what: str
    where: str
    mesh: MeshPlan
    wrong: Callable[..., Any]
    right: Callable[..., Any]
    one: Callable[..., Any]
    says: str
    one_says: str = ""
    loop: type[loops.Loop] | None = None
    one_loop: type[loops.Loop] | None = None
    equal_rows: bool = False
    build: Callable[[], Any] = build

    def subjects(self, folder: Path) -> Iterator[tuple[str, Subject]]:
        """Yield "right", "wrong" and "one", with what is checked."""
        right = ("right", self.right, self.loop and loops.Loop)
        cases = (right, ("wrong", self.wrong, self.loop), ("one", self.one, self.one_loop))
        for name, shard, loop in cases:
            saved = folder / f"{self.where.replace(' ', '-')}-{name}"
            saved.mkdir(exist_ok=True)
            yield name, Subject(self.build, shard, self.mesh, loop, saved, equal_rows=self.equal_rows)


def untied() -> tuple[Model, Any]:
    model, example = build()
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    return model, example


def with_router_logits() -> tuple[Model, Any]:
    return ModelWithRouterLogits(), build()[1]


def _fault(
    what: str,
    where: str,
    mesh: MeshPlan,
    sharding: Callable[..., Any],
    says: str,
    one: Any,
    one_says: str = "",
    *,
    bad: str = "bad",
    everywhere: Any = ALL,
    rest: Mapping[str, Any] = MappingProxyType({}),
    **keys: Any,
) -> Fault:
    """A fault of a sharding, which is right without its argument `bad`."""
    wrong, right, in_one = ({bad: everywhere}, {}, {bad: one})
    shards = [partial(sharding, **rest, **case) for case in (wrong, right, in_one)]
    return Fault(what, where, mesh, *shards, says, one_says, **keys)


def _loop_fault(
    what: str,
    where: str,
    loop: type[loops.Loop],
    says: str,
    one_loop: type[loops.Loop] | None = None,
    one_says: str = f"step 1: gradient of {WEIGHT}",
    mesh: MeshPlan = DP,
    shard: Callable[..., Any] = shardings.fsdp,
) -> Fault:
    """A fault of a loop. `one_loop`: with it in one place; None: in the gradient of `WEIGHT`."""
    one_loop = one_loop or loops.in_one(loop, WEIGHT)
    return Fault(what, where, mesh, shard, shard, shard, says, one_says, loop, one_loop)


PARTIAL = "a partial sum taken for the whole: the reduction over tp is missing"
LOST = "the values are not those that the model had"
BLOCK, EXPERTS, W2 = ("layers.1",), ("layers.0.experts", "layers.1.experts"), ("layers.1.experts.w2",)
EQUAL: dict[str, Any] = {"equal_rows": True}
FAULTS = (
    _fault(
        "gradients of the router's probabilities are not summed over tp",
        "torchtitan #2416, transformers #48205",
        TP,
        shardings.experts_over_tp,
        f"layers.1.router.weight.*{PARTIAL}",
        BLOCK,
    ),
    _fault(
        "below experts under tp no gradient is summed",
        "torchtitan #4054",
        TP,
        shardings.experts_over_tp,
        f"layers.1.router.weight.*{PARTIAL}",
        BLOCK,
        rest={"lost": ("enter", "chances")},
    ),
    _fault(
        "rows that no expert computes are not written, and 0 x NaN in backward",
        "transformers #48205",
        TP,
        shardings.experts_over_tp,
        "layers.1.router.weight.*not finite",
        BLOCK,
        bad="unwritten",
    ),
    _fault(
        "each tp rank adds the experts' whole bias",
        "torchtitan #4245",
        TP,
        shardings.split_experts,
        "output 0",
        BLOCK,
    ),
    _fault(
        "counts for the routing bias are not summed over tp",
        "torchtitan #4154",
        TP,
        shardings.counted_over_tp,
        f"buffer layers.1.router.tokens.*{PARTIAL}",
        BLOCK,
    ),
    _fault(
        "experts' gradients doubled with ep 2",
        "pytorch 160285, Megatron-LM #5956",
        DP,
        shardings.experts_over_dp,
        "layers.1.experts.bias.*: 2 times what it should be",
        W2,
        "layers.1.experts.w2.*: 2 times what it should be",
        **EQUAL,
    ),
    _fault(
        "router detached by a gather without gradient",
        "AutoModel #2995",
        DP,
        shardings.experts_over_dp,
        "layers.1.router.weight.*: missing",
        BLOCK,
        bad="detached",
        **EQUAL,
    ),
    _fault(
        "replicas (HSDP) of a model with experts are not synchronised",
        "AutoModel #3135",
        REPLICAS,
        shardings.replicas,
        "only this rank's part: not reduced over dp_replicate",
        ("layers.1.experts.w1",),
        "layers.1.experts.w1.*: only this rank's part: not reduced over dp_replicate",
        everywhere=("",),
    ),
    _fault(
        "the router gives probabilities to a loss that takes logits",
        "VeOmni #715",
        DP,
        shardings.router_logits,
        "output 1",
        BLOCK,
        "output 2",
        build=with_router_logits,
    ),
    _fault(
        "tied weights get twice the gradient",
        "torchtitan #3174",
        DP,
        shardings.sums,
        "embedding.weight.*: 2 times what it should be",
        ("embedding",),
        everywhere=("embedding",),
    ),
    _fault(
        "summed gradients are summed again in the next micro batch",
        "transformers 5.24",
        DP,
        shardings.sums,
        "micro batch 2: .*micro batch 1 counts 2 times",
        ("layers.1.norm.weight",),
        "micro batch 2: gradient of layers.1.norm.weight.*micro batch 1 counts 2 times",
        bad="again",
    ),
    _fault("keys are gathered along heads", "torchtitan #3206", CP, shardings.context, "output 0", BLOCK),
    _fault(
        "validation under cp has another mask",
        "torchtitan #3257",
        CP,
        shardings.context,
        "evaluation: output 0.*right only from 0 to 3 of the 8 places of dim 1",
        BLOCK,
        bad="evaluated",
    ),
    _fault(
        "partial gradients of a chunked loss taken for sums",
        "torchtitan #3412",
        TP,
        shardings.split_head,
        f"gradient of norm.weight.*{PARTIAL}",
        (1,),
        "gradient of norm.weight.*the ranks disagree",
        everywhere=(0, 1),
        build=untied,
    ),
    _fault(
        "a fused loss drops the trunk's gradient of an input with gaps",
        "VeOmni #1017",
        DP,
        shardings.fused_head,
        "gradient of norm.weight.*: missing",
        (1,),
        "gradient of norm.weight",
        everywhere=(0, 1),
        **EQUAL,
    ),
    _fault(
        "experts are never loaded",
        "AutoModel #2682",
        DP,
        shardings.lost_values,
        f"value of layers.1.experts.bias.*{LOST}",
        W2,
        f"value of layers.1.experts.w2.*{LOST}",
        everywhere=EXPERTS,
    ),
    _fault(
        "training does not start from the weights given",
        "Megatron-LM 2769",
        DP,
        shardings.lost_values,
        f"value of norm.weight.*{LOST}",
        ("layers.0.norm.weight",),
        f"value of layers.0.norm.weight.*{LOST}",
        everywhere=("",),
    ),
    _loop_fault("a mean over each rank's tokens", "torchtitan #2206", loops.MeanOfRanks, "step 1: gradient"),
    _loop_fault(
        "auxiliary loss not divided by accumulation",
        "AutoModel #3359",
        loops.AuxiliaryOfEach,
        "step 1: gradient",
    ),
    _loop_fault(
        "auxiliary loss divided by the ranks once too often",
        "AutoModel #1412",
        loops.AuxiliaryScale,
        "step 1: gradient",
    ),
    _loop_fault("norm of a rank's own shards", "verl #3655", loops.NormOfShards, "step 1: gradient"),
    _loop_fault(
        "norm summed over replicas (HSDP) too",
        "VeOmni #862",
        loops.NormOfReplicas,
        "step 1: gradient.*: 0.707 times what it should be",
        mesh=REPLICAS,
        shard=shardings.hsdp,
    ),
    _loop_fault(
        "only rank 0's shards are saved",
        "accelerate #4206",
        loops.OwnShards,
        "step 2, loaded: value of norm.weight.*right only from 0 to 7 of the 16 places of dim 0",
        loops.OwnShardsOfOne,
        "step 2, loaded: value of layers.1.experts.w1.*right only from 0 to 1 of the 4 places of dim 0",
    ),
)
