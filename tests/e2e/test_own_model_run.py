"""train.main, tools.plan, tools.simulate and tools.dryrun with a model of someone else."""

import json
from pathlib import Path

import pytest
import torch

from meshwright.parallel.plan.serialize import load_plan
from meshwright.tools.checkpoint.__main__ import main as convert
from meshwright.tools.checkpoint.convert import checkpoint_config
from meshwright.train.checkpoint.commit import find_newest, list_checkpoints
from meshwright.train.config_parser import parse_config
from meshwright.train.errors import NoPredictionError
from meshwright.train.model.trained_model import call_factory
from meshwright.train.planning.predict import run_workload
from meshwright.train.planning.resolve import plan_run
from meshwright.train.user_code import allow
from tests.support.checkpoint_saves import saved_weights
from tests.support.factories import RUN, Nano, causal_lm
from tests.support.hf_models import make_tokens
from tests.support.launch import EAGER, rows_in, run, started
from tests.support.run_faults import curve

QWEN3 = [*RUN, *causal_lm("qwen3"), "--train.steps=16", "--train.eval_every=4", "--checkpoint.every=4"]
QWEN3.append("--train.eval_sequences=8")
MIXER = [*RUN, *EAGER, "--model.factory=tests.support.factories:mixer", "--model.blocks=[12]"]


def figures(folder: Path) -> dict[str, float]:
    """Loss and gradient norm of each step."""
    pairs = {step: zip(("loss", "norm"), pair, strict=True) for step, pair in curve(folder).items()}
    return {f"{name} {step}": value for step, pair in pairs.items() for name, value in pair}


@pytest.mark.slow
@pytest.mark.sampled(10)
def test_qwen3_is_killed_goes_on_on_another_mesh_and_returns_to_transformers(data, tmp_path: Path) -> None:
    """On 4 ranks, FSDP 2 x TP 2, killed after the first save; on 2 ranks to the end, planned by itself."""
    from transformers import AutoModelForCausalLM

    mesh = ["--parallel.tp=2", "--parallel.dp_shard=2"]
    whole, folder = tmp_path / "whole", tmp_path / "run"
    assert run(4, *QWEN3, *EAGER, *data, *mesh, f"--run.dir={whole}").returncode == 0
    saved = folder / "checkpoints" / "step-00000004" / "manifest.json"
    keys = [*QWEN3, *EAGER, *data, f"--run.dir={folder}"]
    with started(4, *keys, *mesh, output=tmp_path / "out") as launch:
        assert launch.wait_until(saved.exists), launch.output()
        for rank in launch.ranks:
            rank.kill()
    done = run(2, *keys, "--parallel.plan=auto")
    assert done.returncode == 0, done.stdout + done.stderr
    assert str(saved.parent) in done.stdout
    assert load_plan(folder / "plan.yaml").mesh.world_size == 2
    expected, got = figures(whole), figures(folder)
    assert expected.keys() - got.keys() <= {"loss 4", "norm 4"}, "the row after a save may be lost"
    assert got == pytest.approx({key: expected[key] for key in got}, abs=1e-4)

    convert(["export", str(folder), str(tmp_path / "hf")])
    back, info = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not any(map(len, info.values()))
    checkpoint = find_newest(folder)
    config = checkpoint_config(checkpoint).model
    allow([config.factory])  # type: ignore[union-attr]
    own = call_factory(config, values=True).module  # type: ignore[arg-type]
    own.load_state_dict(saved_weights(checkpoint))
    ids = make_tokens(264, 2, 24)
    with torch.no_grad():
        assert torch.equal(back.eval()(ids).logits, own.eval()(ids).logits)

    evaluated = run(1, str(folder), "--json", module="tools.eval")
    assert evaluated.returncode == 2
    assert "which only a checkpoint names" in evaluated.stderr
    named = run(1, str(folder), "--json", "--sequences=8", QWEN3[len(RUN)], module="tools.eval")
    assert named.returncode == 0, named.stderr
    assert json.loads(named.stdout)["sets"]["held_out"]["loss"] == pytest.approx(
        rows_in(folder)[-1]["eval_loss"], abs=1e-4
    )
    text = ["--json", "--sequences=8", "--seq_len=32", "--tokenizer=bytes", data[0].replace(".source", "")]
    scores = [
        json.loads(run(1, str(path), *text, QWEN3[len(RUN)], *keys, module="tools.eval").stdout)["sets"]
        for path, keys in ((folder, []), (tmp_path / "hf", [f"--model.args.folder={tmp_path / 'hf'}"]))
    ]
    (ours,), (of_folder,) = (each.values() for each in scores)
    assert of_folder == pytest.approx(ours, abs=1e-4), "the exported folder, read by the same factory"
    prompt = [f"--run={folder}", "--prompt=def f", "--temperature=0", "--max_new_tokens=8"]
    generated = run(1, *prompt, QWEN3[len(RUN)], module="tools.generate")
    begun = torch.tensor([list(b"def f")])
    theirs = back.generate(
        begun, do_sample=False, use_cache=True, max_new_tokens=8, suppress_tokens=[*range(257, 264)]
    )
    assert generated.stdout == bytes(theirs[0].tolist()).decode(errors="replace") + "\n"


