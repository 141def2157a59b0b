"""Poor plans get advice, good plans get none."""

from meshwright.parallel.config import ParallelConfig
from meshwright.parallel.plan.lint import GRAPH_MODES, advise, unused_keys
from tests.support.plans import check_facts, keys_from, plan_of
from tests.support.tables import rows, try_each

# Keys on 8 processes, of which a node has 8 -> the facts of the advice
PLANS = """
tp: 1 -> none
world_size: 32, strategy: hybrid_shard -> none
world_size: 32, tp: 2, strategy: hybrid_shard -> none
world_size: 64, dp_replicate: 32, dp_shard: 2 -> none
world_size: 32, dp_replicate: 2 -> none
tp: 2, tp_modules: [attention] -> none
world_size: 16, tp: 8 -> none
cpu_offload: true -> none
compile: {mode: max-autotune-no-cudagraphs} -> none
compile: {mode: max-autotune, enabled: false} -> none
per_node: 4, dp_replicate: 2 -> none
world_size: 1 -> one process ... nothing is sharded
dp_replicate: 2 -> dp_replicate=2 ... single node ... use dp_shard=8
world_size: 24, dp_replicate: 2 -> dp_shard x tp = 12 ... 8 processes of a node
strategy: ddp -> dp_shard=1 ... all parameters ... dp_shard=8
world_size: 1, cpu_offload: true -> cpu_offload ... one process
tp: 2, tp_modules: [] -> tp=2 splits no part ... use tp=1
tp: 8, per_node: 4, dp_replicate: 1 -> tp=8 ... 4 processes of a node ... use a degree within one
cp: 8, per_node: 4 -> cp x tp = 8 ... 4 processes of a node ... use degrees within one
compile: {mode: reduce-overhead} -> compile.mode=reduce-overhead ... CUDA graphs
compile: {mode: max-autotune} -> max-autotune ... use max-autotune-no-cudagraphs
"""
# Keys -> the facts of the sentence about one that has no effect
UNUSED = """
activation_budget: 0.3 -> parallel.activation_budget=0.3 ... parallel.activation_checkpoint=auto
selective_policy: attention, activation_checkpoint: full -> selective_policy=attention ... checkpoint=full
sequence_parallel: false -> parallel.sequence_parallel=false ... parallel.tp=auto ... 2 or more
tp_modules: [head], tp: 1 -> parallel.tp_modules=[head] ... parallel.tp=1
compile: {enabled: false, mode: max-autotune, float32_matmul_precision: high} -> compile.mode ... =false
tp: 1 -> none
activation_checkpoint: budget, activation_budget: 0.3 -> none
tp: 2, sequence_parallel: false -> none
plan: a.yaml, sequence_parallel: false -> none
"""


def check(sentences: list[str], facts: str) -> None:
    assert not any("\n" in sentence for sentence in sentences)
    assert bool(sentences) == (facts != "none"), sentences
    check_facts(" ".join(sentences) or "none", facts)


def test_a_poor_plan_is_told_why_and_what_is_better_and_a_good_one_nothing() -> None:
    def of(text: str, facts: str) -> None:
        keys = keys_from(text)
        check(advise(plan_of(**keys), keys.get("per_node", 8)), facts)

    try_each(rows(PLANS), of)


def test_a_key_without_effect_is_told() -> None:
    try_each(rows(UNUSED), lambda text, facts: check(unused_keys(ParallelConfig(**keys_from(text))), facts))


def test_the_modes_that_capture_cuda_graphs_are_those_of_this_torch() -> None:
    from torch._inductor import list_mode_options

    modes = {mode for mode, options in list_mode_options().items() if options.get("triton.cudagraphs")}
    assert modes == set(GRAPH_MODES)
