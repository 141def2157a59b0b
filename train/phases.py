"""All phases of a run, from top to bottom."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from meshwright.parallel.mesh import build_mesh
from meshwright.parallel.plan.serialize import plan_to_yaml
from meshwright.train.between_steps import GarbageCollector, Recompiles
from meshwright.train.checkpoint.hook import Checkpoints, open_saver
from meshwright.train.checkpoint.resume import (
    Start,
    admit,
    choose_weights,
    compare_configs,
    find_start,
    judge,
)
from meshwright.train.config import Config
from meshwright.train.config_parser import config_to_yaml
from meshwright.train.console import Console, Screen
from meshwright.train.data.corpus import check_data
from meshwright.train.data.training_data import describe_data, load_training_data
from meshwright.train.distributed.agreement import check_same_settings, comparable_settings, plan_lines
from meshwright.train.distributed.process_group import group_timeout, init_distributed
from meshwright.train.distributed.ranks import RankInfo
from meshwright.train.evaluation import Evaluation
from meshwright.train.fault_tolerance.nonfinite import NonFiniteGuard
from meshwright.train.fault_tolerance.out_of_memory import explaining_out_of_memory
from meshwright.train.fault_tolerance.run_folder import count_failed_starts, make_run_folder, write_texts
from meshwright.train.fault_tolerance.supervision import Supervision, supervised
from meshwright.train.hooks import Hook, Hooks, find_hooks, state_of
from meshwright.train.loop import train_loop
from meshwright.train.metrics.collector import GradientNorms, Metrics, StepClock, make_rates
from meshwright.train.metrics.run_summary import log_run_summary
from meshwright.train.metrics.writer import open_rows
from meshwright.train.model.trained_model import find_loss, model_of, texts_of
from meshwright.train.optim.optimizer import describe_waits, learning_rate
from meshwright.train.planning.run_plan import check_memory, make_run_plan
from meshwright.train.profiling import profilers
from meshwright.train.run import Run, files_beside, load_states, restore
from meshwright.train.training import build_training
from meshwright.train.user_code import find

MOST_CHECKED = 10_000  # steps of a schedule of the user's


def run(config: Config, ranks: RankInfo) -> bool:
    """Run all phases under supervision; return True if the run was stopped before its last step."""
    console, saves, timeout = Console(ranks.is_main), config.checkpoint, group_timeout(config.run)
    with supervised(config.run, ranks, console) as supervision:
        # most user errors are found here, before anything is created
        hook_classes, source = import_user_code(config), model_of(config.model)
        planned = make_run_plan(config, ranks, console)
        plan, device = planned.plan, planned.device
        check_data(config.data, source.vocab_size)
        console.print_lines(init_distributed(config.run, comparable_settings(config), ranks, device))
        check_same_settings(ranks, plan_lines(plan))
        supervision.connect()
        planned = check_memory(config.job, planned, ranks)
        folder = make_run_folder(str(config.run.dir))
        judge(config, folder, ranks)  # before the lock is waited for; find_start decides again

        with supervision.in_folder(folder):
            admission, start = find_start(config, folder, ranks)
            start = compare_configs(start, config, plan, ranks)
            weights = choose_weights(saves, config.model, start)
            failed_starts = count_failed_starts(folder, ranks, admission.restarted, start.step)
            log_run_summary(console, ranks, planned, config)

            supervision.watchdog.enter("data")
            mesh = build_mesh(plan.mesh, device.type, timeout, plan.cpu_offload)
            data = load_training_data(config, planned, mesh, ranks, start, console.print)
            supervision.watchdog.source = data.order.waiting
            supervision.stop.on_fetched = supervision.watchdog.restart_clock
            supervision.watchdog.enter("set-up")
            # from here on the folder is written
            supervision.status.start(folder, start.step if start.checkpoint else None, failed_starts)
            console.print_lines(admit(config, folder, ranks, admission, start))
            console.print_lines(describe_data(config, data))
            texts = {"config.yaml": config_to_yaml(config), "plan.yaml": plan_to_yaml(plan)}
            texts |= texts_of(source.module)
            write_texts(folder, texts, ranks, console)

            loaded = start.checkpoint is not None or (weights is not None and not weights.missing)
            training = build_training(config, plan, mesh, timeout, loaded)
            console.print_lines(describe_waits(training.optimizer))
            restore(training, start, weights, config, data, console)
            built = Run(config, planned, training, data, folder, ranks, console)
            files = texts | (files_beside(config, data, start, weights, console) if ranks.is_main else {})
            with explaining_out_of_memory(config.job, plan, device, training.optimizer, folder / "profile"):
                hooks = Hooks()
                with hooks.closed_at_exit():
                    metrics, checkpoints = build_hooks(built, hooks, hook_classes, supervision, start, files)
                    reached = train_loop(built, hooks, supervision.stop)
                    if supervision.stop.agreed:  # perhaps while a step waited for its data
                        checkpoints.save_if_due(reached, last=True)

            stopped = supervision.stop.reason if reached.step < data.total_steps else None
            saved = checkpoints.last or (start.checkpoint if start.step == reached.step else None)
            console.print_lines(metrics.compare_with_predicted())
            supervision.status.finish(reached.step, stopped)
            console.print(describe_end(config, reached.step, data.total_steps, saved, stopped))
    return stopped is not None


def import_user_code(config: Config) -> Sequence[Callable[[Run], Hook]]:
    """Import and check what the config names of yours beside the model, and return the classes of hooks.
    Raises ConfigError."""
    if ":" in config.optim.schedule:
        for step in range(1, config.train.steps + 1, config.train.steps // MOST_CHECKED + 1):
            learning_rate(config.optim, step, config.train.steps)
    if ":" in config.optim.name:
        find("optim.name", config.optim.name)
    if config.train.loss:
        find_loss(config.train.loss, model_of(config.model).vocab_size)
    if config.data.factory:
        find("data.factory", config.data.factory)
    return find_hooks(config.train.hooks)


def build_hooks(
    run: Run,
    hooks: Hooks,
    hook_classes: Sequence[Callable[[Run], Hook]],
    supervision: Supervision,
    start: Start,
    files: Mapping[str, str | bytes],
) -> tuple[Metrics, Checkpoints]:
    """Fill `hooks` with what happens beside the steps of a run, in the order in which it happens, and return
    two of them, which have results at its end. Loads the state of yours, and tries whether the run can save.
    `files`: that each checkpoint contains."""
    config, training, data, print_ = run.config, run.training, run.data, run.console.print
    clock, yours = StepClock(run.planned.device), hooks.make(hook_classes, run)
    state = partial(state_of, yours)
    run.console.print_lines(load_states(start, state()))
    repeated = training.sharded, data.order, data.batch, training.loss_of
    nonfinite = NonFiniteGuard(config.train.max_skipped_steps, *repeated, print_)
    rows = open_rows(run, supervision.status.progress)
    checkpoints = Checkpoints(open_saver(run, files, state), run, supervision, nonfinite, rows, clock)
    nonfinite.save_good = partial(checkpoints.save_if_due, last=True)
    norms = GradientNorms(training.sharded, run.is_reported) if config.metrics.gradient_norms else None
    rates = make_rates(config.job, run.planned.plan, run.planned.device_name, print_)
    metrics = Metrics(run, hooks, clock, rates, norms, nonfinite.columns)
    hooks.extend(
        [
            supervision.watchdog,  # first: what hangs from here on has a name
            GarbageCollector(config.train.gc_every_steps),
            Recompiles(run.planned.plan, print_),
            nonfinite,
            *profilers(run),
            *([norms] if norms else []),
            Screen(run.console, data.total_steps, run.planned.plan, run.planned.device.type),
            rows,
            *yours,
            supervision.stop,  # the ranks agree whether this step is the last
            Evaluation(run, hooks, checkpoints, supervision, clock),
            metrics,  # after the evaluation: the row has its scores
            checkpoints,  # last: this row is on disk before its checkpoint (but an evaluation saves first)
        ],
        supervision.stop.request,
    )
    return metrics, checkpoints


def describe_end(config: Config, step: int, steps: int, saved: Path | None, stopped: str | None) -> str:
    """Return the last line of a run: how it ended, where the last step is saved, and what to do next."""
    if saved:
        kept, again = f"saved in {saved}", "resumes it"
    else:
        kept = "nothing to save" if config.checkpoint.every else "not saved, because checkpoint.every is 0"
        again = "starts where this run did"
    if stopped is None:
        look = f"tensorboard --logdir {config.run.dir}/tb" if config.metrics.tensorboard else config.run.dir
        return f"finished: step {step} of {steps}, {kept}; {look}"
    return f"stopped at step {step} of {steps} ({stopped}), {kept}; the same command {again}"
