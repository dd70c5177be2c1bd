"""Attention over lists of keys in plain JAX: `implementation="xla"` of `sparse_attention`.

    for each block of rows (queries):                       as many as a fixed amount of memory holds
        K = the rows of kv that their lists name; 0 where a slot is empty
        P = softmax(scale Q Kᵀ) over each row's list, O = P K[:, :D]

The backward walks the same blocks, recomputes P, and adds to dkv row after row: within a row the slots that name one
key are summed first, so that every address is written once at a time, in an order that no device chooses. Blocks have
the same shape whatever the number of rows, and lists are filled up to multiples of 64 slots: a row's bits cannot
depend on the rows around it.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jattn import _formats
from jattn._problem import accumulator
from jattn._varying import vary, varying_axes

SLOTS = 64  # lists are filled up to a multiple of this
_ELEMENTS = 2**24  # of gathered keys at once


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Lists:
    """The lists of one kv array, for R rows."""

    indices: Any  # int32 [R, L]
    first: Any  # int32 [R]: address of key 0 of the row's batch item
    lengths: Any = None  # int32 [R]: slots that count, or None
    low: Any = None  # int32 [R]: first key that may be seen, or None
    high: Any = None  # int32 [R]: first that may not, or None


@dataclasses.dataclass(frozen=True)
class Options:
    """What is compiled in."""

    scale: float
    value_dim: int
    sizes: tuple[int, ...]  # keys of one batch item, for each kv array
    blocks: tuple[int, ...]  # consecutive keys that one index names


def forward(options, arrays, lists):
    """`(out [R, N, D], lse [R, N])` of `arrays = (query [R, N, H], kvs, sinks)`, in the accumulator's dtype."""
    query, _, _ = arrays
    R, N, _ = query.shape
    dtype = accumulator(query.dtype)
    state = jnp.zeros((R, N, options.value_dim), dtype), jnp.full((R, N), -jnp.inf, dtype)

    def step(rows, state):
        part = _Part(options, arrays, lists, rows)
        values = part.weights_times_values() * _reciprocal(part.total)[..., None]
        return tuple(put(x, rows, new) for x, new in zip(state, (values, part.lse), strict=True))

    return over_rows(options, arrays, lists, state, step)


def backward(options, arrays, lists, dout, dlse):
    """Gradients of `arrays` from the cotangents of out and lse, in the dtypes of `arrays`; None for stored rows."""
    query, kvs, sinks = arrays
    dtype = accumulator(query.dtype)
    state = (
        jnp.zeros(query.shape, query.dtype),
        tuple(None if kv.dtype == jnp.uint8 else jnp.zeros(kv.shape, dtype) for kv in kvs),
        None if sinks is None else jnp.zeros(sinks.shape, dtype),
    )

    def step(rows, state):
        dquery, dkvs, dsinks = state
        part = _Part(options, arrays, lists, rows)
        dq, dkeys, dsink = part.gradients(take(dout, rows), take(dlse, rows))
        dkvs = tuple(None if d is None else _add_slots(d, *x) for d, x in zip(dkvs, part.split(dkeys), strict=True))
        return put(dquery, rows, dq), dkvs, None if dsinks is None else dsinks + dsink

    gradients = over_rows(options, arrays, lists, state, step)
    return jax.tree.map(lambda g, x: g.astype(x.dtype), gradients, (query, _differentiable(kvs), sinks))


def weights(options, arrays, lists, lse):
    """The weights of every slot, summed over heads: `[R, L]`, the lists of all kv arrays one after another."""
    (query, _, _), R = arrays, arrays[0].shape[0]
    lengths = [x.indices.shape[1] * block for x, block in zip(lists, options.blocks, strict=True)]
    state = (jnp.zeros((R, sum(lengths)), accumulator(query.dtype)),)

    def step(rows, state):
        part = _Part(options, arrays, lists, rows)
        seen = take(lse, rows)
        safe = jnp.where(jnp.isfinite(seen), seen, 0)[..., None]
        p = jnp.where(part.valid[:, None] & jnp.isfinite(seen)[..., None], jnp.exp(part.scores - safe), 0)
        total = jnp.sum(p, axis=1)
        pieces = [x[0] for x in part.split(total)]
        return (put(state[0], rows, jnp.concatenate([x[:, :n] for x, n in zip(pieces, lengths, strict=True)], 1)),)

    return over_rows(options, arrays, lists, state, step)[0]


