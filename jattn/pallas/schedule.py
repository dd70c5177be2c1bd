"""Which query tile each persistent block works on, and when.

A kernel launches one block per multiprocessor, and each works through its own list of tiles. The lists are what a
dynamic scheduler would have dealt: the tiles in a fixed order, each to the block that is free first, simulated at trace
time. No counter, no atomics, and the same order on every run. Where only the device knows how long a tile is, the
longest are dealt first.
"""

import functools
import heapq

import jax
import jax.numpy as jnp
import numpy as np

# Above this number of tiles per block the simulation gains less than it costs to trace.
MAX_SIMULATED_TILES = 1 << 16
TILE_OVERHEAD = 1.5  # prologue and epilogue of a tile, in key blocks


def section_size(pairs: int, group: int, bytes_per_kv_head: int, section_bytes: int) -> int:
    """How many of `pairs` (batch, head) pairs are worked on together: a power of two of key/value heads that fit
    `section_bytes` of L2, whole groups of query heads, and a divisor of `pairs`."""
    heads = 1
    while heads * 2 * bytes_per_kv_head <= section_bytes:
        heads *= 2
    size = min(pairs, heads * group)
    while pairs % size:
        size -= 1
    return size


def known_late(plan) -> bool:
    """Whether only the device knows how long the tiles of a kernel's plan are: bounds go with an offset that is traced.

    Dealt as if it were 0, kernels of `allgather_attention` forward and backward took 1.7 times as long on two H200.
    """
    return plan.offset is None and (plan.left is not None or plan.right is not None)


def tile_order(pairs: int, costs: np.ndarray, section: int) -> np.ndarray:
    """Work items `pair · tiles + tile`: section by section, in each the longest tiles of all its pairs first."""
    tiles = len(costs)
    longest_first = np.argsort(-costs, kind="stable")
    pair = np.arange(pairs).reshape(-1, 1, section)
    return (pair * tiles + longest_first[None, :, None]).reshape(-1).astype(np.int32)


@functools.lru_cache(maxsize=256)
def table(pairs: int, costs: tuple[float, ...], section: int, blocks: int) -> np.ndarray:
    """int32 `[rounds + 2, blocks]`: the items of each block in order, how many it has (at least 1), and a row of zeros.

    Args:
        pairs: number of (batch, head) pairs.
        costs: of each tile of a pair, in key blocks.
        section: pairs worked on together, a divisor of `pairs`.
        blocks: persistent thread blocks, at most `pairs · len(costs)`.
    """
    costs_array = np.asarray(costs, np.float64)
    return _dealt(tile_order(pairs, costs_array, section), costs_array, blocks)


def _dealt(order: np.ndarray, costs: np.ndarray, blocks: int) -> np.ndarray:
    if len(order) > MAX_SIMULATED_TILES or costs.min() == costs.max():
        rounds = -(-len(order) // blocks)
        dealt = np.full(rounds * blocks, -1, np.int32)
        dealt[: len(order)] = order
        dealt = dealt.reshape(rounds, blocks)
    else:
        dealt = _simulate(order, costs[order % len(costs)] + TILE_OVERHEAD, blocks)
    counts = (dealt >= 0).sum(0, keepdims=True).astype(np.int32)
    return np.concatenate([dealt, counts, np.zeros_like(counts)])


def deal(costs: jax.Array, copies: int, section: int, blocks: int) -> jax.Array:
    """The same table for costs that are known at run time only: the longest tiles first, dealt to and fro. (To simulate
    a scheduler would take as many sequential steps as there are tiles.)

    Args:
        costs: int32 `[groups, tiles]`; tiles of cost 0 do not exist, but a block without any other works on one.
        copies: pairs that follow each other and have the same costs; pair p is in group p // copies.
        section: pairs worked on together: each block does its tiles section by section.
        blocks: as in `table`.
    """
    tiles, count = costs.shape[1], costs.size * copies
    longest_first = jnp.argsort(-costs.reshape(-1), stable=True).astype(jnp.int32)
    rounds = -(-count // blocks)
    dealt = np.arange(rounds * blocks, dtype=np.int32).reshape(rounds, blocks)
    dealt[1::2] = dealt[1::2, ::-1]
    entry = longest_first[np.minimum(dealt, count - 1) // copies]
    pair = entry // tiles * copies + np.minimum(dealt, count - 1) % copies
    exists = dealt < jnp.sum(costs > 0, dtype=jnp.int32) * copies
    by_section = jnp.argsort(jnp.where(exists, pair // section, count), axis=0, stable=True)
    items = jnp.take_along_axis(pair * tiles + entry % tiles, by_section, 0)
    counts = jnp.maximum(jnp.sum(exists, axis=0, keepdims=True, dtype=jnp.int32), 1)
    return jnp.concatenate([items, counts, jnp.zeros_like(counts)])


@functools.lru_cache(maxsize=256)
def last_first(pairs: int, costs: tuple[float, ...], section: int, blocks: int) -> np.ndarray:
    """`table` with the last tiles of a pair first: a tile that waits for what later tiles of its pair have done waits
    for tiles dealt before it, so that one of the blocks can always go on, if all of them run at the same time."""
    order = _last_first(np, np.arange(pairs * len(costs)), len(costs), len(costs), section)
    return _dealt(order.astype(np.int32), np.asarray(costs, np.float64), blocks)


def last_first_of_existing(pairs: int, tiles: int, existing: jax.Array, section: int, blocks: int) -> jax.Array:
    """The same for a number of tiles that is known at run time only, dealt in turn.

    Args:
        existing: int32 scalar: how many of a pair's tiles there are; a block without any works on one that does not
            exist.
    """
    rounds = -(-pairs * tiles // blocks)
    number = np.arange(rounds * blocks, dtype=np.int32).reshape(rounds, blocks)
    exists = number < pairs * existing
    items = jnp.where(exists, _last_first(jnp, number, tiles, existing, section), jnp.minimum(existing, tiles - 1))
    counts = jnp.maximum(jnp.sum(exists, axis=0, keepdims=True, dtype=jnp.int32), 1)
    return jnp.concatenate([items, counts, jnp.zeros_like(counts)]).astype(jnp.int32)


def _last_first(xp, number, tiles, existing, section):
    """The work items of these places: section by section, in each the last tiles of all its pairs first."""
    size = section * existing
    pair = number // size * section + number % size % section
    return xp.asarray(pair * tiles + existing - 1 - number % size // section)


def _simulate(order: np.ndarray, costs: np.ndarray, blocks: int) -> np.ndarray:
    free = [(0.0, block) for block in range(blocks)]
    lists: list[list[int]] = [[] for _ in range(blocks)]
    for item, cost in zip(order.tolist(), costs.tolist(), strict=True):
        time, block = free[0]
        lists[block].append(item)
        heapq.heapreplace(free, (time + cost, block))
    dealt = np.full((max(map(len, lists)), blocks), -1, np.int32)
    for block, items in enumerate(lists):
        dealt[: len(items), block] = items
    return dealt
