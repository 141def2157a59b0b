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
from meshwright.train.planning.predict import predict, run_workload
from meshwright.train.planning.resolve import model_units, plan_run
from tests.support.launch import TINY

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


def names(plan: Plan) -> tuple[str, ...]:
    return tuple(pattern.rpartition(".")[2] for pattern in plan.float8.linears)


@pytest.mark.parametrize(
    ("arguments", "chosen"),
    [
        ([], ()),
        ([TENSORWISE], ALL),
        ([TENSORWISE, "--parallel.float8.linears=[layers.*.feed_forward.*]"], ("w1", "w2", "w3")),
        ([TENSORWISE, "--parallel.float8.linears=['*.wo', '*.w2']"], ("wo", "w2")),
        # wk and wv have 1,024 outputs
        ([TENSORWISE, "--parallel.float8.min_dim=2048"], ("wq", "wo", "w1", "w2", "w3")),
        ([TENSORWISE, "--parallel.tp=2"], ("wq", "wo", "w1", "w2", "w3")),  # and here 512 on a rank
        ([TENSORWISE, "--parallel.tp=2", "--parallel.tp_modules=[feed_forward]"], ALL),
        ([TENSORWISE, "--parallel.tp=8", "--parallel.float8.min_dim=1024"], ("w1", "w2", "w3")),
    ],
)
def test_linears_are_chosen_by_name_and_by_the_size_of_a_ranks_part(arguments, chosen) -> None:
    assert names(plan_8b(*arguments)) == chosen


def test_any_number_of_tokens_is_padded_to_what_a_gpu_multiplies() -> None:
    """On a GPU the product for a weight's gradient needs a multiple of 16 tokens; emulation does not."""
    pytest.importorskip("torchao")
    config = parse_config([*TINY, TENSORWISE, "--parallel.float8.min_dim=16"])
    model = Llama(config.model)
    apply_float8(model, plan_run(config.job, 1), "cpu")
    configs = [module.linear_mm_config for module in model.modules() if hasattr(module, "linear_mm_config")]
    assert len(configs) == 7 * config.model.n_layers
    assert all(config.grad_weight.pad_inner_dim for config in configs)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            [TENSORWISE, "--parallel.float8.linears=[layers.*.wx]"],
            ["parallel.float8.linears: layers.*.wx", "no linear", "layers.*.attention.wq"],
        ),
        ([TENSORWISE, "--parallel.float8.min_dim=5000"], ["multiplies nothing in float8", "lower min_dim"]),
        ([TENSORWISE, "--model.ffn_dim=14344"], ["w1 has 14344", "multiples of 16"]),
        (
            ["--parallel.float8.recipe=rowwise", SENT],
            ["parallel.float8.all_gather=true", "recipe=rowwise", "all_gather=false"],
        ),
        (
            ["--parallel.float8.recipe=rowwise", "--parallel.param_dtype=float32"],
            ["recipe=rowwise", "param_dtype is float32", "use param_dtype=bfloat16"],
        ),
        (
            [TENSORWISE, SENT, "--parallel.reshard_after_forward=2"],
            ["parallel.float8.all_gather=true", "smaller groups", "use reshard_after_forward true or false"],
        ),
        (
            [TENSORWISE, "--parallel.fused_projections=true"],
            ["recipe=tensorwise", "fused_projections=true", "use one of the two"],
        ),
        ([TENSORWISE, "--parallel.float8.min_dim=0"], ["min_dim=0 must be at least 1"]),
        ([SENT], ["recipe=none", "all_gather=false"]),
    ],
)
def test_what_cannot_be_in_float8_is_refused_with_a_way_out(arguments, words) -> None:
    with pytest.raises(PlanError) as refused:
        plan_8b(*arguments)
    assert all(word in str(refused.value) for word in words), refused.value


def test_shards_that_are_not_alike_cannot_be_sent() -> None:
    with pytest.raises(
        PlanError, match=r"dp_shard=3 must divide the 4096 outputs of layers\.\*\.attention\.wq"
    ):
        plan_8b(TENSORWISE, SENT, gpus=3)


