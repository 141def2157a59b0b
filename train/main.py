"""`torchrun -m train.main --config llama_debug.yaml`: the journey of a run, top to bottom."""

import dataclasses
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from meshwright.models.llama import Llama
from meshwright.parallel.compile.stats import RecompileGuard
from meshwright.parallel.mesh import build_mesh, data_parallel_group, data_parallel_rank
from meshwright.parallel.plan.schema import Plan
from meshwright.parallel.plan.serialize import plan_to_yaml
from meshwright.train.build_model import build_model
from meshwright.train.checkpoint.commit import list_checkpoints, refuse_newer
from meshwright.train.checkpoint.initial_weights import Weights, find_weights, load_weights, say_start
from meshwright.train.checkpoint.load import Start, find_start, load_checkpoint
from meshwright.train.checkpoint.manifest import TrainPosition
from meshwright.train.checkpoint.save import CheckpointSaver
from meshwright.train.config import CheckpointConfig, Config
from meshwright.train.config_parser import config_to_yaml, parse_config
from meshwright.train.console import Console
from meshwright.train.data.corpus import Corpus, check_data, check_evaluation, check_sequences, load_together
from meshwright.train.data.loader import BatchShape
from meshwright.train.data.sample_order import SampleOrder
from meshwright.train.data.sequences import SequenceShape, make_sequence_shape
from meshwright.train.distributed.exit import (
    EXIT_FAILED,
    EXIT_STOPPED,
    EXIT_USER_ERROR,
    exit_process,
    say_error,
    say_user_error,
)
from meshwright.train.distributed.process_group import init_distributed
from meshwright.train.distributed.ranks import (
    RankInfo,
    broadcast_from_rank0,
    check_alike,
    lines_of,
    read_rank_info,
    with_restarts_of_all,
)
from meshwright.train.errors import EXPLAINED_ERRORS, USER_ERRORS, ConfigError
from meshwright.train.fault_tolerance.crash_loop import check_crash_loop
from meshwright.train.fault_tolerance.nonfinite import NonFiniteGuard
from meshwright.train.fault_tolerance.out_of_memory import explaining_out_of_memory
from meshwright.train.fault_tolerance.run_lock import take_folder
from meshwright.train.fault_tolerance.run_status import RunStatus, read_status
from meshwright.train.fault_tolerance.shutdown import GracefulShutdown, as_lost_peer
from meshwright.train.fault_tolerance.watchdog import Watchdog
from meshwright.train.loop import Run, train_loop
from meshwright.train.memory import free_host_bytes
from meshwright.train.metrics.collector import Metrics, make_throughput
from meshwright.train.metrics.run_summary import describe_run, log_run_summary
from meshwright.train.metrics.tensorboard import Outcome
from meshwright.train.optim.optimizer import build_optimizer
from meshwright.train.planning.run_plan import RunPlan, make_run_plan


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run, and turn whatever happens into one message and an exit code."""
    ranks = read_rank_info()
    try:
        config = parse_config(sys.argv[1:] if arguments is None else arguments)
        stopped = run(config, ranks)
    except USER_ERRORS as error:
        say_user_error(ranks, f"{type(error).__name__}: {error}")
        exit_process(ranks, EXIT_USER_ERROR, error)
    except EXPLAINED_ERRORS as error:
        say_error(f"{type(error).__name__}: {error}")
        exit_process(ranks, EXIT_FAILED, error)
    except KeyboardInterrupt as error:
        exit_process(ranks, EXIT_STOPPED, error)
    except Exception as error:
        lost = as_lost_peer(error)
        say_error(f"PeerLostError: {lost}" if lost else traceback.format_exc())
        exit_process(ranks, EXIT_FAILED, lost or error)
    # torchrun calls every other code than 0 a failure
    exit_process(ranks, EXIT_STOPPED if stopped and not ranks.under_torchrun else 0)


def run(config: Config, ranks: RankInfo) -> bool:
    """The whole journey, watched over from the first moment; True if it was stopped before its last step."""
    console = Console(ranks.is_main)
    status = RunStatus(ranks, console, named=config.checkpoint.resume != "auto")
    watchdog = Watchdog(
        config.run.timeouts,
        ranks.rank,
        ranks.world_size,
        lambda why: status.write("failed", why, for_all=True),
    )
    shutdown = GracefulShutdown(config.run, lambda why: status.write("stopped", why))
    try:
        planned = make_run_plan(config, ranks, console)
        # a source that is not there is found out here, by every rank alike
        check_data(config.data, config.model.vocab_size)
        folder = _make_folder(config)
        if config.parallel.plan != "auto":  # else they have joined before they planned
            init_distributed(config, ranks, planned.device)
        check_alike(ranks, lines_of(planned.plan))
        watchdog.connect()
        shutdown.connect()
        ranks = with_restarts_of_all(ranks)
        with take_folder(folder, ranks, console), status.recording(folder):
            watchdog.report_to(folder)
            stopped = _run_in(folder, config, ranks, planned, console, status, watchdog, shutdown)
    finally:
        watchdog.close()
    shutdown.close()
    dist.destroy_process_group()
    return stopped


def _run_in(
    folder: Path,
    config: Config,
    ranks: RankInfo,
    planned: RunPlan,
    console: Console,
    status: RunStatus,
    watchdog: Watchdog,
    shutdown: GracefulShutdown,
) -> bool:
    """From the checkpoint to go on from to the last step, in a folder that no other run uses."""
    plan, device = planned.plan, planned.device
    checkpoints = folder / "checkpoints"
    origin = _find_origin(config, ranks, checkpoints)
    weights = find_weights(config.checkpoint.init_from, config.model, origin.checkpoint)
    failed = broadcast_from_rank0(ranks, lambda: check_crash_loop(read_status(folder), ranks, origin.step))
    status.start(origin.step if origin.checkpoint else None, failed)
    log_run_summary(console, ranks, planned, config)
    watchdog.enter("data")
    corpus = load_together(config.data, ranks, origin.checkpoint)
    watchdog.enter("set-up")
    sequences = _sequence_shape(config, corpus)
    total_steps = _total_steps(config, corpus, sequences, plan)
    console.print(f"data: {corpus.description}")
    texts = _write_texts(folder, config, plan, ranks, console)

    mesh = build_mesh(plan.mesh, device.type)
    model = build_model(config, plan, mesh, device)
    optimizer = build_optimizer(model, config.optim, config.run.seed)
    start = _load_state(origin, weights, model, optimizer, config, corpus, total_steps, console)

    shape = _batch_shape(plan, mesh)
    order, group = SampleOrder(corpus.sources, sequences, config.run.seed), data_parallel_group(mesh)
    metrics = _build_metrics(folder, config, ranks, planned, console, model, optimizer)
    data = (corpus.description, total_steps)
    metrics.show(describe_run(config, plan, planned.device_name, data, planned.said, planned.timeline))
    saver = _build_saver(config.checkpoint, checkpoints, model, optimizer, mesh, texts, ranks, console)
    finite = NonFiniteGuard(config.train.max_skipped_steps, model, order, shape, group)
    run = Run(
        config,
        folder,
        device,
        model,
        optimizer,
        corpus,
        sequences,
        order,
        shape,
        group,
        metrics,
        saver,
        console,
        shutdown,
        watchdog,
        RecompileGuard(plan.compile),
        finite,
        total_steps,
        plan,
    )
    return _train(run, status, start)


def _find_origin(config: Config, ranks: RankInfo, checkpoints: Path) -> Start:
    """The checkpoint to go on from, none of whose successors another start may have written."""
    asked = _asked_checkpoint(config, ranks, checkpoints)
    origin = find_start(asked, checkpoints, ranks)
    own = asked.resume == "auto" or bool(
        origin.checkpoint and origin.checkpoint.resolve().parent == checkpoints.resolve()
    )
    broadcast_from_rank0(ranks, lambda: refuse_newer(checkpoints, origin.step, own))
    return origin


def _load_state(
    origin: Start,
    weights: Weights | None,
    model: Llama,
    optimizer: torch.optim.Optimizer,
    config: Config,
    corpus: Corpus,
    total_steps: int,
    console: Console,
) -> TrainPosition:
    """The weights, and of a checkpoint the optimizer's state too; where in the data the run begins."""
    console.print_lines((*origin.said, *say_start(config.checkpoint.init_from, origin.checkpoint)))
    if origin.checkpoint and origin.manifest:
        load_checkpoint(origin.checkpoint, origin.manifest, model, optimizer)
        start = _same_order(origin.manifest.position, config, corpus, console)
        console.print(f"resumed from {origin.checkpoint}: step {start.step} of {total_steps} is done")
        return start
    if weights:
        load_weights(weights, model, config.checkpoint.verify)
    return TrainPosition()


