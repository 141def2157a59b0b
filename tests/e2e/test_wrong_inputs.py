"""Every kind of wrong input ends with exit code 2 and one message that has the rule, the value, the place and
what to do; nothing is written. test_mistakes.py and test_config_parser.py have every rule."""

import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.support.launch import EAGER, TINY, run
from tests.support.plans import check_facts
from tests.support.tables import rows

SMALL = ["--config=llama_debug.yaml", *TINY, *EAGER, "--parallel.param_dtype=float32"]

ACCELERATE = """distributed_type: FSDP
num_processes: 8
num_machines: 2
mixed_precision: bf16
fsdp_config:
  fsdp_version: 1
  fsdp_sharding_strategy: HYBRID_SHARD
  fsdp_activation_checkpointing: true
  fsdp_offload_params: false
  fsdp_backward_prefetch: BACKWARD_PRE
  fsdp_state_dict_type: SHARDED_STATE_DICT
"""

WRONG_FILES = {
    "twice.yaml": "train: {steps: 1}\noptim: {lr: 1}\ntrain: {steps: 2}\n",
    "rope.yaml": "model:\n  rope_scaling: {kind: yarn, factor: 2}\n",
    "empty/nothing.bin": "",
    "records.jsonl": '{"text": "a"}\n{"te',
    "field.jsonl": '{"body": "a"}\n',
    "tokenizer.json": "{",
    "latin.txt": "caf\udce9",
    "short.txt": "fewer than 33 bytes",
    "spec.yaml": "config: llama_debug\ngrids: {}\n",
    "spec-key.yaml": "config: llama_debug\ngrid: {train.stepz: [1, 2]}\n",
    "ds.yaml": "distributed_type: DEEPSPEED\n",
    "fsdp-wrong.yaml": ACCELERATE.replace("HYBRID_SHARD\n", "SOME_SHARD\n"),
    "file": "",
    "hf/config.json": '{"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}',
    "metrics/metrics.jsonl": "{\n",
}

# Arguments after a correct command of train.main -> what its message has. {tmp} is the folder of WRONG_FILES
# and of damaged copies.
TRAIN = """
--parallel.dp_shrad=2 -> parallel.dp_shrad ... parallel.dp_shard
--parallel.compile=inductor -> --parallel.compile ... section ... --parallel.compile.NAME=value
--train.freeze=[nothing.*] -> train.freeze ... nothing.* ... layers.0.attention_norm.weight
--config={tmp}/twice.yaml -> {tmp}/twice.yaml ... train ... line 3 ... line 1 ... merge
--config={tmp}/rope.yaml -> model.rope_scaling.kind=yarn ... llama3 ... linear
--run.dir={tmp}/file -> run.dir={tmp}/file ... File exists
--run.dir=/dev/null/run -> run.dir=/dev/null/run ... name another
--parallel.compile.enabled=true --parallel.compile.cache_dir=/dev/null/c
 -> cache_dir=/dev/null/c ... name another
--run.device=cuda -> run.device=cuda needs a GPU ... shows 0 GPUs ... --run.device=cpu
--parallel.tp=2 -> dp_replicate=1 x dp_shard=1 x tp=2 ... 2 processes ... use 2 processes
--parallel.plan={tmp}/nowhere.yaml -> parallel.plan={tmp}/nowhere.yaml ... manual, auto
--parallel.plan={tmp}/plan-prefetch.yaml
 -> {tmp}/plan-prefetch.yaml ... unit tok_embeddings ... forward_prefetch ... layers.7
--parallel.plan={tmp}/plan.yaml --model.n_layers=3 -> {tmp}/plan.yaml ... layers.2 ... new plan
--data.source={tmp}/nowhere -> data.source={tmp}/nowhere ... stdlib
--data.source={tmp}/short.txt -> sequence ... train.seq_len=32
--data.source={tmp}/empty -> data.source={tmp}/empty ... .jsonl.gz
--data.source={tmp}/latin.txt -> {tmp}/latin.txt ... byte 3 ... UTF-8
--data.source={tmp}/records.jsonl -> {tmp}/records.jsonl ... line 2 ... JSON object
--data.source={tmp}/field.jsonl -> {tmp}/field.jsonl ... line 1 ... body ... data.text_field
--data.source=hf:wiki -> data.source=hf:wiki ... python -m tools.prepare_data hf:wiki
'--data.mixture={{tmp}/file: -1}' -> data.mixture ... {tmp}/file=-1 ... greater than 0
'--data.validation={v: {tmp}/nowhere}' -> data.validation.v={tmp}/nowhere ... no such file
--data.tokenizer={tmp}/tokenizer.json -> data.tokenizer={tmp}/tokenizer.json ... line 1 ... bytes
--data.source={tmp}/prepared-changed -> {tmp}/prepared-changed/train-00000.bin ... again
--data.source={tmp}/prepared-lacks -> {tmp}/prepared-lacks/train-00000.bin ... again
--data.source={tmp}/prepared-manifest -> {tmp}/prepared-manifest/manifest.json ... again
--checkpoint.init_from={tmp}/nowhere -> checkpoint.init_from={tmp}/nowhere ... no such file ... checkpoint
--checkpoint.init_from={tmp}/file -> {tmp}/file ... torch.save(model.state_dict(), FILE)
--checkpoint.init_from={tmp}/hf -> {tmp}/hf/config.json ... model_type=gpt2 ... hidden_size
--checkpoint.resume={tmp}/nowhere -> checkpoint.resume={tmp}/nowhere ... checkpoints/step-
--checkpoint.resume={tmp}/changed -> {tmp}/changed ... rank-00000.safetensors ... another
--checkpoint.resume={tmp}/lacks -> {tmp}/lacks ... rank-00000.safetensors ... missing
--checkpoint.resume={tmp}/good --model.n_layers=1
 -> {tmp}/good ... model.n_layers=1 (saved: 2) ... checkpoint.changed_model
"""

