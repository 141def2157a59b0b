"""`torchrun -m train.main --config llama_debug.yaml`: the journey of a run, top to bottom."""

import dataclasses
import platform
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist

from models.cost import flops_per_token
from models.size import count_parameters
from parallel.advice import advise, unused_keys
from parallel.compile_check import check_compiler, use_cache_folder
from parallel.memory_by_kind import GIB
from parallel.mesh import build_mesh, data_parallel_group, data_parallel_rank
from parallel.plan import Plan
from parallel.plan_file import plan_to_table, plan_to_yaml
from parallel.planner.hardware import find_hardware
from parallel.planner.memory import usable_bytes
from parallel.recompile import RecompileGuard
from parallel.strategy import describe_strategy
from train.auto import choose_here, from_main
from train.build import build_model
from train.checkpoint import Position, find_checkpoint, list_checkpoints, load_checkpoint, read_position, refuse_newer
from train.config import USER_ERRORS, Config, ConfigError, config_to_yaml, parse_config
from train.console import Screen
from train.data.checks import check_data, check_evaluation, check_sequences
from train.data.loader import BatchShape
from train.data.sequences import SequenceShape, make_sequence_shape
from train.data.together import load_together
from train.data.tokens import Corpus
from train.ending import EXIT_FAILED, EXIT_STOPPED, EXIT_USER_ERROR, exit_process
from train.fits import check_fits
from train.host_memory import device_memory_bytes
from train.init_from import find_weights, load_weights, say_start
from train.loop import Run, train_loop
from train.metrics import Metrics, Throughput
from train.optim import build_optimizer
from train.planning import plan_run
from train.runtime import Place, choose_device, read_place, start_process
from train.status import State, write_status
from train.stop import Stop

