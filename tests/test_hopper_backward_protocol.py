"""The backward kernel's barrier protocol, as test_hopper_protocol.py has the forward's: both kinds of consumers, and
several thread blocks that add to the same parts of dq in a fixed order."""

import itertools
import random

import pytest
from barriers import MBarrier, Memory, NamedBarrier, Simulation

WARPGROUPS, STAGES, DS_SLOTS = 2, 2, 3


class Sums:
    """Parts of dq in HBM: who adds, in which order, and what has been counted."""

    def __init__(self, sim):
        self.sim, self.counted, self.adders, self.in_flight = sim, {}, {}, set()

    def add(self, entry, adder):
        if entry in self.in_flight:
            self.sim.hazards.append(f"two additions to {entry} at once")
        self.adders.setdefault(entry, []).append(adder)
        self.in_flight.add(entry)
        self.sim.later(lambda: self.in_flight.discard(entry))

    def turn(self, entry, rank):
        return lambda: self.counted.get(entry, 0) >= rank

    def announce(self, entry):
        """For `yield from`: waits until the addition has ended, and counts it."""
        if entry is not None:
            yield lambda: entry not in self.in_flight
            self.counted[entry] = self.counted.get(entry, 0) + 1


class Block:
    """One thread block: its memory, its barriers, its producer."""

    def __init__(self, sim, tiles, dout_stages):
        self.sim, self.tiles, self.dout_stages = sim, tiles, dout_stages
        self.q, self.dout, self.k, self.v = (Memory(sim, name) for name in ("q", "dout", "k", "v"))
        self.k_ready, self.v_ready, self.tile_free = MBarrier(1), MBarrier(1), MBarrier(WARPGROUPS)
        self.q_ready, self.q_free = ([make() for _ in range(STAGES)] for make in (self._ready, self._free))
        self.dout_ready, self.dout_free = ([make() for _ in range(dout_stages)] for make in (self._ready, self._free))

    def _ready(self):
        return MBarrier(1)

    def _free(self):
        return NamedBarrier(self.sim, WARPGROUPS)

    def _copy(self, memory, slot, value, ready):
        if memory.readers.get(slot):
            self.sim.hazards.append(f"copy into {memory.name}[{slot}] under a product")

        def land():
            memory.write(slot, value)
            ready.arrive()

        self.sim.later(land)

    def _load(self, memory, free, ready, position):
        slot = position % len(free)
        if position >= len(free):
            yield free[slot].sync()
        self._copy(memory, slot, position, ready[slot])
        yield None

    def producer(self):
        position = 0
        for r, (_, visits) in enumerate(self.tiles):
            yield from self._load(self.q, self.q_free, self.q_ready, position)
            if r:
                yield self.tile_free.wait("producer")
            self._copy(self.k, 0, r, self.k_ready)
            self._copy(self.v, 0, r, self.v_ready)
            yield from self._load(self.dout, self.dout_free, self.dout_ready, position)
            for t in range(1, len(visits)):
                yield from self._load(self.q, self.q_free, self.q_ready, position + t)
                yield from self._load(self.dout, self.dout_free, self.dout_ready, position + t)
            position += len(visits)
        for free in (self.q_free, self.dout_free):
            for i in range(min(len(free), position)):
                yield free[(position + i) % len(free) if position >= len(free) else i].sync()
        yield self.tile_free.wait("producer")


class Consumer:
    """The products in flight of one warpgroup."""

    def __init__(self, block, w):
        self.block, self.w, self.flight = block, w, []

    def issue(self, *operands):
        for memory, slot, value in operands:
            memory.begin(slot, memory.content.get(slot) if value is None else value)
        self.flight.append(operands)

    def wait(self, pending):
        while len(self.flight) > pending:
            for memory, slot, _ in self.flight.pop(0):
                memory.end(slot)

    def pause(self):
        for _ in range(self.block.sim.random.randint(0, 3)):
            yield None


