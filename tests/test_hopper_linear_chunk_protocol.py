"""The barrier protocols of the chunk kernels as simulations under random interleavings (see test_hopper_protocol).

Of the scan: a slot is not refilled under a product of either warpgroup, and every phase of a barrier is waited for. Of
the preparation, warp by warp: nothing that a product of another warp or a copy reads is written meanwhile.
"""

import pytest
from barriers import MBarrier, Memory, Simulation


def simulate_scan(chunks, seed, *, warpgroups, stages=3, early_release=False):
    sim = Simulation(seed)
    slots, ready = Memory(sim, "slots"), [MBarrier(1) for _ in range(stages)]
    free = [MBarrier(warpgroups) for _ in range(stages)]

    def producer():
        for i in range(chunks):
            slot = i % stages
            if i >= stages:
                yield free[slot].wait("producer")
            if slots.readers.get(slot):
                sim.hazards.append("copied under a product")
            sim.later(lambda slot=slot, i=i: (slots.write(slot, i), ready[slot].arrive()))
            yield None
        for i in range(max(chunks - stages, 0), chunks):
            yield free[i % stages].wait("producer")

    def consumer(w):
        for i in range(chunks):
            slot = i % stages
            yield ready[slot].wait(w)
            slots.begin(slot, i)  # the products of the chunk
            yield None
            if early_release:
                free[slot].arrive()
                yield None
            slots.end(slot)
            if not early_release:
                free[slot].arrive()
            yield None

    sim.start(producer())
    for w in range(warpgroups):
        sim.start(consumer(w))
    found = sim.run()
    unseen = any(b.phase != b.seen.get("producer", 0) for b in free)
    return "a phase was not waited for" if found == "ok" and unseen else found


@pytest.mark.parametrize("warpgroups", [1, 2])
@pytest.mark.parametrize("chunks", [1, 2, 3, 4, 11])
def test_the_scan(warpgroups, chunks):
    assert {simulate_scan(chunks, seed, warpgroups=warpgroups) for seed in range(60)} == {"ok"}


def test_a_slot_released_early_is_seen():
    assert {simulate_scan(11, seed, warpgroups=2, early_release=True) for seed in range(60)} != {"ok"}


class _Meeting:
    """A barrier of the four warps of a warpgroup."""

    def __init__(self, warps=4):
        self.warps, self.count, self.phase = warps, 0, 0

    def sync(self):
        mine, self.count = self.phase, self.count + 1
        if self.count == self.warps:
            self.count, self.phase = 0, self.phase + 1
        return lambda: self.phase > mine


#: What a warp does to an item, in order: meet, or begin or end to read or write a part of shared memory. Products of a
#: warp read what all have written; a copy reads what all have written and is waited for by warp 0 alone.
_ITEM = """
write numbers | wait copies | read q k | end q k | wait stores | meet | read numbers q k | end q k numbers
write scores vectors | read k numbers | end k numbers | meet | copy
write square | meet | read square | end square | meet | write square | meet | read square | end square | meet
write square | meet | read square | end square | meet | write square | meet | read square | end square | meet
read numbers | end numbers | write square | meet | store
"""


def simulate_preparation(seed, items=3, without=None):
    """`without` leaves out the meeting of this number."""
    sim, meeting, copies = Simulation(seed), _Meeting(), MBarrier(1)
    steps = [step.split() for step in _ITEM.replace("\n", "|").split("|") if step.strip()]
    meetings = [i for i, step in enumerate(steps) if step == ["meet"]]
    if without is not None:
        del steps[meetings[without]]
    reading, writing, stores = {}, {}, []  # part -> warps; copies out of shared memory in flight

    def note(part, warp, table, others):
        clash = {w for w in others.get(part, set()) if w != warp}
        if clash:
            sim.hazards.append(f"{part} written while read")
        table.setdefault(part, set()).add(warp)

    def copy_in():
        for part in ("q", "k"):
            if reading.get(part):
                sim.hazards.append(f"{part} copied while read")
        sim.later(copies.arrive)

    def store():
        parts = ("scores", "square", "vectors")
        for part in parts:
            reading.setdefault(part, set()).add("store")
        flight = [True]
        stores.append(flight)

        def done():
            for part in parts:
                reading[part].discard("store")
            flight[0] = False

        sim.later(done)

    def warp(w):
        for item in range(items):
            for name, *parts in steps:
                if name == "meet":
                    yield meeting.sync()
                elif name == "wait" and parts == ["copies"]:
                    yield copies.wait(w)
                elif name == "wait":
                    if w == 0:
                        yield lambda: not any(flight[0] for flight in stores)
                elif name == "copy":
                    if w == 0 and item + 1 < items:
                        copy_in()
                elif name == "store":
                    if w == 0:
                        store()
                elif name == "read":
                    for part in parts:
                        note(part, w, reading, writing)
                elif name == "end":
                    for part in parts:
                        reading[part].discard(w)
                else:
                    for part in parts:
                        note(part, w, writing, reading)
                    yield None
                    for part in parts:
                        writing[part].discard(w)
                yield None

    copy_in()
    for w in range(4):
        sim.start(warp(w))
    return sim.run()


def test_the_preparation():
    assert {simulate_preparation(seed) for seed in range(100)} == {"ok"}


@pytest.mark.parametrize("number", range(11))
def test_a_missing_meeting_is_seen(number):
    assert {simulate_preparation(seed, without=number) for seed in range(200)} != {"ok"}