def _sequence_shape(config: Config, corpus: Corpus) -> SequenceShape:
    return make_sequence_shape(config.data, corpus.tokenizer, config.train.seq_len, config.model.vocab_size)


def _batch_shape(plan: Plan, mesh: DeviceMesh) -> BatchShape:
    rank = data_parallel_rank(mesh, plan.mesh)
    return BatchShape(plan.micro_batch_size, plan.accumulation, rank, plan.mesh.data_parallel)


def _build_metrics(
    folder: Path,
    config: Config,
    ranks: RankInfo,
    planned: RunPlan,
    console: Console,
    model: Llama,
    optimizer: torch.optim.Optimizer,
) -> Metrics:
    throughput = make_throughput(config, planned.plan, planned.device_name)
    metrics = Metrics(
        config.metrics, throughput, folder, planned.device, ranks.is_main, planned.predicted, console.print
    )
    metrics.watch_gradients(model, planned.plan, optimizer)
    return metrics


def _build_saver(
    config: CheckpointConfig,
    checkpoints: Path,
    model: Llama,
    optimizer: torch.optim.Optimizer,
    mesh: DeviceMesh,
    texts: Mapping[str, str],
    ranks: RankInfo,
    console: Console,
) -> CheckpointSaver:
    saver = CheckpointSaver(
        config, checkpoints, model, optimizer, mesh, texts, free_host_bytes, ranks.machine
    )
    if config.every:
        _make_room(saver, config, console)
    return saver


