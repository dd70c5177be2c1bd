"""The forward kernel's barrier protocol as a small simulation under random interleavings.

Interpret mode runs the real kernel, but its products end as soon as they are issued. Here a copy lands and a product
ends at any moment between its issue and its wait, so a slot that is refilled too early is seen, and so is a deadlock.
"""

import random

import pytest
from barriers import MBarrier, Memory, NamedBarrier, Simulation


def simulate(blocks_of_tiles, seed, *, warpgroups, stages, cross_tile, own_out, edge_turns, early_release=False):
    """Runs one thread block over tiles with the given numbers of key blocks."""
    sim = Simulation(seed)
    buffers = 2 if cross_tile else 1
    q, k, v = (Memory(sim, name) for name in "qkv")
    q_ready = [[MBarrier(1) for _ in range(warpgroups)] for _ in range(buffers)]
    q_free = [[MBarrier(1) for _ in range(warpgroups)] for _ in range(buffers)]
    k_ready, v_ready = ([MBarrier(1) for _ in range(stages)] for _ in range(2))
    k_free, v_free = ([NamedBarrier(sim, warpgroups) for _ in range(stages)] for _ in range(2))
    turn = [NamedBarrier(sim, 1) for _ in range(warpgroups)]

    def copy(memory, slot, value, ready):
        def land():
            memory.write(slot, value)
            ready.arrive()

        if memory.readers.get(slot):
            sim.hazards.append(f"copy into {memory.name}[{slot}] under a product")
        sim.later(land)

    def producer():
        def load(memory, free, ready, position):
            slot = position % stages
            if position >= stages:
                yield free[slot].sync()
            copy(memory, slot, position, ready[slot])
            yield None

        def load_q(r):
            for w in range(warpgroups):
                if r >= buffers:
                    yield q_free[r % buffers][w].wait("producer")
                copy(q, (r % buffers, w), r, q_ready[r % buffers][w])

        position = 0
        for r, n in enumerate(blocks_of_tiles):
            if cross_tile:
                yield from load_q(r)
            yield from load(k, k_free, k_ready, position)
            if r:
                yield from load(v, v_free, v_ready, position - 1)
            if not cross_tile:
                yield from load_q(r)
            for i in range(1, n):
                yield from load(k, k_free, k_ready, position + i)
                yield from load(v, v_free, v_ready, position + i - 1)
            position += n
        yield from load(v, v_free, v_ready, position - 1)
        for i in range(min(stages, position)):
            slot = (position - 1 - i) % stages
            yield k_free[slot].sync()
            yield v_free[slot].sync()

    def consumer(w):
        flight = []

        def issue(*operands):
            for memory, slot, value in operands:
                memory.begin(slot, value)
            flight.append(operands)

        def wait(pending):
            while len(flight) > pending:
                for memory, slot, _ in flight.pop(0):
                    memory.end(slot)

        def take():
            return turn[w].sync()

        def give():
            turn[(w + 1) % warpgroups].arrive()

        def qk(r, position):
            issue((q, (r % buffers, w), r), (k, position % stages, position))

        def pv(position):
            issue((v, position % stages, position))

        def first(r, position):
            yield k_ready[position % stages].wait(w)
            if edge_turns:
                yield take()
            qk(r, position)
            yield None
            if edge_turns:
                give()
            yield None
            wait(0)
            k_free[position % stages].arrive()

        if w == warpgroups - 1:
            turn[0].arrive()
        position = 0
        if cross_tile:
            yield q_ready[0][w].wait(w)
            yield from first(0, 0)
        for r, n in enumerate(blocks_of_tiles):
            b = r % buffers
            if not cross_tile:
                yield q_ready[0][w].wait(w)
                yield from first(r, position)
            for i in range(1, n):
                now, before = position + i, position + i - 1
                yield k_ready[now % stages].wait(w)
                yield take()
                qk(r, now)
                if early_release:
                    k_free[now % stages].arrive()
                yield v_ready[before % stages].wait(w)
                pv(before)
                give()
                yield None
                wait(1)
                if not early_release:
                    k_free[now % stages].arrive()
                for _ in range(sim.random.randint(0, 4)):
                    yield None
                wait(0)
                v_free[before % stages].arrive()
                yield None
            last, following = position + n - 1, position + n
            more = r + 1 < len(blocks_of_tiles)
            if cross_tile:
                q_free[b][w].arrive()
                if more:
                    yield q_ready[1 - b][w].wait(w)
                    yield k_ready[following % stages].wait(w)
            elif own_out:
                q_free[0][w].arrive()
            yield v_ready[last % stages].wait(w) if not cross_tile else None
            if edge_turns:
                yield take()
            if cross_tile and more:
                qk(r + 1, following)
            if cross_tile:
                yield v_ready[last % stages].wait(w)
            pv(last)
            if edge_turns:
                give()
            yield None
            wait(0)
            if cross_tile and more:
                k_free[following % stages].arrive()
            v_free[last % stages].arrive()
            yield None
            if not cross_tile and not own_out:
                q.write((0, w), "out")
                yield None
                q_free[0][w].arrive()
            position += n
        if w == 0:
            yield turn[0].sync()

    sim.start(producer())
    for w in range(warpgroups):
        sim.start(consumer(w))
    return sim.run()


MODES = [
    dict(warpgroups=w, stages=s, cross_tile=cross, own_out=own, edge_turns=edge)
    for w in (1, 2, 3) for s in (2, 4) for edge in (True, False)
    for cross, own in ((True, True), (False, True), (False, False))
]  # fmt: skip


@pytest.mark.parametrize("mode", MODES, ids=lambda m: "-".join(f"{k}{int(v)}" for k, v in m.items()))
def test_no_hazard_and_no_deadlock(mode):
    for seed in range(60):
        tiles = [random.Random(seed + i).randint(1, 5) for i in range(1 + seed % 5)]
        assert simulate(tiles, seed, **mode) == "ok", (seed, tiles)


def test_the_simulation_sees_a_slot_released_too_early():
    mode = dict(warpgroups=2, stages=2, cross_tile=True, own_out=True, edge_turns=True)
    found = {simulate([5, 4, 3], seed, **mode, early_release=True) for seed in range(200)}
    assert any("product" in result for result in found)