# Commands -> what their messages have. {own} is a folder of the case.
TOOLS = """
train.main --config llama_405b --run.dir={own} -> GiB per process ... It needs ... params ... Fits
tools.plan -> --gpus ... -h
tools.plan --config llama_8b --gpus 0 -> --gpus ... 0 ... at least 1
tools.plan --config llama_debug --gpus 1 --save {tmp}/plan.yaml -> --save={tmp}/plan.yaml
tools.plan diff {tmp}/plan.yaml {tmp}/nowhere -> {tmp}/nowhere ... No such file
tools.simulate --config llama_debug -> --world-size
tools.simulate --config llama_debug --world-size 4 --rank 4 -> --rank=4 ... --world-size=4
tools.dryrun --config llama_debug -> --gpus
tools.dryrun --config llama_debug --gpus 2 --modell.dim=64 -> modell.dim ... model.dim
tools.trace {tmp}/nowhere -> {tmp}/nowhere ... no such
tools.trace {tmp}/run -> {tmp}/run ... --profile.start=STEP ... --profile.all_ranks=true
tools.trace {tmp}/file -> {tmp}/file ... trace
tools.calibrate --name mine --base nothing -> nothing ... configs/hardware ... h100-sxm
tools.sweep nothing -> nothing ... configs/experiments ... prefetch.yaml
tools.sweep {tmp}/spec.yaml -> {tmp}/spec.yaml ... grids ... grid
tools.sweep {tmp}/spec-key.yaml --dry-run -> {tmp}/spec-key.yaml ... train.stepz ... train.steps
tools.compare {tmp}/run {tmp}/nowhere -> {tmp}/nowhere ... runs/llama_debug
tools.compare {tmp}/run {tmp}/metrics -> {tmp}/run ... {tmp}/metrics ... metrics.every
tools.doctor --fast -> --fast
tools.checkpoint ls {tmp}/nowhere -> {tmp}/nowhere ... runs/NAME
tools.checkpoint verify {tmp}/changed -> {tmp}/changed ... rank-00000.safetensors
tools.checkpoint verify {tmp}/lacks --json -> {tmp}/lacks ... rank-00000.safetensors ... missing
tools.checkpoint show {tmp}/manifest -> {tmp}/manifest/manifest.json ... another
tools.checkpoint export {tmp}/good {own}.pt -> own.pt ... FILE.safetensors
tools.checkpoint import {tmp}/hf {own} -> {tmp}/hf/config.json ... model_type=gpt2
tools.checkpoint export {tmp}/good {tmp}/empty -> {tmp}/empty ... --force
tools.prepare_data {tmp}/field.jsonl {tmp}/empty -> {tmp}/empty ... another folder
tools.prepare_data {tmp}/field.jsonl {own} --workers 0 -> --workers ... 0 ... at least 1
tools.eval {tmp}/nowhere -> {tmp}/nowhere ... runs/NAME
tools.eval {tmp}/good --data {tmp}/nowhere -> {tmp}/nowhere ... stdlib
tools.generate -> --run
tools.generate --run {tmp}/run --max_new_tokens -1 -> --max_new_tokens ... -1 ... at least 0
tools.import_accelerate -> FILE
tools.import_accelerate {tmp}/ds.yaml -> {tmp}/ds.yaml ... DEEPSPEED ... FSDP ... num_processes
tools.import_accelerate {tmp}/fsdp-wrong.yaml -> fsdp_sharding_strategy=SOME_SHARD ... HYBRID_SHARD_ZERO2
"""


