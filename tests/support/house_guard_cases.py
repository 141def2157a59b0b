"""The cases of tests/support/house_guard.py: which commands it runs. Deleted with it.

A table is a text. A line at the margin names a case; the lines indented by two are its commands, run one
after another; what is indented further goes on with the line before. {tmp} is the part's folder, {own} one of
the case's own; what else stands in braces is in SHORT.
"""

SHORT = {
    "small": "--config llama_debug --data.source={tmp}/texts --model.dim=32 --model.n_layers=2 "
    "--model.n_heads=4 --model.n_kv_heads=2 --model.ffn_dim=64 --train.seq_len=32 --train.micro_batch_size=2 "
    "--train.global_batch_size=8 --run.threads=1 --parallel.param_dtype=float32 --optim.warmup_steps=5 "
    "--metrics.every=1",
    "eager": "--parallel.compile.enabled=false",
    "aot": "--parallel.compile.backend=aot_eager",
    "8b": "plan --config llama_8b --json",
    "1b": "plan --config llama_1b --json",
    "debug": "plan --config llama_debug",
}

HELP = """
train, plan, plan diff, simulate, trace, bench, sweep, compare, doctor, checkpoint, checkpoint ls,
checkpoint verify, checkpoint show, checkpoint diff, checkpoint consolidate, convert_hf, convert_hf import,
convert_hf export, prepare_data, eval, generate, import_accelerate, bench gpu, bench cpu, bench scale,
bench train, bench attention, bench data, bench calibrate, bench predictions, bench memory,
bench published
"""

PLANS = """
8b fsdp
  {8b} --gpus 8 --gpu h100-sxm
8b fsdp tp, text and pictures
  plan --config llama_8b --gpus 64 --gpu h100-sxm --parallel.tp=8 --tokens 1e12 --timeline {own}/step.svg
  {8b} --gpus 64 --gpu h100-sxm --parallel.tp=8 --timeline {own}/step.json {eager}
8b eager
  {8b} --gpus 16 --gpu h200 {eager}
8b hsdp
  {8b} --gpus 64 --gpu h200 --parallel.dp_replicate=8 {eager}
8b tp without sequence parallelism
  {8b} --gpus 16 --gpu a100-80gb --parallel.tp=4 --parallel.sequence_parallel=false {eager}
8b tp without loss parallelism
  {8b} --gpus 16 --gpu h100-sxm --parallel.tp=2 --parallel.loss_parallel=false {eager}
8b tp of some parts
  {8b} --gpus 16 --gpu h100-sxm --parallel.tp=2 --parallel.tp_parts=[attention,feed_forward] {eager}
8b full checkpointing
  {8b} --gpus 8 --gpu h100-500w-torchtitan --parallel.activation_checkpoint=full
    --train.micro_batch_size=2 {eager}
8b selective checkpointing
  {8b} --gpus 8 --gpu h100-sxm --parallel.activation_checkpoint=selective
  {8b} --gpus 8 --gpu h100-sxm --parallel.activation_checkpoint=selective --parallel.checkpointed_blocks=20
    --parallel.selective_policy=half_matmul {eager}
8b checkpointing of every second unit
  {8b} --gpus 8 --gpu h200-kempnerforge --parallel.activation_checkpoint=selective {eager}
    --parallel.selective_policy=every:2 --parallel.unit_min_params=400000000
8b budget
  {8b} --gpus 8 --gpu h100-sxm --parallel.activation_checkpoint=budget --parallel.activation_budget=0.3
8b offload of activations
  {8b} --gpus 8 --gpu h100-sxm --parallel.activation_checkpoint=offload {eager}
8b cpu offload
  {8b} --gpus 8 --gpu a100-80gb --parallel.cpu_offload=true {eager}
8b float8 tensorwise
  {8b} --gpus 16 --gpu h100-sxm --parallel.tp=2 --parallel.float8.recipe=tensorwise
    --parallel.float8.all_gather=true
8b float8 rowwise
  {8b} --gpus 8 --gpu h100-sxm --parallel.float8.recipe=rowwise {eager}
8b reshard to four
  {8b} --gpus 32 --gpu h200 --parallel.reshard_after_forward=4 --parallel.forward_prefetch=2
    --parallel.backward_prefetch=2 {eager}
8b documents apart
  {8b} --gpus 8 --gpu h100-sxm --data.document_mask=true {eager}
1b no_shard
  {1b} --gpus 8 --gpu h100-sxm --parallel.strategy=no_shard
1b hybrid_shard_zero2
  {1b} --gpus 32 --gpu a100-80gb --parallel.strategy=hybrid_shard_zero2 {eager}
1b shard_grad_op, bfloat16 kept
  {1b} --gpus 8 --gpu h200 --parallel.strategy=shard_grad_op --parallel.storage_dtype=bfloat16
    --optim.state_dtype=bfloat16 --parallel.reduce_dtype=bfloat16 {eager}
1b accumulation, fused, tied
  {1b} --gpus 8 --gpu h100-sxm --parallel.fused_projections=true --train.micro_batch_size=2
    --train.global_batch_size=64 --model.tie_embeddings=true --parallel.loss_chunk_tokens=1024
70b
  plan --config llama_70b --gpus 256 --gpu h100-sxm --parallel.tp=8 --json {eager}
    --parallel.activation_checkpoint=full
405b
  plan --config llama_405b --gpus 2048 --gpu h100-sxm --parallel.tp=8 --parallel.activation_checkpoint=full
    --parallel.dp_replicate=4 {eager} --json
debug on a cpu
  {debug} --gpus 4 --gpu cpu --parallel.tp=2 --parallel.param_dtype=float32 --json
  {debug} --gpus 4 --parallel.param_dtype=float32
debug checked
  {debug} --gpus 4 --parallel.tp=2 --check {eager} --json
debug compared
  {debug} --gpus 4 --compare {eager} --json
debug auto
  {debug} --gpus 4 --gpu h100-sxm --parallel.plan=auto {eager} --save {own}/auto.yaml
  {debug} --gpus 4 --gpu h100-sxm {eager} --parallel.plan={own}/auto.yaml --json
debug auto on a cpu
  {debug} --gpus 2 --gpu cpu --parallel.plan=auto {eager} --json
1b auto
  {1b} --gpus 4 --gpu h100-sxm --parallel.plan=auto --train.micro_batch_size=2 {eager}
debug fewest, and a curve
  {debug} --gpu h100-sxm --min-gpus {eager} --json
  {debug} --gpu h100-sxm --sweep gpus=2..8 {eager}
saved, read, compared
  {debug} --gpus 4 --save {own}/a.yaml --json
  {debug} --gpus 4 --parallel.plan={own}/a.yaml --json
  {debug} --gpus 4 --parallel.tp=2 --parallel.activation_checkpoint=selective --save {own}/b.yaml
  {debug} --gpus 4 --parallel.plan={own}/b.yaml --save {own}/c.yaml
  plan diff {own}/a.yaml {own}/b.yaml --json
  plan diff {own}/a.yaml {own}/b.yaml
  plan diff {own}/b.yaml {own}/c.yaml
"""

