"""The last module that the fork server imports: it does once what every run would repeat.

It reads a config and the hardware files. The half a million objects that exist then
are hidden from Python's garbage collector, which would visit all of them in every fork.
"""

import gc

from meshwright.parallel.planner.hardware import load_hardware
from meshwright.train.config_parser import parse_config

parse_config([])
load_hardware()
gc.collect()
gc.freeze()