@pytest.fixture(scope="module")
def inputs(data: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wrong files, and damaged copies of a good checkpoint, plan and prepared data."""
    folder = tmp_path_factory.mktemp("inputs")
    for name, text in WRONG_FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(text.encode(errors="surrogateescape"))
    text = data[0].removeprefix("--data.source=")
    trained = run(1, *SMALL, *data, "--train.steps=2", "--checkpoint.every=2", f"--run.dir={folder / 'run'}")
    assert trained.returncode == 0, trained.stderr
    prepared = run(1, text, str(folder / "prepared"), "--workers", "1", module="tools.prepare_data")
    assert prepared.returncode == 0, prepared.stderr
    plan = (folder / "run/plan.yaml").read_text()
    (folder / "plan.yaml").write_text(plan)
    (folder / "plan-prefetch.yaml").write_text(plan.replace("prefetch: 1", "prefetch: [layers.7]", 1))
    damage(folder / "run/checkpoints/step-00000002", folder, "")
    damage(folder / "prepared", folder, "prepared-")
    return folder


def damage(good: Path, folder: Path, prefix: str) -> None:
    """Copy a good folder four times: one copy stays good, the others get one fault each."""
    copies = {name: folder / f"{prefix}{name}" for name in ("good", "changed", "lacks", "manifest")}
    for copy in copies.values():
        shutil.copytree(good, copy)
    largest = max(good.iterdir(), key=lambda path: path.stat().st_size).name
    content = bytearray((copies["changed"] / largest).read_bytes())
    content[-1] ^= 1
    (copies["changed"] / largest).write_bytes(content)
    (copies["lacks"] / largest).unlink()
    (copies["manifest"] / "manifest.json").write_text("{")


def check(module: str, arguments: list[str], facts: str, folder: Path) -> Any:
    before = sorted(folder.rglob("*"))
    result = run(1, *arguments, module=module)
    assert result.returncode == 2, f"{result.stdout[-1000:]}\n{result.stderr[-2000:]}"
    assert "Traceback" not in result.stderr
    check_facts(result.stderr, facts.replace("{tmp}", str(folder)))
    assert sorted(folder.rglob("*")) == before
    return result


SLOW = [pytest.mark.slow, pytest.mark.sampled(8)]
LATE = re.compile("{tmp}|train.freeze")  # needs the inputs, or is found when the run has begun


@pytest.mark.parametrize(
    ("line", "facts"),
    [pytest.param(*row, id=row[0], marks=SLOW if LATE.search(row[0]) else []) for row in rows(TRAIN)],
)
def test_a_wrong_input_of_a_run_is_refused_with_its_facts(
    line: str, facts: str, data: list[str], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    is_late, own = LATE.search(line), f"--run.dir={tmp_path / 'run'}"
    inputs = request.getfixturevalue("inputs") if is_late else tmp_path
    added = shlex.split(line.replace("{tmp}", str(inputs)))
    result = check("train.main", [*SMALL, *data, "--train.steps=1", own, *added], facts, inputs)
    assert is_late or result.stdout == ""
    assert not (tmp_path / "run/metrics.jsonl").exists()


@pytest.mark.slow
@pytest.mark.sampled(8)
@pytest.mark.parametrize(("line", "facts"), rows(TOOLS), ids=[line for line, _ in rows(TOOLS)])
def test_a_wrong_input_of_a_tool_is_refused_with_its_facts(
    line: str, facts: str, inputs: Path, tmp_path: Path
) -> None:
    own = str(tmp_path / "own")
    module, *arguments = shlex.split(line.replace("{tmp}", str(inputs)).replace("{own}", own))
    check(module, arguments, facts, inputs)
    assert not any(tmp_path.iterdir())
