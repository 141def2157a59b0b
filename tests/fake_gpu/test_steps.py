"""The compiled step of rank 0 on the fake H100: host waits, allocations, collectives, memory and compiled
kernels."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from meshwright.parallel.planner.hardware import load_hardware
from meshwright.parallel.simulate.collectives import Collective as Simulated
from meshwright.tools.dryrun import log
from meshwright.tools.dryrun.log import MEMORY_FILE, Call, NcclCollective, steady_step
from meshwright.train.config_parser import parse_config
from meshwright.train.planning.predict import predict
from tests.fake_gpu.calls import collectives, count_launches, devices, refused, unimplemented
from tests.fake_gpu.plans import CASES, Case
from tests.fake_gpu.record import PATH, figures_of, plan_on_h100, run_steps
from tests.support.simulated import simulated

RECORD = json.loads(PATH.read_text())
DAYS = 10  # the plans are distributed over so many days
# in torch's default configuration for an H100 (255 registers x 8 warps), outside of the loop over unmasked
# blocks; docs/tried.md has the alternatives
SPILLS = "triton_tem_fused_flex_attention_backward"


@dataclass(frozen=True)
class Run:
    """A case after its run: its folder and its calls."""

    name: str
    case: Case
    scratch: Path
    calls: list[Call]

    @property
    def step(self) -> list[Call]:
        return steady_step(self.calls)


def test_every_plan_is_recorded_and_only_flex_attentions_backward_spills() -> None:
    assert RECORD.keys() == CASES.keys()
    for name, case in CASES.items():
        spilling = [kernel for kernel in RECORD[name]["kernels"] if not kernel.endswith(" 0 B of stack")]
        assert all(kernel.startswith(SPILLS) for kernel in spilling), spilling
        assert bool(spilling) == ("--data.document_mask=true" in case.arguments)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=[pytest.mark.slow, pytest.mark.sampled(DAYS, day=number % DAYS)])
        for number, name in enumerate(CASES)
    ],
)
def run(request, fake_gpu, tmp_path_factory) -> Run:
    scratch, case = tmp_path_factory.mktemp("case"), CASES[request.param]
    result = run_steps(fake_gpu, scratch, case.arguments, world_size=case.world_size)
    assert result.returncode == 0, result.stderr
    return Run(request.param, case, scratch, log.read_log(scratch))


def test_a_steady_step_waits_for_nothing_and_allocates_nothing(run: Run) -> None:
    assert count_launches(run.step) > 150, "the log must contain the step"
    assert log.host_waits(run.step) == []
    assert log.allocations(run.step) == []


def test_nothing_is_called_that_the_fake_has_not_or_that_a_gpu_refuses(run: Run) -> None:
    assert unimplemented(run.calls) == []
    assert refused(run.calls) == []
    assert devices(run.calls) == {0}


def test_the_collectives_are_those_of_tools_simulate_each_on_its_axis_stream(run: Run) -> None:
    # a group of one rank communicates nothing
    sent = [collective for collective in collectives(run.step) if collective.ranks > 1]
    check_collectives(sent, simulated(run.case.world_size, *run.case.arguments).collectives)


def check_collectives(sent: Sequence[NcclCollective], wanted: Sequence[Simulated]) -> None:
    """Check kind, bytes and order of the collectives, one communicator per axis, and the streams of those
    before the gradients are complete: those of the optimizer have nothing beside them."""
    assert [(c.op, c.bytes) for c in sent] == [(c.op, c.bytes) for c in wanted]
    both = list(zip(sent, wanted, strict=True))
    communicators = {(w.axis, s.communicator, s.ranks) for s, w in both}
    assert len(communicators) == len({w.axis for w in wanted}), communicators
    streams: dict[tuple[str, str], set[int]] = {}
    for s, w in both:
        if w.phase == "optimizer":
            continue
        streams.setdefault((w.axis, w.op if w.axis == "dp_shard" else ""), set()).add(s.stream)
    assert all(len(used) == 1 for used in streams.values()), streams
    separate = [streams[key] for key in streams if key[0] in ("dp_shard", "dp_replicate", "tp")]
    assert {0} not in separate, "no collective is on the stream on which the step computes"
    assert len({frozenset(used) for used in separate}) == len(separate), (
        "all-gathers, reduce-scatters, and each other axis have separate streams"
    )


def test_offloaded_activations_go_beside_what_is_computed_and_come_back(run: Run) -> None:
    sent, fetched = check_offload(run.step)
    assert sent == fetched
    assert bool(sent) == ("--parallel.activation_checkpoint=offload" in run.case.arguments)


def check_offload(step: Sequence[Call]) -> tuple[list[int], list[int]]:
    """Return the bytes of the copies to the host and back; all are on one stream, which is not the step's."""
    copies = [call for call in step if call.kind == "memcpy" and call.words[0] == "DtoH"]
    streams = {copy.stream for copy in copies}
    assert len(streams) <= 1
    assert 0 not in streams, "activations are copied on the stream on which the step computes"
    returned = [
        call for call in step if call.kind == "memcpy" and call.words[0] == "HtoD" and call.stream in streams
    ]
    return sorted(int(copy.words[1]) for copy in copies), sorted(int(copy.words[1]) for copy in returned)


def test_the_predicted_memory_is_that_of_the_allocator(run: Run) -> None:
    """Allocated within 2%; reserved never below, and at most 9% above (8.5% with tp and offload)."""
    job, world_size = parse_config(run.case.arguments).job, run.case.world_size
    predicted = predict(job, plan_on_h100(run.case.arguments, world_size), load_hardware()["h100-sxm"], 8)
    peaks = json.loads((run.scratch / MEMORY_FILE).read_text())
    assert predicted.memory.peak_bytes == pytest.approx(peaks["allocated"], rel=0.02)
    assert 1 <= predicted.allocator_bytes / peaks["reserved"] <= 1.09


def test_the_step_is_the_recorded_one(run: Run) -> None:
    """After an intended difference, write the record again with python -m tests.fake_gpu.record, and name the
    change in the commit."""
    assert figures_of(run.scratch) == RECORD[run.name]
