"""The meetings of the four warps in `linear_channel_prepare`, and its waits for copies, under random interleavings:
nobody reads a part of shared memory before it is written or after it is written again, nor writes what is being read.
The scan's protocol is that of one decay a head.
"""

import itertools

import pytest
from barriers import Simulation

CHUNKS = 3
KINDS = list(itertools.product((1, 2), *[(False, True)] * 3))  # slabs, delta, scores, early


def steps_of(chunk, slabs, delta, scores, early):
    """What each warp does with a chunk, in order: write its own quarter of a part as the named version, read its own
    quarter or all of a version, meet the others; or let warp 0 begin a copy to HBM, of one part or more, which reads
    all quarters until it ends, wait until at most n of them are under way and meet, or load q and k."""
    strong = scores and early  # bounded gates, the late ones, are never strong
    sums_of = lambda g: [*(("write", x, g) for x in ("sums", *["strong"] * strong)), ("meet",)]  # noqa: E731
    yield from (("wait", 0), ("load", chunk))
    if delta:
        yield "write", "beta", chunk
    if early:
        yield from sums_of((chunk, 0))
    yield "loaded", chunk
    for s in range(slabs):
        yield from (("all", f"{x}{s}", f"raw{chunk}") for x in "qk")
    yield "write", "rows", chunk
    for s in range(slabs):
        g, tiles = (chunk, s), [("own", f"{x}{s}", f"raw{chunk}") for x in "qk"]
        factors = ("own", "rows", chunk), ("all", "sums", g)
        if s or not early:
            yield from sums_of(g)
        yield from (("all", "sums", g), ("write", f"decay{s}", g), ("write", "others", g))
        if scores:
            yield from (tiles[1], *factors, ("write", f"right{s}", f"end{chunk}"), ("meet",))
            yield from ([("all", "strong", g)] if strong else [])
            yield from (*tiles, *factors, ("all", f"right{s}", f"end{chunk}"))
        yield from (("meet",), *tiles, *factors, ("all", "others", g))
        made = {f"right{s}": "update", f"q{s}": "query"} | ({f"k{s}": "erase"} if delta else {})
        yield from (("write", part, f"{name}{chunk}") for part, name in made.items())
        yield "meet",
        yield from (("copy", (part, f"{name}{chunk}")) for part, name in made.items())
    if scores:
        yield from (("own", "rows", chunk), ("wait", (2 + delta) * (slabs - 1)), ("write", "q0", f"A{chunk}"))
        if delta:
            yield "own", "beta", chunk
            for part in ("lower", "blocks", "first", "second"):  # of the inverse
                yield from (("write", "k0", part), ("meet",), ("all", "k0", part), ("meet",))
            yield "write", "k0", f"T{chunk}"
        yield "meet",
        if delta:
            yield "copy", ("k0", f"T{chunk}")
        yield "copy", ("q0", f"A{chunk}")
    yield "copy", *((f"decay{s}", (chunk, s)) for s in range(slabs)), *([("beta", chunk)] if delta else [])


class _Slow(Simulation):
    """Copies take no time or long, or none takes any."""

    def __init__(self, seed):
        super().__init__(seed)
        self.delays = self.random.choice([[0], [0, 3, 30, 200]])

    def later(self, action):
        def process():
            for _ in range(self.random.choice(self.delays)):
                yield None
            action()

        self.start(process())


class _Warps:
    """Four warps, and the rooms that they share."""

    def __init__(self, seed, steps):
        self.sim, self.steps = _Slow(seed), steps
        self.waiting, self.phase = 0, 0  # of the warps' barrier
        self.holds, self.readers, self.copies, self.loaded = {}, {}, [], 0
        for w in range(4):
            self.sim.start(self.warp(w))

    def meet(self):
        mine, self.waiting = self.phase, self.waiting + 1
        if self.waiting == 4:
            self.waiting, self.phase = 0, self.phase + 1
        return lambda: self.phase > mine

    def write(self, part, quarter, version):
        if self.readers.get((part, quarter)):
            self.sim.hazards.append(f"{part} is written while it is read")
        self.holds[part, quarter] = version

    def check(self, part, quarters, version, change):
        for i in quarters:
            if self.holds.get((part, i)) != version:
                self.sim.hazards.append(f"{part} holds {self.holds.get((part, i))}, not {version}")
            self.readers[part, i] = self.readers.get((part, i), 0) + change

    def copy(self, parts):
        done = []
        self.copies.append(done)
        for part, version in parts:
            self.check(part, range(4), version, 1)

        def end():
            for part, version in parts:
                self.check(part, range(4), version, -1)
            done.append(True)

        self.sim.later(end)

    def load(self, chunk):
        parts = sorted({step[1] for step in self.steps if step[0] == "all" and step[1][0] in "qk"})
        left = list(parts)

        def end(part):
            for i in range(4):
                self.write(part, i, f"raw{chunk}")
            left.remove(part)
            self.loaded += not left

        for part in parts:
            self.sim.later(lambda part=part: end(part))

    def warp(self, w):
        for name, *step in self.steps:
            if name == "write":
                self.write(step[0], w, step[1])
            elif name in ("own", "all"):
                quarters = range(4) if name == "all" else [w]
                self.check(step[0], quarters, step[1], 1)
                yield None
                self.check(step[0], quarters, step[1], -1)
            elif name == "loaded":
                yield lambda chunk=step[0]: self.loaded > chunk
            elif name == "wait" and w == 0:
                asked = self.copies[: len(self.copies) - step[0]]
                yield lambda asked=asked: all(asked)
            elif w == 0 and name in ("copy", "load"):
                self.copy(step) if name == "copy" else self.load(*step)
            if name in ("meet", "wait"):
                yield self.meet()
            yield None


def simulate(seed, kind, without=None, more=0):
    """
    Args:
        without: leaves out the meeting of this number of each chunk.
        more: copies that each wait leaves under way, but for what it should.
    """
    steps = []
    for chunk in range(CHUNKS):
        numbers = itertools.count()
        for step in steps_of(chunk, *kind):
            if step[0] == "meet" and next(numbers) == without:
                continue
            steps.append(("wait", step[1] + more) if step[0] == "wait" else step)
    return _Warps(seed, steps).sim.run()


def meetings(kind):
    return sum(step[0] == "meet" for step in steps_of(0, *kind))


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_the_preparation(kind):
    assert {simulate(seed, kind) for seed in range(100)} == {"ok"}


@pytest.mark.parametrize("kind, number", [(kind, n) for kind in KINDS for n in range(meetings(kind))], ids=str)
def test_a_missing_meeting_is_seen(kind, number):
    assert any(simulate(seed, kind, without=number) != "ok" for seed in range(3000))


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_shorter_wait_is_seen(kind):
    assert any(simulate(seed, kind, more=1) != "ok" for seed in range(300))
