"""The models of `tools.bench own_model`: all of them for slow tests, the quick ones for the others."""

import pytest

from meshwright.tools.bench.own_model.models import MODELS

EACH = [pytest.param(name, marks=[pytest.mark.slow] * name.startswith("transformers'")) for name in MODELS]
