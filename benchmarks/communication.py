"""What sequence parallelism sends: a model in bytes and seconds, and the collectives of a program to hold it to.

    messages("ring", call, devices=8)              what one device sends in the forward, message by message
    messages("ring", call, devices=8, backward=True)
    seconds("ring", call, devices=8, link=400e9, rate=600e12)    (computing, exposed) of forward and backward
    executed(compiled.as_text())                   the same from HLO, loops counted as often as they run

`./run python -m benchmarks.communication` writes results/communication.csv and draws docs/communication.png from it.
"""

import collections
import csv
import dataclasses
import itertools
import math
import re

from benchmarks import record

STRATEGIES = ("ring", "allgather", "ulysses", "hybrid")


@dataclasses.dataclass(frozen=True)
class Call:
    """Self-attention of one sequence of S tokens: N query heads, K key heads of dimension H."""

    S: int
    N: int
    K: int
    H: int
    B: int = 1
    causal: bool = True
    itemsize: int = 2

    def flops(self):
        return 4 * self.B * self.N * self.H * self.S * self.S * (0.5 if self.causal else 1)


@dataclasses.dataclass(frozen=True)
class Message:
    """A collective: what a device sends in it, and whether something is computed in the meantime."""

    kind: str  # as HLO calls it
    bytes: int
    hidden: bool = False