class _Part:
    """Some rows against their lists: keys, scores and softmax, `[C, N, L]` in the accumulator's dtype."""

    def __init__(self, options, arrays, lists, rows):
        query, kvs, sinks = arrays
        self.options, self.dtype = options, accumulator(query.dtype)
        # float32 must not be multiplied as TF32 or bfloat16; narrower inputs keep the device's fast product.
        precision = lax.Precision.HIGHEST if query.dtype == self.dtype else None
        self._einsum = functools.partial(jnp.einsum, precision=precision, preferred_element_type=self.dtype)
        exists = rows < query.shape[0]
        found = [
            fetch(kv, x, rows, exists, size, block, query.dtype)
            for kv, x, size, block in zip(kvs, lists, options.sizes, options.blocks, strict=True)
        ]
        keys, valid, self.addresses = zip(*found, strict=True)
        self.counts = [x.shape[1] for x in valid]
        keys, valid, query = jnp.concatenate(keys, axis=1), jnp.concatenate(valid, axis=1), take(query, rows)
        # A fetch depends on the shapes of the caller's arrays; what follows must compile to the same code for all.
        self.keys, self.valid, self.query = lax.optimization_barrier((keys, valid, query))
        scores = self._einsum("rnh,rlh->rnl", self.query, self.keys) * np.asarray(options.scale, self.dtype)
        self.scores = jnp.where(self.valid[:, None, :], scores, -jnp.inf)
        sink = jnp.full(self.scores.shape[1:2], -jnp.inf, self.dtype) if sinks is None else sinks.astype(self.dtype)
        # +inf takes all the weight without being subtracted from itself.
        top = jnp.maximum(jnp.max(self.scores, axis=-1, initial=-jnp.inf), jnp.where(jnp.isposinf(sink), 0, sink))
        top = jnp.where(jnp.isneginf(top), 0, top)
        self.unnormalised, self.sink = jnp.exp(self.scores - top[..., None]), jnp.exp(sink - top)
        self.total = jnp.sum(self.unnormalised, axis=-1) + self.sink
        lse = jnp.where(jnp.isposinf(self.total), jnp.inf, top + jnp.log(self.total))
        self.lse = jnp.where(exists[:, None], lse, -jnp.inf)

    @property
    def values(self):
        return self.keys[..., : self.options.value_dim]

    def weights_times_values(self):
        return self._einsum("rnl,rld->rnd", self.unnormalised.astype(self.keys.dtype), self.values)

    def gradients(self, dout, dlse):
        """dquery `[C, N, H]`, dkeys `[C, L, H]` and dsink `[N]`."""
        narrow = self.keys.dtype
        weight = self.unnormalised * _reciprocal(self.total)[..., None]
        dweight = self._einsum("rnd,rld->rnl", dout.astype(narrow), self.values)
        common = dlse.astype(self.dtype) - jnp.sum(weight * dweight, axis=-1)
        dscores = (weight * (dweight + common[..., None]) * np.asarray(self.options.scale, self.dtype)).astype(narrow)
        dquery = self._einsum("rnl,rlh->rnh", dscores, self.keys)
        dkeys = self._einsum("rnl,rnh->rlh", dscores, self.query)
        dvalues = self._einsum("rnl,rnd->rld", weight.astype(narrow), dout.astype(narrow))
        dkeys = dkeys.at[..., : self.options.value_dim].add(dvalues)
        share = jnp.where(jnp.isposinf(self.total), 1, self.sink * _reciprocal(self.total))
        return dquery, dkeys, jnp.sum(jnp.where(jnp.isneginf(self.lse), 0, share * common), axis=0)

    def split(self, x):
        """`x [C, L, ..]` by the kv arrays that its slots belong to, each with their addresses and which are valid."""
        ends = list(np.cumsum(self.counts))[:-1]
        return list(zip(jnp.split(x, ends, 1), self.addresses, jnp.split(self.valid, ends, 1), strict=True))


