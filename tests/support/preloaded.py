"""What the fork server imports before it forks: nothing here may run an operator, start a thread or make a process group."""

import importlib

MODULES = (
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch.distributed.checkpoint",
    "torch.distributed.elastic.multiprocessing.errors",
    "torch._dynamo",
    "torch._inductor.compile_fx",
    "torch.profiler",
    "torch.utils.tensorboard",
    "train.main",
    "tools.plan",
    "tools.simulate",
    "tools.checkpoint",
    "tools.compare",
    "tools.convert_hf",
    "tools.eval",
    "tools.generate",
    "tools.sweep",
    "tools.trace",
)

for name in MODULES:
    importlib.import_module(name)