def _make_room(saver: CheckpointSaver, config: CheckpointConfig, console: Console) -> None:
    """Host memory for saves, before hours are trained that could not be saved. Raises ConfigError where there
    is too little."""
    if not (missing := saver.make_room()):
        return
    if config.on_error == "stop":
        raise ConfigError(
            f"checkpoint.every={config.every}, but {missing}. Train on more machines, with fewer processes "
            "on each or more memory (of a container: its limit), or try with checkpoint.on_error=warn"
        )
    console.print(f"warning: saves will fail unless memory becomes free: {missing}")


def _train(run: Run, status: RunStatus, start: TrainPosition) -> bool:
    """The loop, with status.json telling at any moment how it stands; True if it was stopped early."""
    run.console.start_progress(start.step, run.total_steps)
    outcome: Outcome = "failed"
    try:
        with explaining_out_of_memory(
            run.config, run.plan, run.device, run.optimizer, run.folder / "profile"
        ):
            reached = train_loop(run, start, status.progress)
        stopped = reached.step < run.total_steps
        outcome = "stopped" if stopped else "finished"
    finally:
        run.console.close()
        run.metrics.close(outcome)
    status.finish(outcome, reached.step, run.shutdown.reason or "" if stopped else "")
    if told := run.metrics.compare_with_predicted():
        run.console.print(told)
    run.console.print(_last_words(run, reached, stopped))
    return stopped


def _asked_checkpoint(config: Config, ranks: RankInfo, checkpoints: Path) -> CheckpointConfig:
    """Where to go on. After a restart it is what the run has committed itself by then, if anything."""
    # the same on every rank by now
    if ranks.restarts and broadcast_from_rank0(ranks, lambda: bool(list_checkpoints(checkpoints))):
        return dataclasses.replace(config.checkpoint, resume="auto")
    return config.checkpoint


def _make_folder(config: Config) -> Path:
    folder = Path(str(config.run.dir)).expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"run.dir={folder}: cannot make this folder ({error.strerror}): name another"
        ) from None
    return folder


def _write_texts(
    folder: Path, config: Config, plan: Plan, ranks: RankInfo, console: Console
) -> dict[str, str]:
    """The config and the plan, written into the run's folder; where that fails the run goes on, for every
    checkpoint has them too."""
    texts = {"config.yaml": config_to_yaml(config), "plan.yaml": plan_to_yaml(plan)}
    for name, text in texts.items() if ranks.is_main else ():
        try:
            (folder / name).write_text(text, encoding="utf-8")
        except OSError as error:
            console.print(f"warning: {folder / name} cannot be written ({error.strerror})")
    return texts


def _same_order(start: TrainPosition, config: Config, corpus: Corpus, console: Console) -> TrainPosition:
    """The position, from the first sample again if the order of the data is another one than before."""
    same_data = start.data in (corpus.fingerprint, "")  # "": a checkpoint of a version that did not note it
    if same_data and (start.seed, start.seq_len) == (config.run.seed, config.train.seq_len):
        return start
    console.print(
        "data: run.seed, train.seq_len or the data has changed since the checkpoint, so its order begins anew"
    )
    return dataclasses.replace(start, samples=0)


def _total_steps(config: Config, corpus: Corpus, sequences: SequenceShape, plan: Plan) -> int:
    """Optimizer steps of the whole run. Raises DataError where there is too little to train on or to
    evaluate."""
    counts = [check_sequences(source.split, sequences, source.name) for source in corpus.sources]
    if config.train.eval_every:
        check_evaluation(corpus)
    if not config.train.epochs:
        return config.train.steps
    return max(1, int(config.train.epochs * sum(counts)) // plan.global_batch_size)


def _last_words(run: Run, reached: TrainPosition, stopped: bool) -> str:
    if stopped:
        stopped_at = f"stopped at step {reached.step} of {run.total_steps} ({run.shutdown.reason})"
        if run.config.checkpoint.every and run.saver.failed:
            return f"{stopped_at}, not saved: {run.saver.failed}"
        if run.config.checkpoint.every:
            again = "" if run.config.checkpoint.resume == "auto" else " with --checkpoint.resume=auto"
            return f"{stopped_at}, saved; the same command{again} goes on"
        return f"{stopped_at}, not saved, because checkpoint.every is 0; the same command starts again"
    return f"finished: step {reached.step} of {run.total_steps}; tensorboard --logdir {run.folder}/tb"


if __name__ == "__main__":
    main()
