"""For any config or plan file, planning returns a consistent plan or raises PlanError or ConfigError."""

import copy
import dataclasses
import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, event, given, seed, settings
from hypothesis import strategies as st

from meshwright.models.config import LlamaConfig
from meshwright.parallel.config import CompileConfig, ParallelConfig
from meshwright.parallel.errors import PlanError
from meshwright.parallel.memory_breakdown import StepMemory
from meshwright.parallel.plan.lint import advise
from meshwright.parallel.plan.schema import Plan, prefetch_schedule
from meshwright.parallel.plan.selective_policy import POLICIES
from meshwright.parallel.plan.serialize import load_plan, plan_to_dict, plan_to_table, plan_to_yaml
from meshwright.parallel.plan.strategy import STRATEGIES
from meshwright.parallel.plan.validate import validate
from meshwright.parallel.planner.hardware import Machines, load_hardware
from meshwright.parallel.planner.memory_model import host_memory, predict_step_memory
from meshwright.parallel.planner.workload import Linear, ModelWorkload, ModuleWorkload, Phase
from meshwright.train.config import Config, OptimConfig, TrainConfig
from meshwright.train.model.trained_model import model_of
from meshwright.train.planning.predict import predict_memory, run_workload
from meshwright.train.planning.resolve import plan_run
from meshwright.train.planning.run_plan import is_ample, memory_bound

MANY = settings(deadline=None, print_blob=True, suppress_health_check=list(HealthCheck))
OF_THE_SEED = seed(os.environ["MESHWRIGHT_TESTS_SEED"])  # the tests' seed, which they print
FEW = settings(MANY, derandomize=True, database=None)  # the same examples every time


def more(test: Any, examples: int, **inputs: st.SearchStrategy[Any]) -> Any:
    """The slow test of other examples than the everyday test's, those of the seed."""
    slow = OF_THE_SEED(settings(MANY, max_examples=examples)(given(**inputs)(test.hypothesis.inner_test)))
    return pytest.mark.slow(pytest.mark.sampled(10)(slow))


