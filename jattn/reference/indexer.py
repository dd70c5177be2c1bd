"""Index scores and their selection in plain JAX: `implementation="xla"` of the ops of `indexer.py`.

    for each block of 16 rows (queries):
        for each block of 1024 keys that a row of them may see:
            scores = sum over heads of weights · max(Q Kᵀ, 0)
        the k largest of each row

Blocks start at multiples of their size and always have that size, so that a score's bits cannot depend on what is
around it.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jattn import _formats
from jattn._problem import accumulator
from jattn._varying import vary, varying_axes
from jattn.reference.sparse import Options, add_keys, fetch, over_rows, put, sorted_slots, take

ROWS, KEYS = 16, 1024  # of one tile of index scores


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Index:
    """The operands of index scores, for R rows: either array may be a pair (codes, scales)."""

    query: Any  # [R, N, H]
    weights: Any  # [R, N]
    key: Any  # [B or 1, S, H], or pages [P, page, H]
    batch: Any  # int32 [R]: which of the B a row belongs to
    low: Any  # int32 [R]: first key that is scored
    high: Any  # int32 [R]: first past it that is not
    tables: Any = None  # int32 [B, W], or None without pages

    @property
    def size(self) -> int:
        """Keys of a batch item."""
        S = _plain(self.key).shape[1]
        return S if self.tables is None else S * self.tables.shape[1]


def logits(index, out_dtype):
    """`[R, S]` of `out_dtype`, -inf outside of [low, high)."""
    R, S = index.weights.shape[0], index.size
    tiles, items = -(-S // KEYS), _plain(index.key).shape[0]
    if R == 0 or S == 0:
        return jnp.zeros((R, S), out_dtype)
    if index.tables is None and 1 < items < R:
        # One by one, so that in the backward rows of one item are summed by products: a scatter that adds would do so
        # in an order that a device chooses.
        rows = (index.query, index.weights, index.batch * 0, index.low, index.high)
        rows = jax.tree.map(lambda x: x.reshape(items, R // items, *x.shape[1:]), rows)

        def one(x):
            (query, weights, batch, low, high), key = x
            return logits(Index(query, weights, jax.tree.map(lambda k: k[None], key), batch, low, high), out_dtype)

        return lax.map(one, (rows, index.key)).reshape(R, S)

    @jax.checkpoint
    def tile(rows, t):
        return _tile(index, rows, t)

    def some_rows(i):
        rows = i * ROWS + jnp.arange(ROWS, dtype=jnp.int32)
        scores = lax.map(lambda t: tile(rows, t), jnp.arange(tiles, dtype=jnp.int32))
        scores = jnp.moveaxis(scores, 0, 1).reshape(ROWS, tiles * KEYS)[:, :S]
        return jnp.where(_inside(index, rows, S), scores, -jnp.inf).astype(out_dtype)

    return lax.map(some_rows, jnp.arange(-(-R // ROWS), dtype=jnp.int32)).reshape(-1, S)[:R]


def select(index, k, score_dtype):
    """`(indices [R, k], count [R])` of the k largest scores of each row, whose scores exist for some rows at a time."""
    R, S = index.weights.shape[0], index.size
    state = jnp.full((R, k), -1, jnp.int32), jnp.zeros((R,), jnp.int32)
    state = vary(state, varying_axes(index))
    if R == 0 or S == 0:
        return state
    tiles = -(-S // KEYS)

    def step(i, state):
        rows = i * ROWS + jnp.arange(ROWS, dtype=jnp.int32)
        low, high = jnp.clip(take(index.low, rows), 0, S), jnp.clip(take(index.high, rows), 0, S)

        def score(t, scores):
            return lax.dynamic_update_slice_in_dim(scores, _tile(index, rows, t).astype(score_dtype), t * KEYS, 1)

        scores = vary(jnp.full((ROWS, tiles * KEYS), -jnp.inf, score_dtype), varying_axes(index))
        # Tiles that no row sees are not computed.
        bounds = lax.optimization_barrier((jnp.min(low) // KEYS, -(-jnp.max(high) // KEYS)))
        scores = lax.fori_loop(*bounds, score, scores)
        return tuple(put(x, rows, new) for x, new in zip(state, top_k(scores, k, low, high), strict=True))

    return lax.fori_loop(0, -(-R // ROWS), step, state)


def top_k(scores, k, low, high):
    """`(indices [R, k], count [R])`: the k largest of `scores [R, S]` in [low, high), ascending; then -1.

    The k-th largest is found bit by bit, by counting how many are as large: integers, so exact and in no order.
    """
    S = scores.shape[-1]
    column = jnp.arange(S, dtype=jnp.int32)
    exists = (column >= low[:, None]) & (column < high[:, None])
    keys = jnp.where(exists, _ranks(scores), 0)
    word, bits = keys.dtype.type, keys.dtype.itemsize * 8

    def bit(i, threshold):
        higher = threshold | (word(1) << (word(bits - 1) - i.astype(word)))
        enough = jnp.sum(keys >= higher[:, None], axis=-1, dtype=jnp.int32) >= k
        return jnp.where(enough, higher, threshold)

    threshold = lax.fori_loop(0, bits, bit, keys[:, :1].max(axis=-1, initial=0) & word(0))[:, None]
    above, equal = keys > threshold, (keys == threshold) & (threshold > 0)
    wanted = k - jnp.sum(above, axis=-1, keepdims=True, dtype=jnp.int32)
    chosen = above | (equal & (jnp.cumsum(equal, axis=-1, dtype=jnp.int32) <= wanted))
    before = jnp.cumsum(chosen, axis=-1, dtype=jnp.int32)
    nth = jnp.arange(1, k + 1, dtype=jnp.int32)
    found = jax.vmap(lambda x: jnp.searchsorted(x, nth))(before).astype(jnp.int32)
    count = jnp.minimum(jnp.sum(exists, axis=-1, dtype=jnp.int32), k)
    return jnp.where(nth <= count[:, None], found, -1), count


def _ranks(scores):
    """Unsigned integers in the order of `scores`: zeros alike whatever their sign, NaN below -inf, all of them > 0."""
    word = {2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint64}[scores.dtype.itemsize]
    bits = lax.bitcast_convert_type(scores, word)
    sign = word(1) << word(scores.dtype.itemsize * 8 - 1)
    infinity = lax.bitcast_convert_type(jnp.array(jnp.inf, scores.dtype), word)
    size = bits & ~sign
    bits = jnp.where(size == 0, word(0), bits)
    return jnp.where(size > infinity, word(1), jnp.where(bits & sign, ~bits, bits | sign))


def _tile(index, rows, t):
    """Scores `[ROWS, KEYS]` of some rows against the t-th block of keys, in the accumulator's dtype."""
    column = jnp.minimum(t * KEYS + jnp.arange(KEYS, dtype=jnp.int32), index.size - 1)

    def cut(x):
        # Each row has keys of its own, even where all are the same: as one product, its bits would know how many are.
        if index.tables is not None:
            page = take(index.tables, take(index.batch, rows))[:, column // x.shape[1]]
            return x[jnp.clip(page, 0, x.shape[0] - 1), column % x.shape[1]]
        if x.shape[0] == 1:
            return jnp.broadcast_to(x[0, column], (ROWS, KEYS, x.shape[2]))
        return x[take(index.batch, rows)[:, None], column]

    query, key = jax.tree.map(lambda x: take(x, rows), index.query), jax.tree.map(cut, index.key)
    weights = take(index.weights, rows)
    query, key, weights = lax.optimization_barrier((query, key, weights))
    query, by_query = _operand(query)
    key, by_key = _operand(key)
    dtype = accumulator(query.dtype)
    precision = lax.Precision.HIGHEST if query.dtype == dtype else None
    products = jnp.einsum("rnh,rmh->rnm", query, key, precision=precision, preferred_element_type=dtype)
    # Not a maximum, whose gradient at 0 is one half; NaN stays.
    products = jnp.where(products <= 0, 0, products)
    weights = weights.astype(dtype) if by_query is None else weights.astype(dtype) * by_query
    scores = jnp.sum(products * weights[..., None], axis=1)
    return scores if by_key is None else scores * by_key


def _operand(x):
    """An array to multiply, and the scale of each of its rows or None."""
    if not isinstance(x, tuple):
        return x, None
    codes, scales = x
    if codes.dtype == jnp.uint8:
        return _formats.dequantize_fp4(codes, scales, jnp.bfloat16), None
    return codes.astype(jnp.bfloat16), scales[..., 0]


def _plain(x):
    return x[0] if isinstance(x, tuple) else x


def _inside(index, rows, S):
    column = jnp.arange(S, dtype=jnp.int32)
    return (column >= take(index.low, rows)[:, None]) & (column < take(index.high, rows)[:, None])


def listed_scores(size, arrays, lists):
    """`[R, L]` of `arrays = (query [R, N, H], key [P, H], weights [R, N])`; -inf in empty slots."""
    (query, _, _), L = arrays, lists.indices.shape[1]
    state = (jnp.full((query.shape[0], L), -jnp.inf, accumulator(query.dtype)),)

    def step(rows, state):
        part = _ListedScores(size, arrays, lists, rows)
        scores = jnp.sum(part.positive * part.weights[..., None], axis=1)
        return (put(state[0], rows, jnp.where(part.valid, scores, -jnp.inf)[:, :L]),)

    return over_rows(Options(1.0, 1, (size,), (1,)), arrays, (lists,), state, step)[0]


def listed_scores_backward(size, arrays, lists, dscores):
    """Gradients of `arrays`, in their dtypes."""
    query, key, weights = arrays
    dtype = accumulator(query.dtype)
    state = jnp.zeros(query.shape, dtype), jnp.zeros(key.shape, dtype), jnp.zeros(weights.shape, dtype)

    def step(rows, state):
        dquery, dkey, dweights = state
        part = _ListedScores(size, arrays, lists, rows)
        given = jnp.pad(take(dscores, rows), ((0, 0), (0, part.valid.shape[1] - dscores.shape[1])))
        given, first = jax.vmap(_at_first)(part.address, part.valid, given)
        given = given[:, None]
        dproducts = jnp.where(part.positive > 0, given * part.weights[..., None], 0).astype(query.dtype)
        dquery = put(dquery, rows, part.einsum("rnl,rlh->rnh", dproducts, part.keys))
        dkey = add_keys(dkey, part.einsum("rnl,rnh->rlh", dproducts, part.query), part.address, first)
        return dquery, dkey, put(dweights, rows, jnp.sum(given * part.positive, axis=-1))

    gradients = over_rows(Options(1.0, 1, (size,), (1,)), arrays, (lists,), state, step)
    return jax.tree.map(lambda g, x: g.astype(x.dtype), gradients, arrays)


def _at_first(address, valid, x):
    """`x [L]` summed over the slots of each address, at its first slot and 0 at the others, and which slots are first.

    A scan, because a scatter that adds would do so in an order that a device chooses.
    """
    if x.shape[0] == 0:
        return x, valid
    order, starts = sorted_slots(address, valid)

    def join(later, earlier):
        return jnp.where(earlier[1], earlier[0], earlier[0] + later[0]), earlier[1] | later[1]

    ends = jnp.concatenate([starts[1:], jnp.ones((1,), bool)])
    sums, _ = lax.associative_scan(join, (jnp.where(valid, x, 0)[order], ends), reverse=True)
    first = jnp.zeros(valid.shape, bool).at[order].set(starts, unique_indices=True) & valid
    return jnp.where(first, jnp.zeros_like(x).at[order].set(sums, unique_indices=True), 0), first


class _ListedScores:
    """Some rows against their lists: keys, and the positive part of their products with every head, `[C, N, L]`."""

    def __init__(self, size, arrays, lists, rows):
        query, key, weights = arrays
        dtype = accumulator(query.dtype)
        precision = lax.Precision.HIGHEST if query.dtype == dtype else None
        self.einsum = functools.partial(jnp.einsum, precision=precision, preferred_element_type=dtype)
        exists = rows < query.shape[0]
        keys, self.valid, self.address = fetch(key, lists, rows, exists, size, 1, query.dtype)
        self.keys, self.query, weights = lax.optimization_barrier((keys, take(query, rows), take(weights, rows)))
        self.weights = weights.astype(dtype)
        products = self.einsum("rnh,rlh->rnl", self.query, self.keys)
        self.positive = jnp.where(products <= 0, 0, products)


def kl(scores, target):
    """KL(target / sum(target) || softmax(scores)) over the last axis, where scores are not -inf."""
    dtype = accumulator(scores.dtype)
    seen, scores = scores != -jnp.inf, scores.astype(dtype)
    scores, target = jnp.where(seen, scores, 0), jnp.where(seen, target.astype(dtype), 0)
    top = lax.stop_gradient(jnp.max(jnp.where(seen, scores, -jnp.inf), axis=-1, initial=-jnp.inf, keepdims=True))
    top = jnp.where(jnp.isneginf(top), 0, top)
    total = jnp.sum(jnp.where(seen, jnp.exp(scores - top), 0), axis=-1, keepdims=True)
    logs = scores - top - jnp.log(jnp.where(total == 0, 1, total))
    mass = jnp.sum(target, axis=-1, keepdims=True)
    target = target / jnp.where(mass == 0, 1, mass)
    own = jnp.log(jnp.where(target > 0, target, 1))
    return jnp.sum(jnp.where(target > 0, target * (own - logs), 0), axis=-1)
