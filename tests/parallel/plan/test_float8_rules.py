"""Float8 in plans: the choice of linears, the rules, and the planner's predictions."""

import dataclasses
from pathlib import Path

import pytest
import torch

from meshwright.models.llama import Llama
from meshwright.parallel.errors import PlanError
from meshwright.parallel.float8 import apply_float8, check_float8
from meshwright.parallel.plan.mistakes import file_line
from meshwright.parallel.plan.schema import Float8Plan, Plan
from meshwright.parallel.plan.serialize import load_plan, plan_to_table, plan_to_yaml
from meshwright.parallel.plan.validate import validate
from meshwright.parallel.planner.cost_model import step_times
from meshwright.parallel.planner.hardware import load_hardware
from meshwright.parallel.planner.memory_model import predict_step_memory
from meshwright.train.config_parser import parse_config
from meshwright.train.model.choose import source_of
from meshwright.train.planning.predict import predict, run_workload
from meshwright.train.planning.resolve import plan_run
from tests.support.launch import TINY
from tests.support.plans import check_facts
from tests.support.tables import try_each

TENSORWISE = "--parallel.float8.recipe=tensorwise"
SENT = "--parallel.float8.all_gather=true"
LLAMA_8B = [
    "--config=llama_8b",
    "--model.n_layers=2",
    "--parallel.param_dtype=bfloat16",
    "--train.micro_batch_size=1",
    "--train.global_batch_size=-1",
]
ALL = ("wq", "wk", "wv", "wo", "w1", "w2", "w3")


def plan_8b(*arguments: str, gpus: int = 8) -> Plan:
    return plan_run(parse_config([*LLAMA_8B, *arguments]).job, gpus)


CHOSEN: list[tuple[list[str], tuple[str, ...]]] = [
    ([], ()),
    ([TENSORWISE], ALL),
    ([TENSORWISE, "--parallel.float8.linears=[layers.*.feed_forward.*]"], ("w1", "w2", "w3")),
    ([TENSORWISE, "--parallel.float8.linears=['*.wo', '*.w2']"], ("wo", "w2")),
    # wk and wv have 1,024 outputs
    ([TENSORWISE, "--parallel.float8.min_dim=2048"], ("wq", "wo", "w1", "w2", "w3")),
    ([TENSORWISE, "--parallel.tp=2"], ("wq", "wo", "w1", "w2", "w3")),  # and here 512 on a rank
    ([TENSORWISE, "--parallel.tp=2", "--parallel.tp_modules=[feed_forward]"], ALL),
    ([TENSORWISE, "--parallel.tp=8", "--parallel.float8.min_dim=1024"], ("w1", "w2", "w3")),
]


def test_linears_are_chosen_by_name_and_by_the_size_of_a_ranks_part() -> None:
    def check(arguments: list[str], chosen: tuple[str, ...]) -> None:
        linears = plan_8b(*arguments).float8.linears
        assert tuple(pattern.rpartition(".")[2] for pattern in linears) == chosen

    try_each(CHOSEN, check)


def test_any_number_of_tokens_is_padded_to_what_a_gpu_multiplies() -> None:
    """On a GPU the product for a weight's gradient needs a multiple of 16 tokens; emulation does not."""
    pytest.importorskip("torchao")
    config = parse_config([*TINY, TENSORWISE, "--parallel.float8.min_dim=16"])
    model = Llama(config.model)
    apply_float8(model, plan_run(config.job, 1), "cpu")
    configs = [module.linear_mm_config for module in model.modules() if hasattr(module, "linear_mm_config")]
    assert len(configs) == 7 * config.model.n_layers
    assert all(config.grad_weight.pad_inner_dim for config in configs)


ROWWISE = "--parallel.float8.recipe=rowwise"
REFUSED: list[tuple[list[str], str]] = [
    (
        [TENSORWISE, "--parallel.float8.linears=[layers.*.wx]"],
        "float8.linears: layers.*.wx ... layers.*.attention.wq",
    ),
    ([TENSORWISE, "--parallel.float8.min_dim=5000"], "recipe=tensorwise ... lower min_dim"),
    ([TENSORWISE, "--parallel.float8.min_dim=0"], "min_dim=0 ... at least 1"),
    ([TENSORWISE, "--model.ffn_dim=14344"], "w1 has 14344 ... multiples of 16"),
    ([ROWWISE, SENT], "float8.all_gather=true ... recipe=rowwise ... all_gather=false"),
    ([ROWWISE, "--parallel.param_dtype=float32"], "recipe=rowwise ... float32 ... param_dtype=bfloat16"),
    (
        [TENSORWISE, SENT, "--parallel.reshard_after_forward=2"],
        "float8.all_gather=true ... reshard_after_forward true",
    ),
    (
        [TENSORWISE, "--parallel.fused_projections=true"],
        "recipe=tensorwise ... fused_projections=true ... one of the two",
    ),
    ([SENT], "recipe=none ... all_gather=false"),
]


