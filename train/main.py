"""`torchrun -m train.main --config llama_debug.yaml`: the command line of a run, and its end."""

import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import NoReturn

from meshwright.train.config_parser import parse_config
from meshwright.train.distributed.exit import (
    EXIT_FAILED,
    EXIT_STOPPED,
    EXIT_USER_ERROR,
    escape_unencodable,
    exit_process,
    print_error,
    print_user_error,
)
from meshwright.train.distributed.ranks import ALONE, RankInfo, read_rank_info
from meshwright.train.errors import EXPLAINED_ERRORS, USER_ERRORS


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Train, and end the process with an exit code."""

    def train(ranks: RankInfo) -> int:
        config = parse_config(sys.argv[1:] if arguments is None else arguments)
        from meshwright.train.phases import run  # late: -h and mistakes are answered before torch is imported

        stopped = run(config, ranks)
        # torchrun treats every exit code except 0 as a failure
        return EXIT_STOPPED if stopped and not ranks.under_torchrun else 0

    end_with(train)


def end_with(work: Callable[[RankInfo], int]) -> NoReturn:
    """Do the work of this rank, and end the process with the exit code that it returns. Any exception becomes
    one message and an exit code."""
    escape_unencodable()
    ranks = ALONE
    try:
        ranks = read_rank_info()
        code = work(ranks)
    except USER_ERRORS as error:
        print_user_error(ranks, f"{type(error).__name__}: {error}")
        exit_process(ranks, EXIT_USER_ERROR, error)
    except EXPLAINED_ERRORS as error:
        print_error(f"{type(error).__name__}: {error}")
        exit_process(ranks, EXIT_FAILED, error)
    except KeyboardInterrupt as error:  # before a run handles signals: nothing was saved
        exit_process(ranks, 128 + signal.SIGINT, error)
    except Exception as error:
        from meshwright.train.fault_tolerance.peers import as_peer_lost_error  # late, as above

        lost = as_peer_lost_error(error)
        print_error(f"{type(lost).__name__}: {lost}" if lost else traceback.format_exc())
        exit_process(ranks, EXIT_FAILED, lost or error)
    exit_process(ranks, code)


if __name__ == "__main__":
    main()