SIMULATIONS = """
fsdp
  simulate --config llama_debug --world-size 4 --json
hsdp
  simulate --config llama_debug --world-size 8 --rank 5 --parallel.dp_replicate=2 --json
tp
  simulate --config llama_debug --world-size 2 --parallel.tp=2 --json
tp x fsdp, eager
  simulate --config llama_debug --world-size 8 --parallel.tp=2 {eager} --json
full checkpointing
  simulate --config llama_debug --world-size 4 --parallel.activation_checkpoint=full --json
offload, text
  simulate --config llama_debug --world-size 4 --parallel.activation_checkpoint=offload --all
accumulation
  simulate --config llama_debug --world-size 4 --train.micro_batch_size=2 --train.global_batch_size=32
    --parallel.dp_replicate=2 --parallel.reshard_after_forward=false --json
"""

# The first word is the number of ranks; the last part of run.dir is the folder whose files are recorded.
RUNS = """
a: fsdp 2 x tp 2, eager
  4 train {small} {eager} --run.dir={tmp}/a --train.steps=50 --parallel.tp=2 --checkpoint.every=0
    --train.eval_every=25 --metrics.gradient_norms=true
b: hsdp 2 x 2, accumulation, aot_eager
  4 train {small} {aot} --run.dir={tmp}/b --train.steps=50 --parallel.dp_replicate=2
    --train.global_batch_size=16 --train.eval_every=0 --checkpoint.every=25 --checkpoint.keep=0
    --parallel.activation_checkpoint=full
c: fsdp 2, inductor, resumed
  2 train {small} --run.dir={tmp}/c --train.steps=25 {c}
  2 train {small} --run.dir={tmp}/c --train.steps=50 {c}
"""
SHORT["c"] = (
    "--train.eval_every=10 --checkpoint.every=10 --checkpoint.keep=2 --checkpoint.keep_every=20 "
    "--optim.schedule=constant --profile.start=40 --profile.all_ranks=true"
)
LAST_OF_C = "{tmp}/c/checkpoints/step-00000050"
BEFORE_OF_C = "{tmp}/c/checkpoints/step-00000040"

