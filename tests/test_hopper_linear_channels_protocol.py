"""The meetings of the four warps in `linear_channel_prepare`, under random interleavings: nobody reads a part of shared
memory before it is written or after it is written again. The scan's protocol is that of one decay a head.
"""

import pytest
from barriers import Simulation

#: What each warp does, in order: write its own quarter of a part as the named version, read its own quarter or all of
#: a version, meet the others, or let warp 0 begin a copy to HBM, which reads all quarters until it ends.
_STEPS = """
write sums g | write vector beta | meet
own q raw | own k raw | all sums g | write right end | meet
own q raw | own k raw | all sums g | all right end | meet
own q raw | own k raw | all sums g | write right update | write q query | write k erase | write scores A | meet
copy q query | copy k erase | copy right update | copy scores A | copy vector beta
write sums lower | meet | all sums lower | meet | write sums T | meet | all sums T | write inverse T | meet
copy inverse T
"""


class _Meeting:
    """A barrier of the four warps."""

    def __init__(self):
        self.count, self.phase = 0, 0

    def sync(self):
        mine, self.count = self.phase, self.count + 1
        if self.count == 4:
            self.count, self.phase = 0, self.phase + 1
        return lambda: self.phase > mine


def simulate(seed, without=None):
    """`without` leaves out the meeting of this number."""
    sim, meeting = Simulation(seed), _Meeting()
    steps = [step.split() for step in _STEPS.replace("\n", "|").split("|") if step.strip()]
    if without is not None:
        del steps[[i for i, step in enumerate(steps) if step == ["meet"]][without]]
    holds = {(part, i): "raw" for part in "qk" for i in range(4)}  # TMA, waited for by all

    def check(part, quarters, version):
        for i in quarters:
            if holds.get((part, i)) != version:
                sim.hazards.append(f"{part} holds {holds.get((part, i))}, not {version}")

    def copy(part, version):
        check(part, range(4), version)
        sim.later(lambda: check(part, range(4), version))

    def warp(w):
        for name, *step in steps:
            if name == "meet":
                yield meeting.sync()
            elif name == "write":
                holds[step[0], w] = step[1]
            elif name != "copy":
                quarters = range(4) if name == "all" else [w]
                check(step[0], quarters, step[1])
                yield None
                check(step[0], quarters, step[1])
            elif w == 0:
                copy(*step)
            yield None

    for w in range(4):
        sim.start(warp(w))
    return sim.run()


def test_the_preparation():
    assert {simulate(seed) for seed in range(100)} == {"ok"}


@pytest.mark.parametrize("number", range(_STEPS.count("meet")))
def test_a_missing_meeting_is_seen(number):
    assert {simulate(seed, without=number) for seed in range(200)} != {"ok"}
