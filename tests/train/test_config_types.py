"""Messages of the real parser for values of a wrong type."""

import pytest

from meshwright.train.config_parser import parse_config
from meshwright.train.errors import ConfigError


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--parallel.tp=two", "parallel.tp: must be auto or an integer, not two"),
        (
            "--parallel.reshard_after_forward=maybe",
            "parallel.reshard_after_forward: must be auto or true or false or an integer, not maybe",
        ),
        (
            "--parallel.tp_modules=attention",
            "parallel.tp_modules: must be a list such as [first, second], not attention",
        ),
        (
            "--parallel.activation_checkpoint=some",
            "parallel.activation_checkpoint: must be auto, none, full, selective, budget or offload, not "
            "some",
        ),
        ("--optim.lr=fast", "optim.lr: must be a number, not fast"),
        ("--model.dim=1.5", "model.dim: must be an integer, not 1.5"),
    ],
)
def test_a_wrong_type_is_told_in_words(argument: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_config([argument])
    assert str(error.value) == message