def narrow(block, sums, deterministic, early):
    sim = block.sim
    ds = Memory(sim, "ds")
    turn = [NamedBarrier(sim, 1) for _ in range(WARPGROUPS)]
    exchange = [NamedBarrier(sim, 1) for _ in range(2 * WARPGROUPS)]

    def consumer(w):
        mine = Consumer(block, w)

        def ds_of(step):
            return [(ds, (step % DS_SLOTS, part), step) for part in range(WARPGROUPS)]

        def add(tile, visit):
            sums.add((visit[0], w), tile)
            return (visit[0], w)

        if w == WARPGROUPS - 1:
            turn[0].arrive()
        position = 0
        for r, (tile, visits) in enumerate(block.tiles):
            yield block.k_ready.wait(w)
            yield block.v_ready.wait(w)
            added = None
            for t in range(len(visits)):
                now = position + t
                slot, parity = now % STAGES, now % 2
                yield block.q_ready[slot].wait(w)
                yield turn[w].sync()
                mine.issue((block.k, 0, r), (block.q, slot, now))
                yield block.dout_ready[slot].wait(w)
                mine.issue((block.v, 0, r), (block.dout, slot, now))
                turn[1 - w].arrive()
                yield from mine.pause()
                mine.wait(0)
                if t:
                    yield exchange[2 * (1 - parity) + w].sync()
                ds.write((now % DS_SLOTS, w), now)
                exchange[2 * parity + 1 - w].arrive()
                yield None
                if deterministic and t:
                    yield sums.turn((visits[t - 1][0], w), visits[t - 1][1])
                yield turn[w].sync()
                mine.issue((block.dout, slot, now))
                yield None
                stale = [(ds, ((now + 2) % DS_SLOTS, part), None) for part in range(WARPGROUPS)]
                mine.issue(*(ds_of(now - 1) if t else stale), (block.k, 0, r))
                if early == "q":
                    block.q_free[slot].arrive()
                mine.issue((block.q, slot, now))
                turn[1 - w].arrive()
                if deterministic:
                    yield from sums.announce(added)
                yield from mine.pause()
                mine.wait(1)
                block.dout_free[slot].arrive()
                added = add(tile, visits[t - 1]) if t else None
                yield None
                mine.wait(0)
                if early != "q":
                    block.q_free[slot].arrive()
            last = position + len(visits) - 1
            yield exchange[2 * (last % 2) + w].sync()
            mine.issue(*ds_of(last), (block.k, 0, r))
            yield None
            mine.wait(0)
            block.tile_free.arrive()
            if deterministic:
                yield from sums.announce(added)
                yield sums.turn((visits[-1][0], w), visits[-1][1])
            added = add(tile, visits[-1])
            yield None
            if deterministic:
                yield from sums.announce(added)
            position += len(visits)
        if w == 0:
            yield turn[0].sync()

    return consumer


