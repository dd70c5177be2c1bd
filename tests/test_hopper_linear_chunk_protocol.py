"""The barrier protocols of the chunk kernels as simulations under random interleavings (see test_hopper_protocol).

Of the scan: a slot is not refilled under a product of either warpgroup, what leaves is not written while a store reads
it, nor sent before it is written, and every phase of a barrier is waited for. Of the preparation, warp by warp: nothing
that a product of another warp or a copy reads is written meanwhile.
"""

import itertools

import pytest
from barriers import MBarrier, Memory, Simulation

SLOTS, ROOMS, UNSEEN, DEADLOCK = "slots[", "rooms[", "a phase was not waited for", "deadlock"
#: What may be wrong with a walk over chunks, what is found then, and with how many things that leave. The last thing of
#: a chunk has been written where its slot is free: of that alone nothing is sent too early.
WRONG = [
    ("a slot is copied into at once", SLOTS, (0, 1, 2)),
    ("a slot is released early", SLOTS, (0, 1, 2)),
    ("one warpgroup alone releases a slot", DEADLOCK, (0, 1, 2)),
    ("left is not waited for", ROOMS, (1, 2)),
    ("left is given early", ROOMS, (1, 2)),
    ("left is not given at first", DEADLOCK, (1, 2)),
    ("left is given at last", UNSEEN, (1, 2)),
    ("written is not waited for", UNSEEN, (1,)),
    ("written is not waited for", ROOMS, (2,)),
    ("written is waited for a chunk early", ROOMS, (2,)),
    ("written is arrived at early", ROOMS, (2,)),
    ("one warpgroup alone has written", ROOMS, (2,)),
]


class _Walk:
    """The thread block of `linear_walk`: a producer, and warpgroups that hand over `things` of each chunk, the last one
    at its end and any other at its beginning."""

    def __init__(self, seed, chunks, *, warpgroups, stages=3, things=1, wrong=None):
        self.sim, self.chunks, self.wrong = Simulation(seed), chunks, wrong
        self.stages, self.things, self.warpgroups = stages, things, warpgroups
        self.slots, self.rooms = Memory(self.sim, "slots"), Memory(self.sim, "rooms")
        free, written = (
            1 if wrong == f"one warpgroup alone {does}" else warpgroups for does in ("releases a slot", "has written")
        )
        self.ready, self.free = ([MBarrier(n) for _ in range(stages)] for n in (1, free))
        self.written, self.left = ([MBarrier(n) for _ in range(things)] for n in (written, 1))

    def run(self):
        self.sim.start(self.producer())
        for w in range(self.warpgroups):
            self.sim.start(self.consumer(w))
        found = self.sim.run()
        if found == "ok" and self.unseen():
            return UNSEEN
        return "; ".join([*self.sim.hazards, found]) if found == DEADLOCK else found

    def unseen(self):
        """Whether one of those that wait for a barrier has not seen all of its phases."""
        consumers, producer = range(self.warpgroups), ["producer"]
        pairs = [(self.ready, consumers), (self.left, consumers), (self.free, producer), (self.written, producer)]
        return any(b.phase != b.seen.get(who, 0) for barriers, whos in pairs for b in barriers for who in whos)

    # The producer

    def producer(self):
        for barrier in self.left if self.wrong != "left is not given at first" else ():
            barrier.arrive()
        for i in range(min(self.chunks, self.stages)):
            yield from self.copy(i)
        for i in range(self.chunks):
            for which in range(self.things - 1):
                yield from self.send(i, which)
            if self.wrong != "a slot is copied into at once":
                yield self.free[i % self.stages].wait("producer")
            if i + self.stages < self.chunks:
                yield from self.copy(i + self.stages)
            if self.things:
                yield from self.send(i, self.things - 1)

    def copy(self, i):
        slot = i % self.stages
        if self.slots.readers.get(slot):
            self.sim.hazards.append(f"slots[{slot}] copied into under a product")
        self.sim.later(lambda: (self.slots.write(slot, i), self.ready[slot].arrive()))
        yield None

    def send(self, i, which):
        early = self.wrong == "written is waited for a chunk early" and i == 0
        if self.wrong != "written is not waited for" and not early:
            yield self.written[which].wait("producer")
        yield None
        for w in range(self.warpgroups):
            self.rooms.begin((which, w), i)
            self.sim.later(lambda w=w: self.rooms.end((which, w)))
        if self.wrong != "left is given early":
            yield lambda: not any(self.rooms.readers.values())
        if i + 1 < self.chunks or self.wrong == "left is given at last":
            self.left[which].arrive()

    # A warpgroup

    def consumer(self, w):
        for i in range(self.chunks):
            slot = i % self.stages
            yield self.ready[slot].wait(w)
            self.slots.begin(slot, i)  # the products of the chunk
            yield None
            if self.wrong == "a slot is released early":
                self.free[slot].arrive()
                yield None
            for which in range(self.things):
                yield from self.hand_over(i, w, which)
            self.slots.end(slot)
            if self.wrong != "a slot is released early":
                self.free[slot].arrive()
            yield None

    def hand_over(self, i, w, which):
        if self.wrong != "left is not waited for":
            yield self.left[which].wait(w)
        if self.wrong == "written is arrived at early":
            self.written[which].arrive()
        yield None
        self.rooms.write((which, w), i)
        yield None
        if self.wrong != "written is arrived at early":
            self.written[which].arrive()
        yield None


@pytest.mark.parametrize("things", [0, 1, 2])
@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("warpgroups", [1, 2])
@pytest.mark.parametrize("chunks", range(1, 12))
def test_the_scan(chunks, warpgroups, stages, things):
    how = dict(warpgroups=warpgroups, stages=stages, things=things)
    assert {_Walk(seed, chunks, **how).run() for seed in range(30)} == {"ok"}


@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("wrong, finding, leaving", WRONG)
def test_a_wrong_scan_is_seen(wrong, finding, leaving, stages):
    for things, warpgroups in itertools.product(leaving, [2] if "alone" in wrong else [1, 2]):
        how = dict(warpgroups=warpgroups, stages=stages, things=things, wrong=wrong)
        assert any(finding in _Walk(seed, 11, **how).run() for seed in range(60))


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