VERSION = "0.1.0"


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run, and turn whatever happens into one message and an exit code."""
    place = read_place()
    try:
        config = parse_config(sys.argv[1:] if arguments is None else arguments)
        stopped = run(config, place)
    except USER_ERRORS as error:
        if place.is_main:
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        exit_process(place, EXIT_USER_ERROR, error)
    except KeyboardInterrupt as error:
        exit_process(place, EXIT_STOPPED, error)
    except Exception as error:
        traceback.print_exc()
        exit_process(place, EXIT_FAILED, error)
    # torchrun calls every other code than 0 a failure
    exit_process(place, EXIT_STOPPED if stopped and not place.under_torchrun else 0)


def run(config: Config, place: Place) -> bool:
    """The whole journey; True if it was stopped before its last step."""
    screen = Screen(place.is_main)
    device, device_name = choose_device(config.run, place)
    chosen = None
    if config.parallel.plan == "auto":
        use_cache_folder(config.parallel.compile)  # the planner asks the compiler
        start_process(config.run, place, device)  # one process plans for all: they must not differ
        screen.line(f"planner: trying plans for {place.world_size} processes, up to half a minute")
        chosen = from_main(place, lambda: choose_here(config, place, device, device_name))
    plan = chosen.plan if chosen else plan_run(config, place.world_size, place.local_world_size)
    use_cache_folder(plan.compile)
    check_compiler(plan, device.type)
    needed_bytes = chosen.peak_bytes if chosen else _check_memory(config, plan, place, device, device_name)
    check_data(config.data, config.model.vocab_size)  # a source that is not there is found out here, by every rank alike
    folder = _make_folder(config)
    resume_from = find_checkpoint(config.checkpoint.resume, folder / "checkpoints")
    start = read_position(resume_from) if resume_from else Position()
    refuse_newer(folder / "checkpoints", start.step)
    weights = find_weights(config.checkpoint.init_from, config.model, resume_from)

    if not chosen:
        start_process(config.run, place, device)
    stop = Stop(config.run)
    _say_what_runs(screen, place, plan, config, device_name, needed_bytes)
    for line in chosen.said if chosen else ():
        screen.line(f"planner: {line}")
    corpus = load_together(config.data, place, resume_from)
    sequences = make_sequence_shape(config.data, corpus.tokenizer, config.train.seq_len, config.model.vocab_size)
    total_steps = _total_steps(config, corpus, sequences, plan)
    screen.line(f"data: {corpus.description}")
    if place.is_main:
        (folder / "config.yaml").write_text(config_to_yaml(config), encoding="utf-8")
        (folder / "plan.yaml").write_text(plan_to_yaml(plan), encoding="utf-8")

    mesh = build_mesh(plan.mesh, device.type)
    model = build_model(config, plan, mesh, device)
    optimizer = build_optimizer(model, config.optim)
    if resume_from:
        load_checkpoint(resume_from, model, optimizer)
        start = _same_order(start, config, corpus, screen)
    elif weights:
        load_weights(weights, model)
    if told := say_start(config.checkpoint.init_from, resume_from):
        screen.line(told)
    shape = BatchShape(plan.micro_batch_size, plan.accumulation, data_parallel_rank(mesh, plan.mesh), plan.mesh.data_parallel)
    metrics = Metrics(config.metrics, _throughput(config, plan, device_name), folder, device, place.is_main,
                      chosen.predicted if chosen else {})  # fmt: skip
    metrics.add_text("config", config_to_yaml(config))
    metrics.add_text("plan", plan_to_yaml(plan))
    the_run = Run(config, folder, device, model, optimizer, corpus, sequences, shape, data_parallel_group(mesh), metrics,
                  screen, stop, RecompileGuard(plan.compile), total_steps)  # fmt: skip
    return _train(the_run, place, start, resume_from)


def _train(run: Run, place: Place, start: Position, resume_from: Path | None) -> bool:
    """The loop, with status.json telling at any moment how it stands; True if it was stopped early."""
    resumed_from = start.step if resume_from else None
    reached = start

    def say(state: State, reason: str = "") -> None:
        if place.is_main:
            saved = bool(list_checkpoints(run.folder / "checkpoints"))
            write_status(run.folder, state, reached.step, resumed_from, saved, reason)

    def on_progress(position: Position) -> None:
        nonlocal reached
        reached = position
        say("running")

    if resume_from:
        run.screen.line(f"resumed from {resume_from}: step {start.step} of {run.total_steps} is done")
    say("running")
    run.screen.start_progress(start.step, run.total_steps)
    try:
        reached = train_loop(run, start, on_progress)
    except BaseException as error:
        say("failed", f"{type(error).__name__}: {error}")
        raise
    finally:
        run.screen.close()
        run.metrics.close()
    stopped = reached.step < run.total_steps
    say("stopped" if stopped else "finished", run.stop.reason or "" if stopped else "")
    if told := run.metrics.compare_with_predicted():
        run.screen.line(told)
    run.screen.line(_last_words(run, reached, stopped))
    run.stop.close()
    dist.destroy_process_group()
    return stopped


def _check_memory(config: Config, plan: Plan, place: Place, device: torch.device, device_name: str) -> int:
    """Bytes that a process will need. Raises PlanError if it has less."""
    # On a CPU what cpu_offload keeps in host memory is on the device.
    in_memory = dataclasses.replace(plan, cpu_offload=plan.cpu_offload and device.type != "cpu")
    available, kind = device_memory_bytes(device, place), find_hardware(device_name)
    return check_fits(config, in_memory, usable_bytes(available, kind) if kind else available, device_name).peak_bytes


def _make_folder(config: Config) -> Path:
    folder = Path(str(config.run.dir)).expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"run.dir={folder}: cannot make this folder ({error.strerror}): name another") from None
    return folder


def _say_what_runs(screen: Screen, place: Place, plan: Plan, config: Config, device_name: str, needed_bytes: int) -> None:
    """The first lines on the screen: versions, device, model, plan."""
    plural = "es" if place.world_size > 1 else ""
    screen.line(f"meshwright {VERSION}, Python {platform.python_version()}, torch {torch.__version__}")
    screen.line(f"device: {device_name}, {place.world_size} process{plural}, {torch.get_num_threads()} CPU threads each")
    parameters = count_parameters(config.model).total
    screen.line(f"model: {parameters:,} parameters; about {needed_bytes / GIB:.2f} GiB per process for training")
    if config.parallel.strategy:
        screen.line(describe_strategy(config.parallel.strategy, plan.mesh))
    screen.line(plan_to_table(plan))
    chosen = config.parallel.plan == "auto"  # the planner has weighed what advice could say
    for advice in () if chosen else (*advise(plan, place.local_world_size), *unused_keys(config.parallel)):
        screen.line(f"advice: {advice}")
    screen.line(f"run: {config.run.dir} (config.yaml, plan.yaml, metrics.jsonl, tb/, checkpoints/)")


def _same_order(start: Position, config: Config, corpus: Corpus, screen: Screen) -> Position:
    """The position, from the first sample again if the order of the data is another one than before."""
    same_data = start.data in (corpus.fingerprint, "")  # "": a checkpoint of a version that did not note it
    if same_data and (start.seed, start.seq_len) == (config.run.seed, config.train.seq_len):
        return start
    screen.line("data: run.seed, train.seq_len or the data has changed since the checkpoint, so its order begins anew")
    return dataclasses.replace(start, samples=0)


def _total_steps(config: Config, corpus: Corpus, sequences: SequenceShape, plan: Plan) -> int:
    """Optimizer steps of the whole run. Raises DataError where there is too little to train on or to evaluate."""
    counts = [check_sequences(source.split, sequences, source.name) for source in corpus.sources]
    if config.train.eval_every:
        check_evaluation(corpus)
    if not config.train.epochs:
        return config.train.steps
    return max(1, int(config.train.epochs * sum(counts)) // plan.global_batch_size)


def _throughput(config: Config, plan: Plan, device_name: str) -> Throughput:
    seq_len = config.train.seq_len
    hardware = find_hardware(device_name)
    dtype = plan.units[0].param_dtype
    return Throughput(
        tokens_per_step=plan.global_batch_size * seq_len,
        flops_per_token=flops_per_token(config.model, seq_len, "full"),
        flops_per_token_causal=flops_per_token(config.model, seq_len, "causal"),
        world_size=plan.mesh.world_size,
        peak_flops=hardware.peak_tflops[dtype] * 1e12 if hardware else None,
    )


def _last_words(run: Run, reached: Position, stopped: bool) -> str:
    if stopped:
        stopped_at = f"stopped at step {reached.step} of {run.total_steps} ({run.stop.reason})"
        if run.config.checkpoint.every:
            return f"{stopped_at}, saved; the same command goes on"
        return f"{stopped_at}, not saved, because checkpoint.every is 0; the same command starts again"
    return f"finished: step {reached.step} of {run.total_steps}; tensorboard --logdir {run.folder}/tb"


if __name__ == "__main__":
    main()