def mostly(usual: st.SearchStrategy[Any], odd: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Odd values only sometimes: an example with many of them would test only the first rule."""
    return st.integers(0, 49).flatmap(lambda n: odd if n == 37 else usual)


AUTO = st.just("auto")
REPLICATE = mostly(AUTO | st.sampled_from(["auto", 1, 2]), st.integers(1, 70))
SHARD = mostly(st.sampled_from(["auto", "auto", "auto", -1, -1, 2, 4, 8]), st.integers(1, 70))
TP = mostly(AUTO | st.sampled_from(["auto", 1, 2, 4]), st.integers(1, 70))
AHEAD = mostly(AUTO | st.integers(0, 3), st.integers(0, 100))
DTYPES = st.sampled_from(["float32", "bfloat16"])
PARTS = ["embedding", "attention", "feed_forward", "head"]
OPS = [
    *POLICIES,
    "every:1",
    "every:2",
    "every:9",
    "aten.mm",
    "aten.mm/2,aten.silu",
    "aten.bmm , aten._to_copy",
]
NO_OPS = ["every:0", "every:-1", "", ",", "mm", "aten.", "aten.mm/0", "a.b.c", "aten.mm//2"]
ODD_OPS = st.sampled_from(NO_OPS) | st.text(max_size=6)


@st.composite
def models(draw: st.DrawFn) -> LlamaConfig:
    heads, kv = draw(st.sampled_from([(8, 8), (8, 4), (8, 2), (4, 4), (6, 3), (1, 1)]))
    return LlamaConfig(
        dim=heads * draw(st.sampled_from([2, 16])),
        n_layers=draw(st.integers(1, 6)),
        n_heads=heads,
        n_kv_heads=kv,
        ffn_dim=draw(mostly(st.sampled_from([64, 96]), st.integers(1, 99))),
        vocab_size=draw(mostly(st.sampled_from([264, 512]), st.integers(1, 300))),
        tie_embeddings=draw(st.booleans()),
    )


COMPILE = st.builds(
    CompileConfig,
    enabled=st.sampled_from([True, True, True, False]),
    backend=mostly(
        st.sampled_from([*["inductor"] * 3, "eager"]), st.sampled_from(["inducer", "", "cudagraphs"])
    ),
    mode=mostly(st.just("default"), st.sampled_from(["max-autotune", "reduce-overhead", "fast", ""])),
    dynamic=st.sampled_from([None, True, False]),
    on_recompile=st.sampled_from(["warn", "error", "ignore"]),
    float32_matmul_precision=st.sampled_from(["highest", "high", "medium"]),
    cache_dir=st.none() | st.text(max_size=5),
)
PARALLEL = st.builds(
    ParallelConfig,
    plan=mostly(st.just("manual"), st.sampled_from(["auto", "", "nowhere.yaml", "~", "~none/x", "\0"])),
    strategy=mostly(st.sampled_from([None] * 12 + [*STRATEGIES]), st.text(max_size=5)),
    dp_replicate=REPLICATE,
    dp_shard=SHARD,
    tp=TP,
    tp_modules=mostly(
        st.just(tuple(PARTS)), st.lists(st.sampled_from([*PARTS, "hed"]), max_size=5).map(tuple)
    ),
    sequence_parallel=st.booleans(),
    loss_parallel=st.booleans(),
    reshard_after_forward=mostly(st.sampled_from(["auto", "auto", True, False, 2]), st.integers(-2, 70)),
    reshard_after_backward=st.sampled_from(["auto", True, False]),
    reduce_gradients=st.sampled_from(["auto", "every_micro_batch", "last_micro_batch"]),
    forward_prefetch=AHEAD,
    backward_prefetch=AHEAD,
    activation_checkpoint=st.sampled_from(["auto", "none", "full", "selective", "budget"]),
    selective_policy=mostly(st.sampled_from(OPS), ODD_OPS),
    activation_budget=st.floats(0, 1),
    unit_min_params=mostly(st.sampled_from([0, 5000, 50_000]), st.integers(0, 10**15)),
    param_dtype=DTYPES,
    reduce_dtype=DTYPES,
    cpu_offload=st.booleans(),
    compile=COMPILE,
)
TRAIN = st.builds(
    TrainConfig,
    seq_len=mostly(st.sampled_from([64, 256]), st.integers(1, 2048)),
    micro_batch_size=mostly(st.sampled_from(["auto", 1, 2, 4]), st.integers(1, 9)),
    global_batch_size=mostly(st.sampled_from([-1, -1, 128, 192, 256]), st.integers(-3, 300)),
)
CONFIGS = st.builds(Config, model=models(), parallel=PARALLEL, train=TRAIN)
# Mostly powers of two, which most degrees fit
PROCESSES = mostly(st.sampled_from([1, 2, 4, 8, 16, 32, 64]), st.integers(1, 64))
PER_NODE = st.none() | st.sampled_from([1, 4, 8])
CONFIG_OF_A_RUN = {"config": CONFIGS, "processes": PROCESSES}


def check_plan(config: Config, plan: Plan, processes: int, folder: Path) -> None:
    """Assert what is true of every plan."""
    mesh = plan.mesh
    assert mesh.dp_replicate * mesh.dp_shard * mesh.tp == processes
    assert (
        plan.micro_batch_size * plan.accumulation * mesh.dp_replicate * mesh.dp_shard
        == plan.global_batch_size
    )
    (folder / "plan.yaml").write_text(plan_to_yaml(plan), encoding="utf-8")
    assert repr(load_plan(folder / "plan.yaml")) == repr(plan), "repr, because True == 1"
    assert validate(plan, model_of(config.model).units, processes, config.train.seq_len) == []
    assert [
        module for module in plan.modules if sum(module in unit.modules for unit in plan.units) != 1
    ] == []
    for phase in ("forward", "backward"):
        for unit in plan.units:
            ahead = [other.name for other in prefetch_schedule(plan, phase)[unit.name]]
            assert unit.name not in ahead
            assert len(ahead) == len(set(ahead))
    check_step_memory(predict_step_memory(plan, invented_workload(config, plan)))
    assert max(map(len, plan_to_table(plan).splitlines())) <= 80
    assert all(isinstance(sentence, str) for sentence in advise(plan, 8))


def check_step_memory(memory: StepMemory) -> None:
    """Assert what is true of the memory of every step."""
    most, at_peak = dataclasses.asdict(memory.memory), dataclasses.asdict(memory.at_peak)
    for kind, size in most.items():
        assert type(size) is int
        assert 0 <= at_peak[kind] <= size, kind
    assert 0 < memory.peak_bytes <= memory.memory.total


def invented_workload(config: Config, plan: Plan) -> ModelWorkload:
    """A workload of the model's modules with invented numbers, because a trace takes seconds per model."""
    phase = Phase((), (Linear(0, 300), Linear(100, 200)))
    counts = model_of(config.model).units.modules
    modules = {
        name: ModuleWorkload(counts[name], phase, phase, Linear(0, 150), Linear(0, 50))
        for name in plan.modules
    }
    return ModelWorkload(modules, {}, config.train.seq_len, "head", 10)


def plan_or_refusal(config: Config, processes: int, per_node: int | None = None) -> Plan | str:
    """The plan, or the text of a PlanError; any other error is a failure."""
    try:
        return plan_run(config.job, processes, per_node)
    except PlanError as error:
        return str(error)


@pytest.mark.sampled(2, day=0)
@settings(FEW, max_examples=120)
@given(**CONFIG_OF_A_RUN, per_node=PER_NODE)
def test_any_config_is_planned_or_refused(
    config: Config, processes: int, per_node: int | None, tmp_path: Path
) -> None:
    plan = plan_or_refusal(config, processes, per_node)
    event("refused" if isinstance(plan, str) else "planned")
    if isinstance(plan, str):
        assert all(line.strip() for line in plan.split("\n"))
    else:
        check_plan(config, plan, processes, tmp_path)


test_many_more_configs_are_planned_or_refused = more(
    test_any_config_is_planned_or_refused, 500, **CONFIG_OF_A_RUN, per_node=PER_NODE
)


# keys that no other test here draws
OTHERS = st.sampled_from([{}, {}, {"cp": 2}, {"attention": "math"}, {"activation_checkpoint": "offload"}])
BOUNDED = {**CONFIG_OF_A_RUN, "keys": OTHERS, **dict.fromkeys(("documents", "saves", "muon"), st.booleans())}
H100 = load_hardware()["h100-sxm"]


@pytest.mark.sampled(3, day=1)
@settings(FEW, max_examples=60)
@given(**BOUNDED)
def test_no_step_needs_more_than_the_bound_that_is_known_without_a_trace(
    config: Config,
    processes: int,
    keys: dict[str, Any],
    documents: bool,
    saves: bool,
    muon: bool,
    tmp_path: Path,
) -> None:
    """And what the allocator and the host need beside it, a process with ample memory has. Traced eagerly,
    as that is fast; the trace cache is the test's own, because a random config may name any folder."""
    compiling = dataclasses.replace(config.parallel.compile, cache_dir=str(tmp_path), enabled=False)
    parallel = dataclasses.replace(config.parallel, compile=compiling, **keys)
    drawn = dataclasses.replace(config, parallel=parallel).job
    job = dataclasses.replace(drawn, document_mask=documents and "attention" not in keys, saves=saves)
    if muon:
        job = dataclasses.replace(job, optim=OptimConfig(name="muon"))
    try:
        plan = plan_run(job, processes)
    except PlanError:
        return
    memory, bound_bytes = predict_memory(job, plan), memory_bound(job, plan)
    check_step_memory(memory)
    if muon and plan.mesh.dp_replicate > 1:
        assert bound_bytes is None
        return
    assert bound_bytes is not None
    assert memory.peak_bytes <= bound_bytes
    host = host_memory(plan, run_workload(job, plan))
    for machines in (Machines(processes, 8), Machines(processes, 8, 0, H100, 0)):
        for needed_bytes in (machines.needed_bytes(memory, host), host.total):
            assert not is_ample(bound_bytes, needed_bytes - 1)


@pytest.mark.parametrize("dtypes", [("bfloat16", "float32"), ("float32", "bfloat16")], ids=str)
@pytest.mark.parametrize("processes", [1, 2])
def test_nor_where_the_parameters_are_most_of_a_step(processes: int, dtypes: tuple[str, str]) -> None:
    """A tied vocabulary, few tokens, several micro batches."""
    model = LlamaConfig(256, 1, 4, 4, ffn_dim=64, vocab_size=32_000, tie_embeddings=True)
    off = CompileConfig(enabled=False)
    config = Config(
        model=model,
        parallel=ParallelConfig(compile=off, param_dtype=dtypes[0], reduce_dtype=dtypes[1]),
        train=TrainConfig(seq_len=16, micro_batch_size=1, global_batch_size=4 * processes),
    )
    plan, bound_bytes = (
        plan_run(config.job, processes),
        memory_bound(config.job, plan_run(config.job, processes)),
    )
    assert bound_bytes is not None
    assert predict_memory(config.job, plan).peak_bytes <= bound_bytes


test_many_more_steps_need_no_more_than_the_bound = more(
    test_no_step_needs_more_than_the_bound_that_is_known_without_a_trace, 60, **BOUNDED
)


# Plan files with mutations

CONFIG = Config(
    model=LlamaConfig(dim=16, n_layers=3, n_heads=4, n_kv_heads=4, ffn_dim=32, vocab_size=64),
    parallel=ParallelConfig(tp=2, compile=CompileConfig(backend="inductor")),
    train=TrainConfig(seq_len=32, global_batch_size=16),
)
UNMUTATED = plan_to_dict(plan_run(CONFIG.job, 8))
UNMUTATED["units"][1:2] = [{**UNMUTATED["units"][1], "unit": f"layers.{i}"} for i in range(3)]
PLAUSIBLE = {
    "reshard_after_forward": [True, False],
    "forward_prefetch": [0, 1, 2, ["layers.1"], ["layers.2", "head"], ["head"], []],
    "backward_prefetch": [0, 1, 2, ["layers.1"], ["layers.0", "tok_embeddings"], []],
    "activation_checkpoint": ["none", "full", "selective", "budget"],
    "saved_ops": [[], ["aten.mm"], ["aten.mm/3", "aten.silu"]],
    "activation_budget": [1.0, 0, 0.5],
    "compiled": [True, False],
    "param_dtype": ["float32", "bfloat16"],
    "reduce_dtype": ["float32", "bfloat16"],
    "output_dtype": ["same", "float32", "bfloat16"],
}
LEFT_OPEN = dataclasses.replace(CONFIG, parallel=ParallelConfig(), train=TrainConfig(seq_len=32))
JUNK = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 9)
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(
        [
            "layers.0",
            "layers.[0-2]",
            "layers.[0-1]",
            "layers.2",
            "head",
            "tok_embeddings",
            "tok_embeddings+head",
            "layers.0+layers.1",
            "full",
            "selective",
            "budget",
            "bfloat16",
            "float16",
            "aten.mm",
            "rowwise",
            "whole_colwise",
            "eager",
            "max-autotune",
        ]
    ),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)


