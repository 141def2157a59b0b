"""Wrong inputs of every kind: files, plans and command lines, each with the facts that its message must have.

A case is a command line and facts. {tmp} is the folder of WRONG_FILES, WRONG_PLANS and the damaged copies,
{own} a folder of the case.
"""

Case = tuple[str, tuple[str, ...]]

_ACCELERATE = """distributed_type: FSDP
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
    "broken.yaml": "train: [\n",
    "twice.yaml": "train: {steps: 1}\noptim: {lr: 1}\ntrain: {steps: 2}\n",
    "scalar.yaml": "train: 5\n",
    "unknown.yaml": "train:\n  stepz: 5\n",
    "rope.yaml": "model:\n  rope_scaling: {kind: yarn, factor: 2}\n",
    "empty/nothing.bin": "",
    "records.jsonl": '{"text": "a"}\n{"te',
    "field.jsonl": '{"body": "a"}\n',
    "tokenizer.json": "{",
    "latin.txt": "caf\udce9",
    "plan-broken.yaml": "mesh: {dp_shard: 1\n",
    "spec.yaml": "config: llama_debug\ngrids: {}\n",
    "spec-key.yaml": "config: llama_debug\ngrid: {train.stepz: [1, 2]}\n",
    "ds.yaml": "distributed_type: DEEPSPEED\n",
    "fsdp-wrong.yaml": _ACCELERATE.replace("HYBRID_SHARD\n", "SOME_SHARD\n"),
    "file": "",
    "hf/config.json": '{"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}',
    "metrics/metrics.jsonl": "{\n",
}
# Each wrong plan file is the good one with one text replaced.
WRONG_PLANS = {
    "plan-lacks.yaml": ("accumulation: 4\n", ""),
    "plan-more.yaml": ("mesh:\n", "mesh:\n  ep: 2\n"),
    "plan-unit.yaml": ("- unit: layers.[0-1]", "- unit: layers.[0-2]"),
    "plan-type.yaml": ("dp_shard: 1", "dp_shard: one"),
    "plan-mesh.yaml": ("dp_shard: 1", "dp_shard: 4"),
    "plan-prefetch.yaml": ("forward_prefetch: 1", "forward_prefetch: [layers.7]"),
    "plan-checkpoint.yaml": ("activation_checkpoint: none", "activation_checkpoint: half"),
}

# Added to a correct command of train.main.
TRAIN: list[Case] = [
    # keys and types
    ("--parallel.dp_shrad=2", ("parallel.dp_shrad", "parallel.dp_shard")),
    ("--model.dim=1.5", ("model.dim", "integer", "1.5")),
    ("--train.steps", ("--train.steps", "argument")),
    ("something", ("something",)),
    ("--parallel.compile=inductor", ("--parallel.compile", "section", "--parallel.compile.NAME=value")),
    ("--train.freeze=[nothing.*]", ("train.freeze", "nothing.*", "layers.0.*")),
    # files
    ("--config=lama_debug.yaml", ("--config", "lama_debug.yaml", "llama_debug.yaml")),
    ("--config={tmp}/broken.yaml", ("{tmp}/broken.yaml", "line 2")),
    ("--config={tmp}/twice.yaml", ("{tmp}/twice.yaml", "train", "line 3", "line 1", "merge")),
    ("--config={tmp}/scalar.yaml", ("{tmp}/scalar.yaml", "train", "section", "5")),
    ("--config={tmp}/unknown.yaml", ("{tmp}/unknown.yaml", "train.stepz", "train.steps")),
    ("--config={tmp}/rope.yaml", ("model.rope_scaling.kind=yarn", "llama3", "linear")),
    # values
    ("--train.seq_len=2048", ("train.seq_len=2048", "model.max_seq_len=1024")),
    ("--train.global_batch_size=9", ("train.global_batch_size=9", "2 x 1", "nearest", "8")),
    ("--run.dir={tmp}/file", ("run.dir={tmp}/file", "File exists")),
    # plans
    ("--parallel.strategy=hybrid_shards", ("parallel.strategy=hybrid_shards", "hybrid_shard_zero2")),
    ("--parallel.tp=2", ("dp_replicate=1 x dp_shard=1 x tp=2", "2 processes", "use 2 processes")),
    ("--parallel.plan={tmp}/nowhere.yaml", ("parallel.plan={tmp}/nowhere.yaml", "manual, auto")),
    ("--parallel.plan={tmp}/plan-broken.yaml", ("{tmp}/plan-broken.yaml", "line 2")),
    ("--parallel.plan={tmp}/plan-lacks.yaml", ("{tmp}/plan-lacks.yaml", "accumulation")),
    ("--parallel.plan={tmp}/plan-more.yaml", ("{tmp}/plan-more.yaml", "mesh.ep", "dp_replicate, dp_shard")),
    ("--parallel.plan={tmp}/plan-unit.yaml", ("{tmp}/plan-unit.yaml", "layers.2", "layers.1")),
    ("--parallel.plan={tmp}/plan-type.yaml", ("{tmp}/plan-type.yaml", "mesh.dp_shard='one'", "integer")),
    ("--parallel.plan={tmp}/plan-mesh.yaml", ("{tmp}/plan-mesh.yaml", "4 processes", "1", "new plan")),
    (
        "--parallel.plan={tmp}/plan-prefetch.yaml",
        ("{tmp}/plan-prefetch.yaml", "unit tok_embeddings", "forward_prefetch", "layers.7"),
    ),
    (
        "--parallel.plan={tmp}/plan-checkpoint.yaml",
        ("{tmp}/plan-checkpoint.yaml", "unit tok_embeddings", "activation_checkpoint=half", "selective"),
    ),
    ("--parallel.plan={tmp}/plan.yaml --model.n_layers=3", ("{tmp}/plan.yaml", "layers.2", "new plan")),
    # data
    ("--data.source={tmp}/nowhere", ("data.source={tmp}/nowhere", "stdlib")),
    ("--data.source={tmp}/empty", ("data.source={tmp}/empty", ".jsonl.gz")),
    ("--data.source={tmp}/latin.txt", ("{tmp}/latin.txt", "byte 3", "UTF-8")),
    ("--data.source={tmp}/records.jsonl", ("{tmp}/records.jsonl", "line 2", "JSON object")),
    ("--data.source={tmp}/field.jsonl", ("{tmp}/field.jsonl", "line 1", "body", "data.text_field")),
    ("--data.source=hf:wiki", ("data.source=hf:wiki", "python -m tools.prepare_data hf:wiki")),
    ("'--data.mixture={{tmp}/file: -1}'", ("data.mixture", "{tmp}/file", "-1.0", "greater than 0")),
    ("'--data.validation={v: {tmp}/nowhere}'", ("data.validation.v={tmp}/nowhere", "no such file")),
    ("--data.tokenizer={tmp}/tokenizer.json", ("data.tokenizer={tmp}/tokenizer.json", "line 1", "bytes")),
    ("--data.source={tmp}/prepared-changed", ("{tmp}/prepared-changed/train-00000.bin", "again")),
    ("--data.source={tmp}/prepared-lacks", ("{tmp}/prepared-lacks/train-00000.bin", "again")),
    ("--data.source={tmp}/prepared-manifest", ("{tmp}/prepared-manifest/manifest.json", "again")),
    # checkpoints
    (
        "--checkpoint.init_from={tmp}/nowhere",
        ("checkpoint.init_from={tmp}/nowhere", "no such folder", "checkpoint"),
    ),
    ("--checkpoint.init_from={tmp}/hf", ("{tmp}/hf/config.json", "model_type=gpt2", "hidden_size")),
    ("--checkpoint.resume={tmp}/nowhere", ("checkpoint.resume={tmp}/nowhere", "checkpoints/step-")),
    ("--checkpoint.resume={tmp}/changed", ("{tmp}/changed", "rank-00000.safetensors", "another")),
    ("--checkpoint.resume={tmp}/lacks", ("{tmp}/lacks", "rank-00000.safetensors", "missing")),
    (
        "--checkpoint.resume={tmp}/good --model.n_layers=1",
        ("{tmp}/good", "model.n_layers=1 (saved: 2)", "checkpoint.changed_model"),
    ),
]

# Complete commands: a module of tools/ (or train.main) and its arguments.
TOOLS: list[Case] = [
    ("train.main --config llama_405b --run.dir={own}", ("GiB per process", "It needs", "params", "Fits")),
    ("tools.plan", ("--gpus", "-h")),
    ("tools.plan --gpus 8", ("--config", "--model.factory", "-h")),
    ("tools.plan --config llama_8b --gpus 0", ("--gpus", "0", "at least 1")),
    ("tools.plan --config llama_8b --gpus 8 --gpu h100", ("--gpu=h100", "h100-sxm", "a100-80gb")),
    ("tools.plan --config llama_8b --gpus 8 --parallel.tp=16", ("tp=16", "use 16 processes", "1, 2, 4 or 8")),
    ("tools.plan --config llama_8b --gpus 8 --timeline {own}.svg", ("--timeline", "--gpu", "h100-sxm")),
    ("tools.plan --config llama_debug --gpus 1 --save {tmp}/plan.yaml", ("--save={tmp}/plan.yaml",)),
    ("tools.plan --config llama_8b --gpu h200 --sweep gpus=many", ("--sweep", "gpus=many", "gpus=8..4096")),
    ("tools.plan diff {tmp}/plan.yaml {tmp}/nowhere", ("{tmp}/nowhere", "No such file")),
    ("tools.simulate --config llama_debug", ("--world-size",)),
    ("tools.simulate --config llama_debug --world-size 4 --rank 4", ("--rank=4", "--world-size=4")),
    ("tools.dryrun --config llama_debug", ("--gpus",)),
    ("tools.dryrun --config llama_debug --gpus 2 --modell.dim=64", ("modell.dim", "model.dim")),
    ("tools.trace {tmp}/nowhere", ("{tmp}/nowhere", "no such")),
    ("tools.trace {tmp}/run", ("{tmp}/run", "--profile.start=STEP", "--profile.all_ranks=true")),
    ("tools.trace {tmp}/file", ("{tmp}/file", "trace")),
    ("tools.calibrate --name mine --base nothing", ("nothing", "configs/hardware", "h100-sxm")),
    ("tools.sweep nothing", ("nothing", "configs/experiments", "prefetch.yaml")),
    ("tools.sweep {tmp}/spec.yaml", ("{tmp}/spec.yaml", "grids", "grid")),
    ("tools.sweep {tmp}/spec-key.yaml --dry-run", ("{tmp}/spec-key.yaml", "train.stepz", "train.steps")),
    ("tools.compare {tmp}/run {tmp}/nowhere", ("{tmp}/nowhere", "runs/llama_debug")),
    ("tools.compare {tmp}/run {tmp}/metrics", ("{tmp}/run", "{tmp}/metrics", "metrics.every")),
    ("tools.doctor --fast", ("--fast",)),
    ("tools.checkpoint ls {tmp}/nowhere", ("{tmp}/nowhere", "runs/NAME")),
    ("tools.checkpoint verify {tmp}/changed", ("{tmp}/changed", "rank-00000.safetensors")),
    ("tools.checkpoint verify {tmp}/lacks --json", ("{tmp}/lacks", "rank-00000.safetensors", "missing")),
    ("tools.checkpoint show {tmp}/manifest", ("{tmp}/manifest/manifest.json", "another")),
    ("tools.checkpoint consolidate {tmp}/good {tmp}/file", ("{tmp}/file", "File exists")),
    ("tools.convert_hf import {tmp}/hf {own}", ("{tmp}/hf/config.json", "model_type=gpt2")),
    ("tools.convert_hf export {tmp}/good {tmp}/empty", ("{tmp}/empty", "--force")),
    ("tools.prepare_data {tmp}/field.jsonl {tmp}/empty", ("{tmp}/empty", "another folder")),
    ("tools.prepare_data {tmp}/field.jsonl {own} --workers 0", ("--workers", "0", "at least 1")),
    ("tools.eval {tmp}/nowhere", ("{tmp}/nowhere", "runs/NAME")),
    ("tools.eval {tmp}/good --data {tmp}/nowhere", ("{tmp}/nowhere", "stdlib")),
    ("tools.generate", ("--run",)),
    ("tools.generate --run {tmp}/run --max_new_tokens -1", ("--max_new_tokens", "-1", "at least 0")),
    ("tools.import_accelerate", ("FILE",)),
    ("tools.import_accelerate {tmp}/ds.yaml", ("{tmp}/ds.yaml", "DEEPSPEED", "FSDP", "num_processes")),
    (
        "tools.import_accelerate {tmp}/fsdp-wrong.yaml",
        ("fsdp_sharding_strategy=SOME_SHARD", "HYBRID_SHARD_ZERO2"),
    ),
]
