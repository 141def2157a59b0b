"""The last thing that the fork server imports: it makes once what every run would make for itself from the
same files.

That is the parser of train.main and the machine kinds. What there is by then, half a million objects, is set
apart from Python's collector, which would go over all of it in every fork.
"""

import gc

from meshwright.parallel.planner.hardware import load_hardware
from meshwright.train.config_parser import parse_config

parse_config([])
load_hardware()
gc.collect()
gc.freeze()