@pytest.fixture(scope="module")
def trained(data, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a profiled run of three steps on two ranks, saved at step 1."""
    folder = tmp_path_factory.mktemp("own") / "run"
    keys = ["--train.steps=3", "--checkpoint.every=1", "--checkpoint.keep=0", "--profile.start=2"]
    done = run(2, *MIXER, *data, *keys, "--profile.steps=2", f"--run.dir={folder}")
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.slow
@pytest.mark.sampled(6)
def test_a_model_of_ones_own_resumes_on_another_mesh(trained: Path, data, tmp_path: Path) -> None:
    resume = f"--checkpoint.resume={trained / 'checkpoints' / 'step-00000001'}"
    again = run(1, *MIXER, *data, resume, "--train.steps=3", f"--run.dir={tmp_path / 'run'}")
    assert again.returncode == 0, again.stderr
    expected = {key: value for key, value in figures(trained).items() if not key.endswith(" 1")}
    assert figures(tmp_path / "run") == pytest.approx(expected, abs=1e-4)


@pytest.mark.slow
@pytest.mark.sampled(6)
def test_a_profiled_run_is_compared_with_its_plan_if_its_factory_is_named(trained: Path) -> None:
    unnamed = run(1, str(trained), module="tools.trace")
    assert unnamed.returncode == 0, unnamed.stderr
    assert "not compared" in unnamed.stdout
    assert "which only a checkpoint names" in unnamed.stdout
    factory = "--model.factory=tests.support.factories:mixer"
    named = run(1, str(trained), factory, "--json", module="tools.trace")
    assert named.returncode == 0, named.stderr
    assert "lanes" in named.stdout
    assert "which only a checkpoint names" not in named.stdout


@pytest.mark.sampled(3, day=1)
def test_text_of_a_model_that_is_not_our_llama_is_refused(trained: Path) -> None:
    generated = run(1, f"--run={trained}", module="tools.generate")
    assert generated.returncode == 2
    assert "tests.support.factories:mixer" in generated.stderr


@pytest.mark.sampled(3, day=2)
def test_a_gpt_that_gives_logits_and_loss_trains_and_generates(data, tmp_path: Path) -> None:
    """Its own forward unchanged, two of its parameters frozen, on two ranks."""
    nano = "--model.factory=tests.support.factories:nano"
    keys = [
        *RUN,
        *EAGER,
        *data,
        "--train.steps=2",
        "--checkpoint.every=-1",
        "--train.freeze=[transformer.h.0.norm.*]",
    ]
    done = run(2, *keys, nano, f"--run.dir={tmp_path / 'run'}")
    assert done.returncode == 0, done.stderr
    allow(["tests.support.factories:nano"])
    model = Nano()
    share = 64 / sum(parameter.numel() for parameter in model.parameters())
    assert f"{share:.1%} of them frozen (2 of {len([*model.parameters()])} tensors)" in done.stdout
    model.load_state_dict(saved_weights(find_newest(tmp_path / "run")), strict=False)
    ids = list(b"def f")
    with torch.no_grad():
        for _ in range(6):
            ids.append(int(model(torch.tensor([ids]))[0][0, -1, :257].argmax()))
    options = [f"--run={tmp_path / 'run'}", "--prompt=def f", "--temperature=0", "--max_new_tokens=6"]
    generated = run(1, *options, nano, module="tools.generate")
    assert generated.returncode == 0, generated.stderr
    assert generated.stdout == bytes(ids).decode(errors="replace") + "\n"


def test_a_model_that_cannot_be_traced_loses_only_its_prediction(data, tmp_path: Path) -> None:
    noting = [*RUN, *EAGER, "--model.factory=tests.support.factories:noting", "--model.blocks=[12]"]
    done = run(1, *noting, *data, "--train.steps=1", f"--run.dir={tmp_path / 'run'}")
    assert done.returncode == 0, done.stderr
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("no prediction: "))
    assert "tests.support.factories:noting cannot be traced" in line
    config = parse_config(noting)
    with pytest.raises(NoPredictionError, match=r"parallel\.plan=manual"):
        run_workload(config.job, plan_run(config.job, 1))


def test_the_first_bad_value_of_a_model_of_ones_own_is_named(data, tmp_path: Path) -> None:
    keys = ["--optim.lr=1e37", "--optim.warmup_steps=0", "--train.max_skipped_steps=0", "--train.steps=4"]
    failed = run(1, *MIXER, *data, *keys, "--checkpoint.every=-1", f"--run.dir={tmp_path / 'run'}")
    assert failed.returncode == 1
    assert "Traceback" not in failed.stderr
    assert "is not finite" in failed.stderr
    assert "the output of 1.norm " in failed.stderr
    assert [path.name for path in list_checkpoints(tmp_path / "run" / "checkpoints")] == ["step-00000001"]


@pytest.mark.sampled(3, day=0)
def test_the_planning_commands_take_a_factory() -> None:
    planned = run(1, *MIXER, "--gpus=2", "--json", module="tools.plan")
    assert planned.returncode == 0, planned.stderr
    assert json.loads(planned.stdout)["plan"]["mesh"]["dp_shard"] == 2
    simulated = run(1, *MIXER, "--world-size=2", "--json", module="tools.simulate")
    assert simulated.returncode == 0, simulated.stderr
    assert "1" in {each["unit"] for each in json.loads(simulated.stdout)["collectives"]}


@pytest.mark.slow
@pytest.mark.sampled(10)
def test_a_model_of_transformers_is_planned_and_its_plan_checked(tmp_path: Path) -> None:
    model = [*RUN, "--train.micro_batch_size=auto", *causal_lm("qwen3"), "--json"]
    h100 = ["--gpus=8", "--gpu=h100-sxm", "--parallel.plan=auto", f"--timeline={tmp_path / 'step.svg'}"]
    planned = run(1, *model, *h100, module="tools.plan")
    assert planned.returncode == 0, planned.stderr
    report = json.loads(planned.stdout)
    assert report["predicted"]["fits"]
    assert report["candidates"]
    assert report["plan"]["modules"][-1] == "lm_head"
    assert "model.layers.1" in (tmp_path / "step.svg").read_text()
    checked = run(1, *model, "--gpus=4", "--parallel.tp=2", "--check", *EAGER, module="tools.plan")
    assert checked.returncode == 0, checked.stdout
