"""Barriers, products and copies of a thread block as processes of a simulation under random interleavings."""

import random


class Simulation:
    """Cooperative processes; each `yield` is a point where any other process may run. `yield f` waits until `f()`."""

    def __init__(self, seed):
        self.random, self.processes, self.hazards = random.Random(seed), [], []

    def start(self, process):
        self.processes.append([process, None])

    def run(self):
        while self.processes:
            ready = [p for p in self.processes if p[1] is None or p[1]()]
            if not ready:
                return "deadlock"
            chosen = self.random.choice(ready)
            try:
                chosen[1] = next(chosen[0])
            except StopIteration:
                self.processes.remove(chosen)
        return "; ".join(self.hazards) or "ok"

    def later(self, action):
        """Runs `action` at some later moment (a copy or a product that completes on its own)."""

        def process():
            for _ in range(self.random.randint(0, 6)):
                yield None
            action()

        self.start(process())


class MBarrier:
    """A phase ends after `arrivals`; a waiter sees phases one by one and only ever knows the parity."""

    def __init__(self, arrivals):
        self.arrivals, self.count, self.phase, self.seen = arrivals, 0, 0, {}

    def arrive(self):
        self.count += 1
        if self.count == self.arrivals:
            self.count, self.phase = 0, self.phase + 1

    def wait(self, who):
        mine = self.seen[who] = self.seen.get(who, 0) + 1
        # A parity wait passes while an odd number of phases is between: two phases ahead would hang or pass wrongly.
        return lambda: (self.phase - mine) % 2 == 0


class NamedBarrier:
    """One phase at a time: `arrivals` arrive, one syncs."""

    def __init__(self, simulation, arrivals):
        self.simulation, self.arrivals, self.count, self.synced, self.phase = simulation, arrivals, 0, False, 0

    def _complete(self):
        if self.count > self.arrivals:
            self.simulation.hazards.append("a named barrier was arrived at twice in one phase")
        if self.count == self.arrivals and self.synced:
            self.count, self.synced, self.phase = 0, False, self.phase + 1

    def arrive(self):
        self.count += 1
        self._complete()

    def sync(self):
        phase, self.synced = self.phase, True
        self._complete()
        return lambda: self.phase > phase


class Memory:
    """Slots of shared memory: what each holds and who is reading it."""

    def __init__(self, simulation, name):
        self.simulation, self.name, self.content, self.readers = simulation, name, {}, {}

    def write(self, slot, value):
        if self.readers.get(slot):
            self.simulation.hazards.append(f"{self.name}[{slot}] overwritten under a product")
        self.content[slot] = value

    def begin(self, slot, value):
        if self.content.get(slot) != value:
            self.simulation.hazards.append(f"{self.name}[{slot}] holds {self.content.get(slot)}, not {value}")
        self.readers[slot] = self.readers.get(slot, 0) + 1

    def end(self, slot):
        self.readers[slot] -= 1