def test_what_cannot_be_in_float8_is_refused_with_a_way_out() -> None:
    def check(arguments: list[str], facts: str, gpus: int = 8) -> None:
        with pytest.raises(PlanError) as refused:
            plan_8b(*arguments, gpus=gpus)
        check_facts(str(refused.value), facts)

    try_each(REFUSED, check)
    check([TENSORWISE, SENT], "all_gather=true ... dp_shard=3 ... 4096 outputs ... wq ... use false", gpus=3)
    cp = ["--parallel.dp_shard=1", "--parallel.cp=3", "--parallel.cp_exchange=gather", "--train.seq_len=6144"]
    check([TENSORWISE, SENT, *cp], "all_gather=true ... cp=3 ... 4096 outputs ... wq ... use false", gpus=3)


def test_a_plan_file_says_it_and_is_checked(tmp_path: Path) -> None:
    config = parse_config([*LLAMA_8B, TENSORWISE, SENT])
    plan = plan_run(config.job, 8)
    (tmp_path / "plan.yaml").write_text(plan_to_yaml(plan))
    assert load_plan(tmp_path / "plan.yaml") == plan
    assert "float8 tensorwise, gathered in float8 too: layers.*.attention.wq," in plan_to_table(plan)
    for wrong, facts in (
        (Float8Plan("none", plan.float8.linears, False), "recipe=none ... no linears"),
        (Float8Plan("fp8", (), False), "recipe=fp8 ... none, tensorwise, rowwise"),
        (Float8Plan("tensorwise", ("layers.*.wq",), False), "layers.*.wq ... layers.*.attention.wq"),
        (Float8Plan("tensorwise", (), False), "recipe=tensorwise ... min_dim or tp, or use none"),
    ):
        edited = dataclasses.replace(plan, float8=wrong)
        (mistake,) = validate(edited, source_of(config.model).units, 8, config.train.seq_len)
        check_facts(file_line(mistake), facts)


def test_a_config_beside_a_plan_file_must_not_say_other_than_it(tmp_path: Path) -> None:
    (tmp_path / "plan.yaml").write_text(plan_to_yaml(plan_8b(TENSORWISE)))
    with_file = [*LLAMA_8B, "--parallel.param_dtype=bfloat16", f"--parallel.plan={tmp_path / 'plan.yaml'}"]
    # min_dim is not compared with the file, which lists the linears that it selected
    plan_run(parse_config([*with_file, TENSORWISE, "--parallel.float8.min_dim=16"]).job, 8)
    with pytest.raises(
        PlanError, match=r"parallel.float8.recipe=rowwise.* plan file .* has tensorwise.*: remove the key"
    ):
        plan_run(parse_config([*with_file, "--parallel.float8.recipe=rowwise"]).job, 8)


@pytest.mark.slow
@pytest.mark.sampled(5)
def test_the_planner_knows_faster_products_and_smaller_all_gathers() -> None:
    """Of w2, a quarter of a block's weights; each further set of linears is traced for seconds."""
    w2 = [TENSORWISE, "--parallel.float8.linears=['*.w2']"]

    def judged(*arguments: str) -> tuple[float, float, int]:
        job = parse_config([*LLAMA_8B, "--model.n_layers=1", *arguments]).job
        plan = plan_run(job, 8)
        work = run_workload(job, plan)
        times = step_times(plan, work, load_hardware()["h100-sxm"], 8)
        memory = predict_step_memory(plan, work).memory
        return times.modules["layers.0"].forward.compute_s, times.units["layers.0"].gather_s, memory.unsharded

    plain_s, plain_gather_s, plain_bytes = judged()
    fast_s, *gathered = judged(*w2)
    assert fast_s < 0.97 * plain_s
    assert gathered == [plain_gather_s, plain_bytes], "weights are gathered in the same dtype"
    _, sent_gather_s, sent_bytes = judged(*w2, SENT)
    assert 0.8 * plain_gather_s < sent_gather_s < 0.9 * plain_gather_s
    assert plain_bytes - sent_bytes >= 4096 * 14336, "one byte instead of two for each weight of w2"


def test_a_kind_of_gpu_that_has_no_float8_is_refused_in_planning() -> None:
    config = parse_config([*LLAMA_8B, TENSORWISE])
    with pytest.raises(PlanError, match=r"parallel.float8.recipe=tensorwise: a100-80gb .*8\.9.*: use none"):
        predict(config.job, plan_run(config.job, 8), load_hardware()["a100-80gb"], 8)


def test_a_gpu_that_has_no_float8_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torchao")
    plan = Float8Plan("tensorwise", ("layers.*.attention.wq",), False)
    check_float8(plan, torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "an A100")
    with pytest.raises(
        PlanError,
        match=r"compute capability 8\.9 or more, but an A100 has 8\.0: use parallel\.float8\.recipe=none",
    ):
        check_float8(plan, torch.device("cuda"))
