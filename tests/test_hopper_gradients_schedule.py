"""What steers the backward kernel, without the kernel: every visible element is visited, and deterministic sums end."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jattn import masks
from jattn._tile import Grid
from jattn.attention import prepare
from jattn.pallas import attention_gradients
from jattn.ragged import prepare as prepare_ragged

T, S = 300, 400
RNG = np.random.default_rng(0)
CU = jnp.array([3, 3, 10, 200, 201, 290], jnp.int32)
CALLS = {
    "full": {},
    "causal": dict(is_causal=True),
    "window": dict(local_window_size=(70, -3)),
    "far window": dict(local_window_size=(-310, None)),
    "lengths": dict(is_causal=True, query_offset=jnp.array([30, -200]), key_value_seq_lengths=jnp.array([0, 131])),
    "blocks": dict(mask=masks.blocks(jnp.asarray(RNG.random((2, 4, 10, 13)) < 0.2), 32), is_causal=True),
    "segments": dict(segment_ids=(jnp.sort(RNG.integers(0, 5, (2, T))), jnp.sort(RNG.integers(0, 5, (2, S))))),
    "nothing": dict(mask=masks.dense(jnp.zeros((T, S), bool))),
    "packed": dict(packed=True),
    "packed, causal": dict(packed=True, is_causal=True, key_value_seq_lengths=jnp.array([0, 7, 100, 1, 0])),
    "packed, window": dict(packed=True, local_window_size=(20, 5), query_offset="end"),
}


def steering(*, packed=False, deterministic=True, heads=(4, 2), **kwargs):
    """The plan of a call and its steering arrays, in NumPy."""
    q, k = jnp.zeros((2, T, heads[0], 64), jnp.bfloat16), jnp.zeros((2, S, heads[1], 64), jnp.bfloat16)
    if packed:
        call = prepare_ragged(q[0], k[0], k[0], CU, CU + 50, deterministic=deterministic, **kwargs)
    else:
        call = prepare(q, k, k, deterministic=deterministic, **kwargs)
    plan, _, spec = attention_gradients._plan(call.arrays, call.context, call.options)
    found, _ = attention_gradients._steering(plan, call.context, spec, 7)
    return plan, jax.tree.map(np.asarray, found), call


def tiles(plan, found):
    """thread block -> the tiles it works on in order, each (batch, key head, number)."""
    counts = found["table"][-2]
    for block, count in enumerate(counts):
        pairs, numbers = np.divmod(found["table"][:count, block], plan.tiles)
        yield [(*divmod(int(p), plan.K), int(n)) for p, n in zip(pairs, numbers, strict=True)]


def visits(plan, found, batch, head, number):
    """(block of queries, rank or None) of each step of a tile, blocks counted over all sequences."""
    if plan.listed:
        at = min(batch, found["lists"].shape[0] - 1), min(head, found["lists"].shape[1] - 1), number
        _, count, *blocks = found["lists"][at]
        return [(b, None if found["ranks"] is None else found["ranks"][at][i]) for i, b in enumerate(blocks[:count])]
    sequence, key, start, blocks = batch, number * plan.config.keys, 0, plan.query_blocks
    if plan.packed:
        sequence, key = found["packed"][number]
        start, blocks = found["sequences"][sequence, 6] // plan.config.block_q, found["sequences"][sequence, 7]
    offset, length = map(jnp.int32, found["sequences"][sequence, :2])
    begin, end = map(int, plan.block_range(jnp.int32(key), offset, length, blocks))
    last = None if found["ranks"] is None else found["ranks"][min(batch, found["ranks"].shape[0] - 1)]
    return [(start + b, None if last is None else last[start + b] - number) for b in range(begin, end)]


@pytest.mark.parametrize("name", CALLS)
def test_deterministic_sums_end(name):
    """Each thread block works on its list and waits at each step until as many additions were made to the block of dq
    as it has to let go first; all of them come to the end, and no two have the same turn."""
    plan, found, _ = steering(**CALLS[name])
    work = [[(tile, step) for tile in mine for step in visits(plan, found, *tile)] for mine in tiles(plan, found)]
    done, at = {}, [0] * len(work)
    moved = True
    while moved:
        moved = False
        for i, mine in enumerate(work):
            while at[i] < len(mine):
                (batch, head, number), (block, rank) = mine[at[i]]
                exists = not plan.packed or found["sequences"][found["packed"][number][0], 5] > 0
                if exists and done.get((batch, head, block), 0) < rank:
                    break
                assert not exists or done.get((batch, head, block), 0) == rank
                if exists:
                    done[batch, head, block] = rank + 1
                at[i], moved = at[i] + 1, True
    assert at == list(map(len, work))


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("name", CALLS)
def test_every_tile_is_worked_on_once(name, deterministic):
    plan, found, _ = steering(deterministic=deterministic, **CALLS[name])
    worked = [tile for mine in tiles(plan, found) for tile in mine]
    if plan.packed:
        exists = found["sequences"][found["packed"][:, 0], 5] > 0
        worked = [tile for tile in worked if exists[tile[2]]]
        wanted = {(b, k, n) for b in range(plan.B) for k in range(plan.K) for n in np.flatnonzero(exists)}
    else:
        wanted = {(b, k, n) for b in range(plan.B) for k in range(plan.K) for n in range(plan.tiles)}
    assert len(worked) == len(set(worked)) and set(worked) == wanted


@pytest.mark.parametrize("name", [name for name, call in CALLS.items() if not call.get("packed")])
def test_every_visible_element_is_visited(name):
    plan, found, call = steering(heads=(4, 2), **CALLS[name])
    if call.context.mask is None:
        visible = np.ones((2, 4, T, S), bool)
    else:
        offset = call.context.query_offset
        offset = call.options.query_offset if offset is None else offset.reshape(-1, 1, 1, 1)
        visible = np.broadcast_to(call.context.mask.possible(Grid(T, S, 1, 1, offset))[0], (2, 4, T, S))
    bq, bk = plan.config.block_q, plan.config.keys
    for batch in range(2):
        for head in range(4):
            for number in range(plan.tiles):
                seen = {b for b, _ in visits(plan, found, batch, head // 2, number)}
                rows = visible[batch, head, :, number * bk : (number + 1) * bk].any(axis=1)
                assert set(np.flatnonzero(rows) // bq) <= seen


def test_the_plan_is_hashable():
    plan, _, _ = steering()
    assert hash(plan) == hash(dataclasses.replace(plan))