def places(data: Any) -> list[tuple[Any, Any]]:
    """Every container with each of its keys or indices."""
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    return [place for key, value in items for place in [(data, key), *places(value)]]


@st.composite
def mutated_plans(draw: st.DrawFn) -> str:
    """The text of a plan file after up to three mutations of its data, sometimes also of its characters."""
    data = copy.deepcopy(UNMUTATED)
    for _ in range(draw(st.integers(1, 3))):
        candidates = places(data)
        if not candidates:
            break
        container, key = draw(st.sampled_from(candidates))
        kind = draw(st.sampled_from([*["plausible"] * 5, "replace", "replace", "delete", "double"]))
        if kind == "plausible":
            key = draw(st.sampled_from([*PLAUSIBLE]))
            units = data.get("units")
            if isinstance(units, list) and units and isinstance(unit := draw(st.sampled_from(units)), dict):
                unit[key] = copy.deepcopy(draw(st.sampled_from(PLAUSIBLE[key])))
        elif kind == "replace":
            container[key] = draw(JUNK)
        elif kind == "delete":
            del container[key]
        elif isinstance(container, list):
            source = draw(st.integers(0, len(container) - 1))
            container[key] = copy.deepcopy(container[source])
        else:
            source = draw(st.sampled_from(sorted(map(str, container))))
            container[key] = container.get(source)
    text = yaml.dump(data, Dumper=NoAliases, sort_keys=False, allow_unicode=True)
    if draw(st.integers(0, 9)) == 7:
        at, length = draw(st.integers(0, len(text))), draw(st.integers(0, 9))
        text = text[:at] + draw(st.text(max_size=3)) + text[at + length :]
    return text


class NoAliases(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


MUTATED = {"text": mutated_plans(), "processes": st.sampled_from([8, 8, 8, 4])}


@pytest.mark.sampled(2, day=1)
@settings(FEW, max_examples=100)
@given(**MUTATED)
def test_any_plan_file_is_run_or_refused(text: str, processes: int, tmp_path: Path) -> None:
    path = tmp_path / "mutated.yaml"
    path.write_text(text, encoding="utf-8", errors="surrogatepass")
    config = dataclasses.replace(LEFT_OPEN, parallel=ParallelConfig(plan=str(path)))
    plan = plan_or_refusal(config, processes)
    event("refused" if isinstance(plan, str) else "run")
    if isinstance(plan, str):
        assert str(path) in plan
    else:
        check_plan(config, plan, processes, tmp_path)


test_many_more_plan_files_are_run_or_refused = more(test_any_plan_file_is_run_or_refused, 300, **MUTATED)
