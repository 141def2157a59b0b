"""From config to optimizer step, and which of our files have functions that ran on the way. Run by test_newcomer_path.py.

Arguments: the file to write, then config arguments.
"""

import contextlib
import inspect
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
OURS = ("models", "parallel", "train", "tools")  # and not a virtual environment that lies beside them
executed: set[str] = set()


def note_file(frame, event, argument) -> None:  # type: ignore[no-untyped-def]
    if event == "call" and frame.f_code.co_flags & inspect.CO_OPTIMIZED:  # a function, not a module's or a class's body
        executed.add(frame.f_code.co_filename)


@contextlib.contextmanager
def unnoted() -> Iterator[None]:
    sys.setprofile(None)
    yield
    sys.setprofile(note_file)


def journey() -> None:
    """The steps of train.main that lead to an optimizer step. Screen, metrics, checkpoints, profiles, stopping, the memory
    estimate, how processes meet and how text becomes tokens on disk stand beside them."""
    import torch

    from parallel.mesh import build_mesh, data_parallel_group, data_parallel_rank
    from train.build import build_model
    from train.config import parse_config
    from train.data.loader import BatchShape, SampleOrder, TrainLoader
    from train.data.sequences import make_sequence_shape
    from train.data.tokens import load_corpus
    from train.optim import build_optimizer, learning_rate, set_learning_rate
    from train.place import choose_device, read_place
    from train.planning import plan_run
    from train.runtime import start_process
    from train.step import train_step

    config, place = parse_config(sys.argv[2:]), read_place()
    device, _ = choose_device(config.run, place)
    plan = plan_run(config, place.world_size, place.local_world_size)
    with unnoted():
        start_process(config.run, place, device)
    mesh = build_mesh(plan.mesh, device.type)
    model = build_model(config, plan, mesh, device)
    optimizer = build_optimizer(model, config.optim)
    shape = BatchShape(plan.micro_batch_size, plan.accumulation, data_parallel_rank(mesh, plan.mesh), plan.mesh.data_parallel)
    with unnoted():
        corpus = load_corpus(config.data)
    sequences = make_sequence_shape(config.data, corpus.tokenizer, config.train.seq_len, config.model.vocab_size)
    order = SampleOrder(corpus.sources, sequences, config.run.seed)
    loader = TrainLoader(order, sequences, shape, 0, device, config.data.prefetch)
    for step in range(1, config.train.steps + 1):
        set_learning_rate(optimizer, learning_rate(config.optim, step, config.train.steps))
        batches = loader.next().micro_batches
        train_step(model, optimizer, batches, config.train.grad_clip, data_parallel_group(mesh))
    loader.close()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    threading.setprofile(note_file)
    sys.setprofile(note_file)
    journey()
    sys.setprofile(None)
    ours = sorted(name for name in executed if any(Path(name).is_relative_to(ROOT / package) for package in OURS))
    Path(sys.argv[1]).write_text("\n".join(str(Path(name).relative_to(ROOT)) for name in ours))
