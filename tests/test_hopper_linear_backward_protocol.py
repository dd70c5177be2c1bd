"""The meetings of the two warpgroups of `linear_backward_chunk`, as a simulation under random interleavings (see
test_hopper_protocol): nobody reads a part of shared memory before it is written or after it is written again, be it by
a warpgroup or by a copy. The walk's protocol is that of the forward.
"""

import pytest
from barriers import MBarrier, NamedBarrier, Simulation

#: What each warpgroup does to a chunk, in order: write its own half of a part as the named version, read its own half
#: or all of a version, meet the other; begin copies of the next chunk, or of results. Parts with a slot are in two.
_CHUNK = """
wait ready | wait early | all k in | all S in | own v in | write v z | all M in | wait late | own D in | own S in
write v u | meet U | next tokens | all v u | all d in | all S in | all D in | meet DONE | next columns
write sums a | all q in | all k in | write square xy | meet SQUARES
all square xy | own q in | own k in | write sums b | meet SUMS
all sums b | own q in | own k in | write q out | write k out | meet OUT | store | all sums b | own vectors in
"""
MEETINGS = ["U", "DONE", "SQUARES", "SUMS", "OUT"]
_SLOTTED, _COLUMNS = ("q", "k", "M", "vectors"), {"early": ("S", "v"), "late": ("d", "D")}


def simulate(seed, chunks=3, without=None, alone=False):
    """`without` leaves out the meeting of this name; `alone` does not wait for stores."""
    sim, holds, flights = Simulation(seed), {}, {0: [], 1: []}
    steps = [step.split() for step in _CHUNK.replace("\n", "|").split("|") if step.strip()]
    steps = [step for step in steps if step != ["meet", without]]
    ready, barriers = [MBarrier(4) for _ in range(2)], {name: MBarrier(2) for name in _COLUMNS}
    meetings = {(name, w): NamedBarrier(sim, 1) for name in MEETINGS for w in range(2)}

    def place(part, chunk):
        return f"{part}{chunk % 2}" if part in _SLOTTED else part

    def check(part, halves, version):
        for i in halves:
            if holds.get((part, i)) != version:
                sim.hazards.append(f"{part} holds {holds.get((part, i))}, not {version}")

    def fill(part, chunk, barrier):
        at = place(part, chunk)
        holds.update({(at, i): "in flight" for i in range(2)})
        sim.later(lambda: (holds.update({(at, i): ("in", chunk) for i in range(2)}), barrier.arrive()))

    def fill_tokens(w, chunk):
        for part in ("k",) if w else ("q", "M", "vectors"):
            fill(part, chunk, ready[chunk % 2])

    def fill_columns(w, chunk):
        for name, parts in _COLUMNS.items() if w == 0 else ():
            for part in parts:
                fill(part, chunk, barriers[name])

    def store(w, chunk):
        part, flight = place("k" if w else "q", chunk), [True]
        check(part, range(2), ("out", chunk))
        flights[w].append(flight)

        def leave():  # as slow as can be
            for _ in range(sim.random.randint(0, 60)):
                yield None
            check(part, range(2), ("out", chunk))
            flight[0] = False

        sim.start(leave())

    def warpgroup(w):
        fill_tokens(w, 0)
        fill_columns(w, 0)
        for chunk in range(chunks):
            for name, *step in steps:
                if name == "meet":
                    meetings[step[0], 1 - w].arrive()
                    yield meetings[step[0], w].sync()
                elif name == "wait":
                    yield (ready[chunk % 2] if step[0] == "ready" else barriers[step[0]]).wait(w)
                elif name == "write":
                    holds[place(step[0], chunk), w] = step[1], chunk
                elif name == "store":
                    store(w, chunk)
                elif name == "next" and chunk + 1 < chunks:
                    if step[0] == "tokens" and not alone:
                        yield lambda: not any(flight[0] for flight in flights[w])
                    (fill_tokens if step[0] == "tokens" else fill_columns)(w, chunk + 1)
                elif name in ("all", "own"):
                    seen = place(step[0], chunk), range(2) if name == "all" else [w], (step[1], chunk)
                    check(*seen)
                    yield None
                    check(*seen)
                yield None

    for w in range(2):
        sim.start(warpgroup(w))
    return sim.run()


def test_the_chunks():
    assert {simulate(seed) for seed in range(100)} == {"ok"}


@pytest.mark.parametrize("name", MEETINGS)
def test_a_missing_meeting_is_seen(name):
    assert {simulate(seed, without=name) for seed in range(300)} != {"ok"}


def test_a_copy_into_what_leaves_is_seen():
    assert {simulate(seed, alone=True) for seed in range(300)} != {"ok"}