def fetch(kv, lists, rows, exists, size, block, dtype):
    """Keys `[C, L, H]`, which are valid `[C, L]`, and their addresses in kv; L is a multiple of `SLOTS`."""
    index, slots = take(lists.indices, rows), lists.indices.shape[1]
    valid = exists[:, None] & (index >= 0) & (index < -(-size // block))
    if lists.lengths is not None:
        valid &= jnp.arange(slots, dtype=jnp.int32) < take(lists.lengths, rows)[:, None]
    index = jnp.where(valid, index, 0)
    if block > 1:
        index = (index[..., None] * block + jnp.arange(block, dtype=jnp.int32)).reshape(-1, slots * block)
        valid = jnp.repeat(valid, block, axis=1) & (index < size)
    if lists.low is not None:
        valid &= index >= take(lists.low, rows)[:, None]
    if lists.high is not None:
        valid &= index < take(lists.high, rows)[:, None]
    fill = ((0, 0), (0, -(slots * block) % SLOTS))
    index, valid = jnp.pad(index, fill), jnp.pad(valid, fill)
    address = jnp.where(valid, take(lists.first, rows)[:, None] + index, 0)
    if kv.shape[0] == 0:
        keys = jnp.zeros((*index.shape, kv.shape[1]), kv.dtype)
    else:
        keys = kv.at[address].get(mode="promise_in_bounds")
    keys = jnp.where(valid[..., None], keys, jnp.zeros((), keys.dtype))
    return _formats.unpack_latent(keys, dtype) if kv.dtype == jnp.uint8 else keys, valid, address


def _add_slots(total, new, address, valid):
    """Adds the gradients of slots to those of keys. Slots of one key have one weight, and so one gradient."""
    times = jax.vmap(multiplicity)(address, valid)
    return add_keys(total, new * times[..., None].astype(new.dtype), address, times > 0)


def add_keys(total, new, address, write):
    """`total [P, H]` plus `new [C, L, H]` at `address` where `write`, one row of the block after another.

    No address may be written twice in a row.
    """
    # Addresses that are not written must differ too, because the scatter is told that all do.
    address = jnp.where(write, address, total.shape[0] + jnp.arange(address.shape[1], dtype=jnp.int32))

    def add(c, total):
        return total.at[address[c]].add(new[c], mode="drop", unique_indices=True)

    return lax.fori_loop(0, address.shape[0], add, total)


def sorted_slots(address, valid):
    """Slots `[L]` in the order of their addresses, empty ones first, and which of them start a new address."""
    order = jnp.argsort(jnp.where(valid, address, -1), stable=True).astype(jnp.int32)
    found = address[order]
    starts = jnp.concatenate([jnp.ones((1,), bool), found[1:] != found[:-1]])
    return order, starts | (valid[order] & ~jnp.roll(valid[order], 1))


def multiplicity(address, valid):
    """How often the address of each slot occurs, at its first occurrence; 0 at the others and in empty slots. `[L]`."""
    L = address.shape[0]
    if L == 0:
        return jnp.zeros((0,), jnp.int32)
    order, starts = sorted_slots(address, valid)
    place = jnp.arange(L, dtype=jnp.int32)
    later = jnp.concatenate([jnp.where(starts, place, L)[1:], jnp.full((1,), L, jnp.int32)])
    following = lax.cummin(later, reverse=True)  # where the next address starts
    times = jnp.where(starts, following - place, 0)
    return jnp.where(valid, jnp.zeros((L,), jnp.int32).at[order].set(times, unique_indices=True), 0)


def over_rows(options, arrays, lists, state, step):
    """`step(rows, state)` over blocks of rows; rows past the last do not exist."""
    query, kvs, _ = arrays
    R = query.shape[0]
    state = vary(state, varying_axes((arrays, lists)))
    if R == 0:
        return state
    slots = sum(-(-x.indices.shape[1] * b // SLOTS) * SLOTS for x, b in zip(lists, options.blocks, strict=True))
    C = rows_at_once(slots * query.shape[-1])
    return lax.fori_loop(0, -(-R // C), lambda i, state: step(i * C + jnp.arange(C, dtype=jnp.int32), state), state)


def rows_at_once(elements: int) -> int:
    """A power of two from 1 to 16 whose rows of `elements` gathered elements each take a bounded amount of memory."""
    return 1 << min(4, max(_ELEMENTS // max(elements, 1), 1).bit_length() - 1)


def _reciprocal(total):
    """1 / total, and 0 where nothing was seen."""
    return jnp.where(total > 0, 1 / jnp.where(total > 0, total, 1), 0)


def take(x, rows):
    return jnp.take(x, rows, axis=0, mode="clip")


def put(x, rows, new):
    return x.at[rows].set(new.astype(x.dtype), mode="drop", unique_indices=True)


def _differentiable(kvs):
    return tuple(None if kv.dtype == jnp.uint8 else kv for kv in kvs)
