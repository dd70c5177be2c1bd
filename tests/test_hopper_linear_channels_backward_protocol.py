"""The meetings of the four warps in the backward kernels of KDA, under random interleavings: nobody reads a part of
shared memory before it is written or after it is written again, be it by a warp or by a copy. The walk's protocol is
that of the forward.
"""

import pytest
from barriers import MBarrier, Simulation

#: What each warp does, in order: write its own quarter of a part as the named version, or all of the part with its
#: number (`part`), read its own quarter or all of a version, meet the others; warp 0 begins copies into a part, which
#: `wait` waits for, and to HBM, which read all quarters until they end.
_CHUNK = """
fill erase in | fill S in | fill v in | fill T in | fill do in | fill dz in | wait erase | wait S | wait v | wait T
own v in | all erase in | all S in | wait do | wait dz | own dz in | write v z | all do in | all dz in | all S in | meet
fill S D | all v z | all T in | own dz in | meet
write v u | meet
all do in | all dz in | all v u | own dz in | meet
fill do S | fill dz S | write T dA | write erase dL | write v dv | meet
copy T dA | copy erase dL | copy v dv | wait S | all S D | wait do | wait dz | own do S | own dz S | own S D
write vector sums | meet
copy vector sums
"""

_PIECE = """
all right {s} | all unsafe{p} both
own qk{p} in | all sums{p} g | write qk{p} w | own qk{p} w | write totals{b} {p} | meet
all totals{b} {p} | write sums{p} dq | write qk{p} dk
"""
_SLAB = "| own qk{p} in | own qk{q} in | all sums{p} g | all sums{q} g | write right {s} | meet |"
_SCORES = """
fill qk0 in | fill qk1 in | fill qk2 in | fill qk3 in | wait qk0 | wait qk1 | wait qk2 | wait qk3
write sums0 g | write sums1 g | write sums2 g | write sums3 g | part unsafe decays | meet
"""
for _p in range(4):
    _SCORES += f"| own unsafe{_p} decays | write unsafe{_p} both"
for _s in range(2):
    _p, _q = 2 * _s, 2 * _s + 1
    _SCORES += _SLAB.format(s=_s, p=_p, q=_q)
    _SCORES += _PIECE.format(s=_s, p=_p, b=0) + "|" + _PIECE.format(s=_s, p=_q, b=1) + "|"
_SCORES += "fill right again | wait right |"
_SCORES += "|".join(f"own right again | own sums{p} dq | own qk{p} dk | write qk{p} out" for p in range(4))
_SCORES += "| meet |" + "|".join(f"copy qk{p} out" for p in range(4))

KERNELS = {"chunk": _CHUNK, "scores": _SCORES}


class _Meeting:
    """A barrier of the four warps."""

    def __init__(self):
        self.count, self.phase = 0, 0

    def sync(self):
        mine, self.count = self.phase, self.count + 1
        if self.count == 4:
            self.count, self.phase = 0, self.phase + 1
        return lambda: self.phase > mine


def steps_of(kernel):
    return [step.split() for step in KERNELS[kernel].replace("\n", "|").split("|") if step.strip()]


def simulate(kernel, seed, without=None):
    """`without` leaves out the meeting of this number."""
    sim, meeting, steps = Simulation(seed), _Meeting(), steps_of(kernel)
    if without is not None:
        del steps[[i for i, step in enumerate(steps) if step == ["meet"]][without]]
    holds, arrived = {}, {step[1]: MBarrier(1) for step in steps if step[0] == "fill"}

    def check(part, quarters, version):
        for i in quarters:
            if holds.get((part, i)) != version:
                sim.hazards.append(f"{part} holds {holds.get((part, i))}, not {version}")

    def fill(part, version):
        holds.update({(part, i): "in flight" for i in range(4)})
        sim.later(lambda: (holds.update({(part, i): version for i in range(4)}), arrived[part].arrive()))

    def copy(part, version):
        check(part, range(4), version)
        sim.later(lambda: check(part, range(4), version))

    def warp(w):
        for name, *step in steps:
            if name == "meet":
                yield meeting.sync()
            elif name == "wait":
                yield arrived[step[0]].wait(w)
            elif name == "write":
                holds[step[0], w] = step[1]
            elif name == "part":
                holds.update({(f"{step[0]}{w}", i): step[1] for i in range(4)})
            elif name in ("fill", "copy"):
                if w == 0:
                    (fill if name == "fill" else copy)(*step)
            else:
                quarters = range(4) if name == "all" else [w]
                check(step[0], quarters, step[1])
                yield None
                check(step[0], quarters, step[1])
            yield None

    for w in range(4):
        sim.start(warp(w))
    return sim.run()


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_kernel(kernel):
    assert {simulate(kernel, seed) for seed in range(60)} == {"ok"}


@pytest.mark.parametrize(
    "kernel, number", [(kernel, i) for kernel in KERNELS for i in range(steps_of(kernel).count(["meet"]))]
)
def test_a_missing_meeting_is_seen(kernel, number):
    assert {simulate(kernel, seed, without=number) for seed in range(400)} != {"ok"}