def wide(block, sums, deterministic, early):
    sim = block.sim
    p, ds = Memory(sim, "p"), Memory(sim, "ds")
    exchange, done = ([NamedBarrier(sim, 1) for _ in range(WARPGROUPS)] for _ in range(2))

    def consumer(w):
        mine = Consumer(block, w)
        done[1 - w].arrive()
        position = 0
        for r, (tile, visits) in enumerate(block.tiles):
            yield block.k_ready.wait(w)
            yield block.v_ready.wait(w)
            yield block.q_ready[position % STAGES].wait(w)
            mine.issue((block.k, 0, r), (block.q, position % STAGES, position))
            yield block.dout_ready[0].wait(w)
            mine.issue((block.v, 0, r), (block.dout, 0, position))
            yield None
            mine.wait(0)
            added = None
            for t, (part, rank) in enumerate(visits):
                now, last = position + t, t == len(visits) - 1
                slot, following = now % STAGES, (now + 1) % STAGES
                yield from mine.pause()
                if deterministic:
                    yield sums.turn((part, w), rank)
                if early != "exchange":
                    yield done[w].sync()
                for memory in (p, ds):
                    memory.write(w, now)
                exchange[1 - w].arrive()
                yield exchange[w].sync()
                mine.issue((p, 0, now), (p, 1, now), (block.dout, 0, now))
                mine.issue((ds, 0, now), (ds, 1, now), (block.k, 0, r))
                mine.issue((ds, 0, now), (ds, 1, now), (block.q, slot, now))
                if deterministic:
                    yield from sums.announce(added)
                if early == "dout":
                    block.dout_free[0].arrive()
                yield from mine.pause()
                mine.wait(2)
                if early != "dout":
                    block.dout_free[0].arrive()
                yield from mine.pause()
                mine.wait(1)
                added = (part, w)
                sums.add(added, tile)
                if not last:
                    yield block.q_ready[following].wait(w)
                    mine.issue((block.k, 0, r), (block.q, following, now + 1))
                yield None
                mine.wait(0 if last else 1)
                block.q_free[slot].arrive()
                if early != "exchange":
                    done[1 - w].arrive()
                if not last:
                    yield block.dout_ready[0].wait(w)
                    mine.issue((block.v, 0, r), (block.dout, 0, now + 1))
                    yield from mine.pause()
                    mine.wait(0)
            block.tile_free.arrive()
            yield None
            if deterministic:
                yield from sums.announce(added)
            position += len(visits)
        if early != "exchange":
            yield done[w].sync()

    return consumer


def simulate(kind, work, seed, *, deterministic=False, early=None):
    """Runs thread blocks whose work is lists of `(tile, [(part of dq, rank)])`: the result, and who added where."""
    sim = Simulation(seed)
    sums = Sums(sim) if deterministic else UnorderedSums(sim)
    for tiles in work:
        block = Block(sim, tiles, 1 if kind is wide else STAGES)
        sim.start(block.producer())
        consumer = kind(block, sums, deterministic, early)
        for w in range(WARPGROUPS):
            sim.start(consumer(w))
    return sim.run(), sums.adders


class UnorderedSums(Sums):
    def add(self, entry, adder):
        self.adders.setdefault(entry, []).append(adder)


def triangle(tiles, blocks):
    """Work of causal attention with as many blocks of queries as tiles of keys, last tiles first, dealt in turn."""
    order = [(j, [(i, i - j) for i in range(j, tiles)]) for j in reversed(range(tiles))]
    return [order[b::blocks] for b in range(blocks)]


KINDS = pytest.mark.parametrize("kind", [narrow, wide], ids=lambda kind: kind.__name__)


@KINDS
@pytest.mark.parametrize("deterministic", [False, True])
def test_no_hazard_and_no_deadlock(kind, deterministic):
    for seed, blocks in itertools.product(range(60), (1, 2, 3)):
        tiles = random.Random(seed).randint(blocks, 6)
        found, adders = simulate(kind, triangle(tiles, blocks), seed, deterministic=deterministic)
        assert found == "ok", (seed, blocks, tiles)
        for (part, _), who in adders.items():
            assert sorted(who) == list(range(part + 1))
            assert not deterministic or who == sorted(who, reverse=True)


@pytest.mark.parametrize("kind, early", [(narrow, "q"), (wide, "dout"), (wide, "exchange")])
def test_the_simulation_sees_what_is_released_too_early(kind, early):
    found = {simulate(kind, triangle(5, 1), seed, early=early)[0] for seed in range(200)}
    assert any("product" in result for result in found), found


@KINDS
def test_the_simulation_sees_tiles_in_the_wrong_order(kind):
    """First tiles first: the one that the other waits for is never begun."""
    work = [tiles[::-1] for tiles in triangle(4, 1)]
    assert simulate(kind, work, 0, deterministic=True)[0] == "deadlock"
