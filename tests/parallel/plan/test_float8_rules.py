"""Float8 of real models: padding, plan files, kinds of GPU, and the planner's predictions."""

from pathlib import Path

import pytest
import torch

from meshwright.models.llama import Llama
from meshwright.parallel.errors import PlanError
from meshwright.parallel.float8 import apply_float8, check_float8
from meshwright.parallel.plan.schema import Float8Plan
from meshwright.parallel.plan.serialize import plan_to_yaml
from meshwright.parallel.planner.cost_model import step_times
from meshwright.parallel.planner.hardware import load_hardware
from meshwright.parallel.planner.memory_model import predict_step_memory
from meshwright.train.config_parser import parse_config
from meshwright.train.planning.predict import predict, run_workload
from meshwright.train.planning.resolve import plan_run
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


def test_any_number_of_tokens_is_padded_to_what_a_gpu_multiplies() -> None:
    """On a GPU the product for a weight's gradient needs a multiple of 16 tokens; emulation does not."""
    pytest.importorskip("torchao")
    config = parse_config([*TINY, TENSORWISE, "--parallel.float8.min_dim=16"])
    model = Llama(config.model)
    apply_float8(model, plan_run(config.job, 1), "cpu")
    configs = [module.linear_mm_config for module in model.modules() if hasattr(module, "linear_mm_config")]
    assert len(configs) == 7 * config.model.n_layers
    assert all(config.grad_weight.pad_inner_dim for config in configs)


def test_a_plan_file_lists_the_linears_and_a_config_beside_it_says_the_same(tmp_path: Path) -> None:
    """min_dim is not compared with the file, which lists the linears that it selected."""
    plan = plan_run(parse_config([*LLAMA_8B, TENSORWISE, "--parallel.tp=2"]).job, 8)
    names = [pattern.rpartition(".")[2] for pattern in plan.float8.linears]
    assert names == ["wq", "wo", "w1", "w2", "w3"], "wk and wv have 512 outputs on a rank"
    (tmp_path / "plan.yaml").write_text(plan_to_yaml(plan))
    beside = [*LLAMA_8B, f"--parallel.plan={tmp_path / 'plan.yaml'}"]
    plan_run(parse_config([*beside, TENSORWISE, "--parallel.float8.min_dim=16"]).job, 8)
    with pytest.raises(
        PlanError, match=r"float8.recipe=rowwise.* plan file .* has tensorwise.*: remove the key"
    ):
        plan_run(parse_config([*beside, "--parallel.float8.recipe=rowwise"]).job, 8)


@pytest.mark.slow
@pytest.mark.sampled(10)
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
