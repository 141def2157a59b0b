"""Products in float8, emulated on a CPU: they are made where the plan says, and training stays beside that in float32.

e4m3 has 3 bits behind the first: rounding is off by at most 2**-4 of a value. Products of many such average it out: an output is
off by about 5%, and a loss much less, as errors of tokens average.
"""

import pytest
import torch

from tests.distributed.parity import Job, plain_run, run_jobs
from tests.support.launch import write_text

pytest.importorskip("torchao")

AOT, EAGER = "--parallel.compile.backend=aot_eager", "--parallel.compile.enabled=false"
HEADS = ["--model.n_heads=4", "--model.n_kv_heads=4"]  # each of two ranks has 16 outputs of every linear: the least there is
ON = [*HEADS, "--parallel.float8.recipe=tensorwise", "--parallel.float8.min_dim=16"]
SENT = "--parallel.float8.all_gather=true"
TWO = {
    "off": Job(2, [AOT, *HEADS], 2),
    "eager": Job(2, [EAGER, *ON], 0),
    "compiled": Job(2, [AOT, *ON], 2),
    "sent": Job(2, [AOT, *ON, SENT], 2),
    "tp": Job(2, [AOT, *ON, "--parallel.tp=2"], 2),
    "tp-sent": Job(2, [AOT, *ON, SENT, "--parallel.tp=2"], 2),
    "rowwise": Job(2, [AOT, *ON, "--parallel.float8.recipe=rowwise", "--parallel.param_dtype=bfloat16"], 2),
    "some": Job(2, [AOT, *ON, "--parallel.float8.linears=[layers.*.feed_forward.*]"], 2),
}
FOUR = {
    "mesh": Job(4, [AOT, *ON, SENT, "--parallel.tp=2", "--parallel.activation_checkpoint=full"], 2),
    "hsdp": Job(4, [AOT, *ON, SENT, "--parallel.dp_replicate=2", "--parallel.activation_checkpoint=selective",
                    "--parallel.reshard_after_forward=false"], 2),
    "bf16": Job(4, [AOT, *ON, SENT, "--parallel.param_dtype=bfloat16", "--parallel.storage_dtype=bfloat16",
                    "--optim.state_dtype=bfloat16"], 2),
}  # fmt: skip
BAND = 0.005  # nats; the largest difference met was 0.0019
# Of a gradient's norm, of the weight that is furthest off: 6% to 10% were met. In bfloat16 alone it is 2%, in float32 0.01%.
LEAST, MOST = 0.04, 0.2
FLOAT8 = [*TWO.keys() - {"off"}, *FOUR]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("float8")
    data = write_text(folder)
    results = run_jobs(TWO, data, folder / "two") | run_jobs(FOUR, data, folder / "four")
    assert [result["error"] for result in results.values() if "error" in result] == []
    return results | {"plain": plain_run(TWO["off"], data)}


@pytest.mark.parametrize("name", sorted(FLOAT8))
def test_training_stays_beside_float32_and_is_not_it(name, trained):
    got, plain = trained[name], trained["plain"]
    assert got["losses"] == pytest.approx(plain["losses"], abs=BAND, rel=0)
    off = [float((gradient - plain["grads"][fqn]).norm() / plain["grads"][fqn].norm()) for fqn, gradient in got["grads"].items()]
    assert LEAST < max(off) < MOST, "below: nothing was multiplied in float8"
    assert got["graphs"][-1] == (TWO | FOUR)[name].graphs
    assert got["graphs"][0] == got["graphs"][-1], "something was compiled late"


def test_weights_stay_what_they_were_in_name_dtype_and_value(trained):
    for name in ("sent", "mesh", "tp"):
        assert trained[name]["weights"].keys() == trained["plain"]["weights"].keys()
        for fqn, weight in trained["plain"]["weights"].items():
            assert torch.equal(trained[name]["weights"][fqn], weight), fqn


def test_it_is_the_same_compiled_or_not_and_sent_or_not(trained):
    """The scale of a weight is that of the whole of it, whether it is found before or after sending."""
    assert trained["sent"]["losses"] == pytest.approx(trained["compiled"]["losses"], abs=1e-5)
    assert trained["eager"]["losses"] == pytest.approx(trained["compiled"]["losses"], abs=1e-5)


def test_fewer_linears_in_float8_are_something_else(trained):
    assert trained["some"]["losses"] != trained["compiled"]["losses"]