def messages(strategy, call, devices, backward=False, path=None, heads=8):
    """The collectives of one pass, in order.

    Args:
        path: of the ring, as `jattn._layout.path` gives it for a window; None is the whole way round.
        heads: devices of the Ulysses axis of "hybrid" (at most all).
    """
    ulysses = {"ulysses": devices, "hybrid": min(heads, devices)}.get(strategy, 1)
    ring = devices // ulysses
    tokens = call.B * call.S // devices
    exchange = _exchange(call, tokens, ulysses, backward) if ulysses > 1 else []
    inner = dataclasses.replace(call, N=call.N // ulysses, K=math.lcm(call.K, ulysses) // ulysses)
    keys = 2 * tokens * ulysses * inner.K * inner.H  # elements that travel together
    if ring == 1:
        return exchange
    if strategy == "allgather":
        gather = Message("all-gather", (ring - 1) * keys * call.itemsize)
        return [gather, Message("reduce-scatter", (ring - 1) * keys * 4)] if backward else [gather]
    way = tuple(range(ring)) if path is None else path
    return exchange + _walk(way, keys * call.itemsize, keys * 4, backward)


def _walk(way, keys, sums, backward):
    shifts = [b - a for a, b in itertools.pairwise(way)]
    if not backward:
        return [Message("collective-permute", keys, hidden=True) for _ in shifts]
    found = [Message("collective-permute", keys, hidden=True)] * bool(shifts)
    for after, before in itertools.pairwise(reversed(shifts)):
        apart = [Message("collective-permute", n, hidden=True) for n in (keys, sums)]
        found += [Message("collective-permute", keys + sums, hidden=True)] if after == before else apart
    return found + [Message("collective-permute", sums, hidden=True)] * bool(shifts)


def _exchange(call, tokens, ulysses, backward):
    """All-to-alls of queries, keys, values and outputs, or of their gradients."""
    heads, wide = math.lcm(call.K, ulysses), call.K % ulysses != 0
    sizes = [call.N * call.itemsize] * 2 + [heads * (4 if backward and wide else call.itemsize)] * 2
    return [Message("all-to-all", tokens * call.H * size * (ulysses - 1) // ulysses) for size in sizes]


def seconds(strategy, call, devices, *, link, rate, latency=5e-6, passes=(False, True), **options):
    """`(computing, exposed)` seconds of a forward and a backward on each device, work in balance.

    Args:
        passes: whether each pass is a backward.
        link: bytes a second that a device sends; rate: FLOP/s that it computes; latency: seconds a message costs.

    A message of a ring hides behind the rectangle that is computed meanwhile; the others are exposed.
    """
    computing, exposed = 0.0, 0.0
    for backward in passes:
        passing = call.flops() * (2.5 if backward else 1) / devices / rate
        found = messages(strategy, call, devices, backward, **options)
        hidden = [m for m in found if m.hidden]
        each = passing / (len(hidden) + 1)
        computing += passing
        for m in found:
            exposed += max(0.0, latency + m.bytes / link - (each if m.hidden else 0))
    return computing, exposed


# The collectives of a compiled program.

_KINDS = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter")
_BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s16": 2, "u16": 2, "f32": 4, "s32": 4, "u32": 4}


def executed(hlo):
    """Counter of (kind, bytes that a device sends) over the collectives that a run of the program executes.

    Loops count as often as they run (their trip count must be known, if they hold collectives), of the branches of a
    conditional the one with most.
    """
    return _count(*_computations(hlo))


def _computations(hlo):
    """Lines of each computation by name, and the name of the entry."""
    bodies, entry, name = {}, None, None
    for line in hlo.splitlines():
        if (head := re.match(r"^(ENTRY )?%?([\w.\-]+) .*\{$", line)) and not line.startswith(" "):
            name = head[2]
            bodies[name] = []
            entry = name if head[1] else entry
        elif name is not None:
            bodies[name].append(line)
    return bodies, entry


def _count(bodies, name):
    total = collections.Counter()
    for line in bodies[name]:
        if collective := re.search(rf"= (.*?) ({'|'.join(_KINDS)})(-start)?\(", line):
            total[collective[2], _sent(collective[2], line)] += 1
        elif " while(" in line:
            inner = _count(bodies, re.search(r"body=%?([\w.\-]+)", line)[1])
            trips = re.search(r'"known_trip_count":\{"n":"(\d+)"\}', line)
            if inner and not trips:
                raise ValueError(f"a loop with collectives and no known trip count: {line.strip()[:200]}")
            for key, count in inner.items():
                total[key] += count * int(trips[1])
        elif " conditional(" in line:
            names = re.findall(r"(?:branch_computations=\{|true_computation=|false_computation=)([^}\s]*)", line)
            branches = [n.strip(" %") for n in ",".join(names).split(",") if n.strip(" %")]
            total += max((_count(bodies, n) for n in branches), key=lambda c: c.total())
        elif call := re.search(r" call\(.*to_apply=%?([\w.\-]+)", line):
            total += _count(bodies, call[1])
    return total


def _sent(kind, line):
    """Bytes that a device sends in a collective, from its result and the size of its groups."""
    shape = re.search(r"= (.*?) [\w-]+\(", line)[1]
    found = re.findall(r"(\w+)\[([\d,]*)\]", shape)
    arrays = [_BYTES[dtype] * math.prod(map(int, filter(None, dims.split(",")))) for dtype, dims in found]
    size = arrays[-1] if "-start(" in line else sum(arrays)  # an asynchronous one names its operand too
    if kind == "collective-permute":
        return size
    group = _group(line)
    if kind == "reduce-scatter":
        return size * (group - 1)
    # An all-reduce scatters the sums and then gathers them.
    return size * (group - 1) * (2 if kind == "all-reduce" else 1) // group


def _group(line):
    """How many devices take part, from replica_groups in any of its three spellings."""
    if axes := re.search(r"replica_groups=mesh\[(.*?)\] \{(.*?)\}", line):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", axes[1]))
        return math.prod(int(sizes[name]) for name in re.findall(r"'(\w+)'", axes[2]))
    groups = re.search(r"replica_groups=(?:\{\{([\d,]*)\}|\[\d+,(\d+)\])", line)
    return int(groups[2]) if groups[2] else len(groups[1].split(","))


# The table.

CALL = Call(S=1 << 20, N=64, K=8, H=128)
LINK, RATE = 50e9, 600e12  # one 400 Gb/s port a device; what a forward reaches on an H200


def rows():
    for devices in (2**n for n in range(1, 13)):
        for strategy in STRATEGIES:
            if strategy == "ulysses" and CALL.N % devices:
                continue
            both = [*messages(strategy, CALL, devices), *messages(strategy, CALL, devices, backward=True)]
            computing, exposed = seconds(strategy, CALL, devices, link=LINK, rate=RATE)
            yield dict(
                strategy=strategy, devices=devices, S=CALL.S, N=CALL.N, K=CALL.K, H=CALL.H, link=LINK, rate=RATE,
                messages=len(both), bytes=sum(m.bytes for m in both), computing=f"{computing:.6g}",
                exposed=f"{exposed:.6g}",
            )


def write(path):
    table = list(rows())
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, table[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(table)


def draw(path, target):
    """The share of a step that a device waits for messages, against the number of devices."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    table = record.load(path)
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for strategy in STRATEGIES:
        mine = [row for row in table if row["strategy"] == strategy]
        waits = [100 / (1 + float(row["computing"]) / max(float(row["exposed"]), 1e-12)) for row in mine]
        axes.plot([int(row["devices"]) for row in mine], waits, "o-", label=strategy, markersize=3)
    axes.set_xscale("log", base=2)
    axes.set(xlabel="devices", ylabel="% of a step spent waiting for messages (model)")
    axes.set_title(f"{CALL}, {LINK / 1e9:.0f} GB/s, {RATE / 1e12:.0f} TFLOP/s", fontsize="small")
    axes.legend()
    figure.savefig(target, dpi=100)


def main():
    path = record.RESULTS / "communication.csv"
    target = record.RESULTS.parents[1] / "docs" / "communication.png"
    write(path)
    draw(path, target)
    print(path, target, sep="\n")


if __name__ == "__main__":
    main()