def test_a_plan_file_says_it_and_is_checked(tmp_path: Path) -> None:
    config = parse_config([*LLAMA_8B, TENSORWISE, SENT])
    plan = plan_run(config.job, 8)
    (tmp_path / "plan.yaml").write_text(plan_to_yaml(plan))
    assert load_plan(tmp_path / "plan.yaml") == plan
    assert "float8 tensorwise, gathered in float8 too: layers.*.attention.wq," in plan_to_table(plan)
    for wrong, words in (
        (Float8Plan("none", plan.float8.linears, False), ["recipe=none", "no linears"]),
        (Float8Plan("fp8", (), False), ["recipe=fp8", "none, tensorwise, rowwise"]),
        (Float8Plan("tensorwise", ("layers.*.wq",), False), ["layers.*.wq", "layers.*.attention.wq"]),
        (Float8Plan("tensorwise", (), False), ["recipe=tensorwise", "lower min_dim or tp, or use none"]),
    ):
        edited = dataclasses.replace(plan, float8=wrong)
        (mistake,) = validate(edited, model_units(config.model), 8, config.train.seq_len)
        assert all(word in file_line(mistake) for word in words), file_line(mistake)


def test_a_plan_file_that_gathers_tokens_in_float8_is_refused(tmp_path: Path) -> None:
    text = plan_to_yaml(plan_8b(TENSORWISE, SENT, "--parallel.tp=2"))
    section = "float8:\n  recipe: tensorwise\n"
    assert section in text
    (tmp_path / "empty.yaml").write_text(text.replace(section, f"{section}  tokens: []\n"))
    (tmp_path / "some.yaml").write_text(text.replace(section, f"{section}  tokens: [layers.*.ffn_norm]\n"))
    assert plan_to_yaml(load_plan(tmp_path / "empty.yaml")) == text
    with pytest.raises(PlanError, match=r"some\.yaml: float8.tokens=.*layers.*ffn_norm.*: remove the key"):
        load_plan(tmp_path / "some.yaml")


def test_a_config_beside_a_plan_file_must_not_say_other_than_it(tmp_path: Path) -> None:
    (tmp_path / "plan.yaml").write_text(plan_to_yaml(plan_8b(TENSORWISE)))
    with_file = [*LLAMA_8B, "--parallel.param_dtype=bfloat16", f"--parallel.plan={tmp_path / 'plan.yaml'}"]
    # min_dim is not compared with the file, which lists the linears that it selected
    plan_run(parse_config([*with_file, TENSORWISE, "--parallel.float8.min_dim=16"]).job, 8)
    with pytest.raises(
        PlanError, match=r"parallel.float8.recipe=rowwise.* plan file .* has tensorwise.*: remove the key"
    ):
        plan_run(parse_config([*with_file, "--parallel.float8.recipe=rowwise"]).job, 8)


def test_the_planner_knows_faster_products_and_smaller_all_gathers() -> None:
    h100 = load_hardware()["h100-sxm"]

    def judged(*arguments: str):
        config = parse_config([*LLAMA_8B, *arguments])
        plan = plan_run(config.job, 8)
        work = run_workload(config.job, plan)
        times = step_times(plan, work, h100, 8)
        return (
            times.modules["layers.0"],
            times.units["layers.0"],
            predict_step_memory(plan, work).memory.unsharded,
        )

    (plain, plain_unit, plain_bytes), (fast, same_unit, same_bytes) = judged(), judged(TENSORWISE)
    some = judged(TENSORWISE, "--parallel.float8.linears=['*.wo']")[0]
    assert fast.forward_s < 0.8 * plain.forward_s, (
        "products are most of a block's time, and nearly twice as fast"
    )
    assert fast.forward_s < some.forward_s < plain.forward_s
    assert (same_unit.gather_s, same_bytes) == (plain_unit.gather_s, plain_bytes), (
        "weights are gathered in the same dtype"
    )
    _, sent_unit, sent_bytes = judged(TENSORWISE, SENT)
    assert 0.45 * plain_unit.gather_s < sent_unit.gather_s < 0.6 * plain_unit.gather_s
    assert plain_bytes - sent_bytes >= 218_103_808, (
        "one byte instead of two for each weight of a block's products"
    )


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
