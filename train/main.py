"""`torchrun -m train.main --config llama_debug.yaml`: all phases of a run, from top to bottom."""

import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from meshwright.parallel.mesh import build_mesh
from meshwright.parallel.plan.serialize import plan_to_yaml
from meshwright.train.checkpoint.changes import compare_configs
from meshwright.train.checkpoint.initial_weights import find_weights
from meshwright.train.checkpoint.ownership import admit, find_start, judge
from meshwright.train.checkpoint.save import CheckpointSaver
from meshwright.train.config import Config
from meshwright.train.config_parser import config_to_yaml, parse_config
from meshwright.train.console import Console
from meshwright.train.data.corpus import check_data
from meshwright.train.data.training_data import load_training_data
from meshwright.train.distributed.exit import (
    EXIT_FAILED,
    EXIT_STOPPED,
    EXIT_USER_ERROR,
    escape_unencodable,
    exit_process,
    print_error,
    print_user_error,
)
from meshwright.train.distributed.process_group import group_timeout, init_distributed
from meshwright.train.distributed.ranks import (
    ALONE,
    RankInfo,
    check_same_settings,
    comparable_settings,
    plan_lines,
    read_rank_info,
)
from meshwright.train.errors import EXPLAINED_ERRORS, USER_ERRORS
from meshwright.train.fault_tolerance.out_of_memory import explaining_out_of_memory
from meshwright.train.fault_tolerance.peers import as_peer_lost_error
from meshwright.train.fault_tolerance.run_lock import make_run_folder, write_texts
from meshwright.train.fault_tolerance.supervision import supervised
from meshwright.train.loop import train_loop
from meshwright.train.metrics.reporting import build_reporting
from meshwright.train.metrics.run_summary import log_run_summary
from meshwright.train.model.build import build_model
from meshwright.train.model.trained_model import model_of
from meshwright.train.optim.optimizer import build_optimizer, describe_short_run
from meshwright.train.planning.run_plan import check_memory, make_run_plan
from meshwright.train.state import files_beside, restore


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Train, and turn any exception into one message and an exit code."""
    escape_unencodable()
    ranks = ALONE
    try:
        ranks = read_rank_info()
        config = parse_config(sys.argv[1:] if arguments is None else arguments)
        stopped = run(config, ranks)
    except USER_ERRORS as error:
        print_user_error(ranks, f"{type(error).__name__}: {error}")
        exit_process(ranks, EXIT_USER_ERROR, error)
    except EXPLAINED_ERRORS as error:
        print_error(f"{type(error).__name__}: {error}")
        exit_process(ranks, EXIT_FAILED, error)
    except KeyboardInterrupt as error:
        exit_process(ranks, EXIT_STOPPED, error)
    except Exception as error:
        lost = as_peer_lost_error(error)
        print_error(f"{type(lost).__name__}: {lost}" if lost else traceback.format_exc())
        exit_process(ranks, EXIT_FAILED, lost or error)
    # torchrun treats every exit code except 0 as a failure
    exit_process(ranks, EXIT_STOPPED if stopped and not ranks.under_torchrun else 0)


def run(config: Config, ranks: RankInfo) -> bool:
    """Run all phases under supervision; return True if the run was stopped before its last step."""
    console = Console(ranks.is_main)
    with supervised(config.run, ranks, console) as supervision:
        # user errors are found before anything is created
        source, saves = model_of(config.model), config.checkpoint
        planned = make_run_plan(config, ranks, console)
        plan, device = planned.plan, planned.device
        check_data(config.data, source.vocab_size)
        console.print_lines(init_distributed(config.run, comparable_settings(config), ranks, device))
        check_same_settings(ranks, plan_lines(plan))
        supervision.connect()
        planned = check_memory(config.job, planned, ranks)
        folder = make_run_folder(str(config.run.dir))
        judge(config, folder, ranks)

        with supervision.in_folder(folder, ranks):
            admission, start = find_start(config, folder, ranks)
            start = compare_configs(start, config, plan, ranks)
            weights = find_weights(saves.init_from, config.model, start.checkpoint, saves.changed_model)
            failed_starts = supervision.check_crash_loop(folder, ranks, admission, start)
            log_run_summary(console, ranks, planned, config)

            supervision.enter("data")
            timeout = group_timeout(config.run)
            mesh = build_mesh(plan.mesh, device.type, timeout, plan.cpu_offload)
            data = load_training_data(config, planned, mesh, ranks, start, console.print)
            supervision.enter("set-up")
            supervision.begin(folder, start, failed_starts)
            console.print_lines(admit(config, folder, ranks, admission, start))
            console.print(f"data: {data.corpus.description}")
            sequences, batch_size = sum(data.order.sizes), data.batch.global_batch_size
            console.print_lines(describe_short_run(config.optim, data.total_steps, sequences, batch_size))
            texts = {"config.yaml": config_to_yaml(config), "plan.yaml": plan_to_yaml(plan), **source.texts()}
            write_texts(folder, texts, ranks, console)

            sharded = build_model(config.model, config.train, plan, mesh, config.run.seed, timeout)
            optimizer = build_optimizer(sharded.model, config.optim, config.run.seed)
            state = restore(sharded, optimizer, start, weights, config, data, console)
            beside = files_beside(config, data, start, weights, console) if ranks.is_main else {}
            parts = saves, folder / "checkpoints", sharded.model, optimizer, mesh, texts | beside
            saver = CheckpointSaver(*parts, machine=ranks.machine, group_timeout=timeout)
            saver.make_room(state.position.step, console.print)
            loss_of = source.loss(plan, config.train.z_loss)
            reporting = build_reporting(config, planned, state, data, folder, console, supervision.progress)
            with (
                explaining_out_of_memory(config.job, plan, device, optimizer, folder / "profile"),
                supervision.training(config.train, sharded, data, loss_of),
                reporting,
            ):
                reached, saved = train_loop(config, loss_of, state, data, saver, supervision, reporting)
            stopped = reached.step < data.total_steps
            reporting.finish()
            supervision.finish(reached.step, stopped)
            saved = saved or (start.checkpoint if start.step == reached.step else None)
            progress, kept = f"step {reached.step} of {data.total_steps}", _describe_kept(config, saved)
            again = f"the same command {'resumes it' if saved else 'starts where this run did'}"
            end = f"stopped at {progress} ({supervision.stop_reason})" if stopped else f"finished: {progress}"
            console.print(f"{end}, {kept}; {again if stopped else f'tensorboard --logdir {folder}/tb'}")
    return stopped


def _describe_kept(config: Config, checkpoint: Path | None) -> str:
    """Describe where the last step is saved, or why it is not."""
    if checkpoint:
        return f"saved in {checkpoint}"
    return "nothing to save" if config.checkpoint.every else "not saved, because checkpoint.every is 0"


if __name__ == "__main__":
    main()
