"""The gallery: faults that were shipped, each wherever it can be, in one tensor of many, and mended."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from meshwright.parallel.check.foreign import Subject
from meshwright.parallel.plan.schema import MeshPlan
from tests.gallery import loops, shardings
from tests.gallery.models import Model, build

DP, REPLICAS, TP, CP = MeshPlan(1, 2, 1), MeshPlan(2, 1, 1), MeshPlan(1, 1, 2), MeshPlan(1, 1, 1, 2)
ALL = ("layers",)


@dataclass(frozen=True)
class Fault:
    """A fault.

    Args:
        what: in a few words
        where: the public reference
        wrong: the sharding with it
        right: the sharding without it
        one: the sharding with it in one place; None: it has no smaller place
        says: what the report must say
        loop: with the fault; `one_loop`: in one place
    """

    what: str
    where: str
    mesh: MeshPlan
    wrong: Callable[..., Any]
    right: Callable[..., Any]
    one: Callable[..., Any] | None
    says: str
    loop: type[loops.Loop] | None = None
    one_loop: type[loops.Loop] | None = None
    equal_rows: bool = False
    build: Callable[[], Any] = build

    def subjects(self, folder: Path) -> Iterator[tuple[str, Subject]]:
        """Yield "right", "wrong" and "one", with what is checked."""
        cases = [("wrong", self.wrong, self.loop), ("right", self.right, self.loop and loops.Loop)]
        if self.one is not None:
            cases.append(("one", self.one, self.one_loop))
        for name, shard, loop in cases:
            saved = folder / f"{self.where.replace(' ', '-')}-{name}"
            saved.mkdir(exist_ok=True)
            yield name, Subject(self.build, shard, self.mesh, loop, saved, equal_rows=self.equal_rows)


def untied() -> tuple[Model, Any]:
    model, example = build()
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    return model, example


def _fault(
    what: str, where: str, mesh: MeshPlan, sharding: Callable[..., Any], says: str, one: Any, **keys: Any
) -> Fault:
    bad = keys.pop("bad", "bad")
    everywhere, rest = keys.pop("everywhere", ALL), keys.pop("rest", {})
    return Fault(
        what,
        where,
        mesh,
        partial(sharding, **{bad: everywhere}, **rest),
        partial(sharding, **rest),
        partial(sharding, **{bad: one}, **rest),
        says,
        **keys,
    )


def _loop_fault(
    what: str, where: str, loop: type[loops.Loop], says: str, one_loop: type[loops.Loop] | None = None
) -> Fault:
    shard = shardings.fsdp
    return Fault(what, where, DP, shard, shard, shard if one_loop else None, says, loop, one_loop)


PARTIAL = "a partial sum taken for the whole: the reduction over tp is missing"
BLOCK = ("layers.1",)
EQUAL: dict[str, Any] = {"equal_rows": True}
FAULTS = (
    _fault(
        "router under tp: its gradient is not summed",
        "torchtitan #2416",
        TP,
        shardings.experts_over_tp,
        "router.weight",
        BLOCK,
    ),
    _fault(
        "below experts under tp gradients are not summed",
        "torchtitan #4054",
        TP,
        shardings.experts_over_tp,
        "norm2.weight",
        BLOCK,
        rest={"lost": "enter"},
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
        "counts of the routing bias are not summed over tp",
        "torchtitan #4154",
        TP,
        shardings.counted_over_tp,
        PARTIAL,
        BLOCK,
    ),
    _fault(
        "experts' gradients doubled with ep 2",
        "pytorch 160285",
        DP,
        shardings.experts_over_dp,
        "2 times what it should be",
        ("layers.1.experts.w2",),
        **EQUAL,
    ),
    _fault(
        "experts' gradients divided twice",
        "transformers #48516",
        DP,
        shardings.experts_over_dp,
        "0.5 times what it should be",
        ("layers.1.experts.w2",),
        bad="divided",
        **EQUAL,
    ),
    _fault(
        "router detached by a gather without gradient",
        "AutoModel #2995",
        DP,
        shardings.experts_over_dp,
        "router.weight",
        BLOCK,
        bad="detached",
        **EQUAL,
    ),
    _fault(
        "replicas of experts are not synchronised",
        "AutoModel #3135",
        REPLICAS,
        shardings.replicas,
        "not reduced over dp_replicate",
        ("layers.1.experts.w1",),
        everywhere=("layers.0.experts", "layers.1.experts"),
    ),
    _fault(
        "the router's softmax is computed twice",
        "VeOmni #715",
        DP,
        shardings.softmax_twice,
        "output 0",
        BLOCK,
    ),
    _fault(
        "tied weights get twice the gradient",
        "torchtitan #3174",
        DP,
        shardings.sums,
        "2 times what it should be",
        ("embedding",),
        everywhere=("embedding",),
    ),
    _fault(
        "summed gradients are summed again in the next micro batch",
        "transformers 5.24",
        DP,
        shardings.sums,
        "the parts of the batch weigh",
        ("layers.1.norm.weight",),
        bad="again",
    ),
    _fault("keys are gathered along heads", "torchtitan #3206", CP, shardings.context, "output 0", BLOCK),
    _fault(
        "validation under cp has another mask",
        "torchtitan #3257",
        CP,
        shardings.context,
        "evaluation: output 0",
        BLOCK,
        bad="evaluated",
    ),
    _fault(
        "partial gradients of a chunked loss taken for sums",
        "torchtitan #3412",
        TP,
        shardings.split_head,
        "norm.weight",
        (1,),
        everywhere=(0, 1),
        build=untied,
    ),
    _fault(
        "trunk gradient of an input that is not contiguous",
        "VeOmni #1017",
        DP,
        shardings.trunk_of_views,
        "gradient of",
        (1,),
        everywhere=(0, 1),
    ),
    _fault(
        "experts are never loaded",
        "AutoModel #2682",
        DP,
        shardings.lost_values,
        "the values are not those",
        ("layers.1.experts.w1",),
        everywhere=("layers.0.experts", "layers.1.experts"),
    ),
    _fault(
        "training does not start from the weights given",
        "Megatron-LM 2769",
        DP,
        shardings.lost_values,
        "the values are not those",
        ("layers.0.norm.weight",),
        everywhere=("",),
    ),
    _loop_fault(
        "a mean over each rank's tokens", "torchtitan #2206", loops.MeanOfRanks, "do not weigh alike"
    ),
    _loop_fault(
        "auxiliary loss not divided by accumulation",
        "AutoModel #3359",
        loops.AuxiliaryOfEach,
        "step 1: gradient of",
    ),
    _loop_fault(
        "gradient scale of the auxiliary loss", "AutoModel #1412", loops.AuxiliaryScale, "step 1: gradient of"
    ),
    _loop_fault("norm of a rank's own shards", "VeOmni #862", loops.NormOfShards, "step 1: gradient of"),
    _loop_fault(
        "only rank 0's shards are saved", "accelerate #4206", loops.OwnShards, "loaded", loops.OwnShardsOfOne
    ),
)