TOKENS = """
bytes of a folder
  prepare_data {tmp}/texts {tmp}/out/bytes --workers 1 --json
bytes of records, shards
  prepare_data {tmp}/records.jsonl {tmp}/out/shards --workers 2 --shard_mb 1 --held_out 0.1
bpe
  prepare_data {tmp}/records.jsonl {tmp}/out/bpe --tokenizer {tmp}/bpe --workers 2 --json
bpe, other field and ends
  prepare_data {tmp}/bodies.jsonl.gz {tmp}/out/ends --tokenizer {tmp}/bpe/tokenizer.json --text_field body
    --bos <s> --eos </s> --held_out 0 --workers 1
"""

CHECKPOINT_TOOLS = """
ls
  checkpoint ls {tmp}/c --json
  checkpoint ls {tmp}/c
verify
  checkpoint verify {tmp}/c
  checkpoint verify {last} --json
show
  checkpoint show {tmp}/c --json
  checkpoint show {before}
diff
  checkpoint diff {before} {tmp}/c --json
  checkpoint diff {tmp}/c {last}
consolidate
  checkpoint consolidate {tmp}/c {own}/whole.safetensors
convert
  convert_hf export {tmp}/c {own}/hf --json
  convert_hf import {own}/hf {own}/back --json
  eval {own}/hf --data {tmp}/texts/00.txt --tokenizer bytes --seq_len 32 --sequences 8 {eager} --json
export in bfloat16, in pieces
  convert_hf export {tmp}/c {own}/half --dtype bfloat16 --shard_gb 0.00004
generate
  generate --run {tmp}/c --prompt abc --max_new_tokens 60 --seed 3
  generate --run {before} --temperature 0 --max_new_tokens 60
eval
  eval {tmp}/c {eager} --json
  eval {tmp}/c {eager} --data {tmp}/texts --seq_len 48 --micro_batch_size 4 --sequences 20
compare
  compare {tmp}/a {tmp}/b --json
  compare {tmp}/c {tmp}/a
  compare {tmp}/c {tmp}/c
trace
  trace {tmp}/c --json
"""

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
# Files of the part wrong_inputs.
WRONG_FILES = {
    "broken.yaml": "train: [\n",
    "twice.yaml": "train: {steps: 1}\noptim: {lr: 1}\ntrain: {steps: 2}\n",
    "scalar.yaml": "train: 5\n",
    "unknown.yaml": "train:\n  stepz: 5\n",
    "null.yaml": "train:\n  steps: null\n",
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
    "fsdp.yaml": ACCELERATE,
    "fsdp-wrong.yaml": ACCELERATE.replace("HYBRID_SHARD\n", "SOME_SHARD\n"),
    "file": "",
    "hf/config.json": '{"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}',
    "metrics/metrics.jsonl": "{\n",
}
# A text of a good plan file, and what stands there in the wrong one of this name.
WRONG_PLANS = {
    "plan-lacks.yaml": ("accumulation: 4\n", ""),
    "plan-more.yaml": ("mesh:\n", "mesh:\n  cp: 2\n"),
    "plan-unit.yaml": ("- unit: layers.[0-1]", "- unit: layers.[0-2]"),
    "plan-type.yaml": ("dp_shard: 1", "dp_shard: one"),
    "plan-mesh.yaml": ("dp_shard: 1", "dp_shard: 4"),
    "plan-prefetch.yaml": ("forward_prefetch: 1", "forward_prefetch: [nobody]"),
    "plan-checkpoint.yaml": ("activation_checkpoint: none", "activation_checkpoint: half"),
}
# What is added to a command that is right.
WRONG_TRAIN = """
keys and types
  --parallel.dp_shrad=2
  --train.steps=many
  --model.dim=1.5
  --parallel.tp=true
  --optim.betas=[0.9]
  --train.steps=null
  --train.steps
  something
  --parallel.compile=inductor
  --train.freeze=[nothing.*]
files
  --config=lama_debug.yaml
  --config=zzz
  --config={tmp}/broken.yaml
  --config={tmp}/twice.yaml
  --config={tmp}/scalar.yaml
  --config={tmp}/unknown.yaml
  --config={tmp}/null.yaml
  --config={tmp}/rope.yaml
values
  --train.steps=0
  --train.seq_len=2048
  --optim.lr=.inf
  --run.device=tpu
  --run.device=cuda
  --model.n_kv_heads=3
  --data.held_out=1
  --train.global_batch_size=9
  --run.dir={tmp}/file
plans
  --parallel.strategy=hybrid_shards
  --parallel.strategy=ddp --parallel.dp_shard=8
  --parallel.tp=2
  --parallel.param_dtype=float16
  --parallel.compile.backend=nvfuser
  --parallel.compile.mode=fastest
  --parallel.activation_checkpoint=budget {eager}
  --parallel.activation_checkpoint=selective --parallel.selective_policy=aten.matmull
  --parallel.async_tp=true
  --parallel.float8.recipe=rowwise --parallel.float8.all_gather=true
  --parallel.reshard_after_forward=3
  --parallel.plan={tmp}/nowhere.yaml
  --parallel.plan={tmp}/plan-broken.yaml
  --parallel.plan={tmp}/plan-lacks.yaml
  --parallel.plan={tmp}/plan-more.yaml
  --parallel.plan={tmp}/plan-unit.yaml
  --parallel.plan={tmp}/plan-type.yaml
  --parallel.plan={tmp}/plan-mesh.yaml
  --parallel.plan={tmp}/plan-prefetch.yaml
  --parallel.plan={tmp}/plan-checkpoint.yaml
  --parallel.plan={tmp}/plan.yaml --model.n_layers=3
data
  --data.source={tmp}/nowhere
  --data.source={tmp}/empty
  --data.source={tmp}/latin.txt
  --data.source={tmp}/records.jsonl
  --data.source={tmp}/field.jsonl
  --data.source=hf:wiki
  '--data.mixture={{tmp}/texts: -1}'
  '--data.validation={v: {tmp}/nowhere}'
  --data.tokenizer={tmp}/tokenizer.json
  --data.bos=<nothing>
  --data.source={tmp}/prepared-changed
  --data.source={tmp}/prepared-lacks
  --data.source={tmp}/prepared-manifest
  --model.vocab_size=200
checkpoints
  --checkpoint.init_from={tmp}/nowhere
  --checkpoint.init_from={tmp}/hf
  --checkpoint.resume={tmp}/nowhere
  --checkpoint.resume={tmp}/changed
  --checkpoint.resume={tmp}/lacks
  --checkpoint.resume={tmp}/good --model.n_layers=1
"""
WRONG_TOOLS = """
plan
  train --config llama_8b --run.dir={own}
  plan
  plan --config llama_8b --gpus 0
  plan --config llama_8b --gpus 8 --gpu h100
  plan --config llama_8b --gpus 8 --parallel.tp=16
  plan --config llama_8b --gpus 8 --timeline {own}.svg
  {debug} --gpus 1 --save {tmp}/plan.yaml
  plan --config llama_8b --gpu h200 --sweep gpus=many
  plan diff {tmp}/plan.yaml {tmp}/nowhere
  simulate --config llama_debug
  simulate --config llama_debug --world-size 4 --rank 4
runs
  trace {tmp}/nowhere
  trace {tmp}/run
  trace {tmp}/file
  bench nothing
  sweep nothing
  sweep {tmp}/spec.yaml
  sweep {tmp}/spec-key.yaml --dry-run
  compare {tmp}/run {tmp}/nowhere
  compare {tmp}/run {tmp}/metrics
  doctor --fast
checkpoints
  checkpoint ls {tmp}/nowhere
  checkpoint verify {tmp}/changed
  checkpoint verify {tmp}/lacks --json
  checkpoint show {tmp}/manifest
  checkpoint consolidate {tmp}/good {tmp}/file
  convert_hf import {tmp}/hf {own}
  convert_hf export {tmp}/good {tmp}/empty
data
  prepare_data {tmp}/texts {tmp}/empty
  prepare_data {tmp}/texts {own} --workers 0
  eval {tmp}/nowhere
  eval {tmp}/good --data {tmp}/nowhere
  generate
  generate --run {tmp}/run --max_new_tokens -1
others' settings (the last one is right)
  import_accelerate
  import_accelerate {tmp}/ds.yaml
  import_accelerate {tmp}/fsdp-wrong.yaml
  import_accelerate {tmp}/fsdp.yaml
"""
