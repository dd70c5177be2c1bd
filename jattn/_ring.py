"""Attention of one device's queries over keys that lie on many: the rectangles it is made of, and how keys travel.

    a device holds one or two evenly spaced runs of tokens (its pieces, see `_layout`)
    forward:   for each device whose keys are due:        (their keys arrive while those before are at work)
                   for each of my query pieces x its key pieces that can hold something visible:
                       (out, lse) = merge((out, lse), attention(rectangle))            float32
    backward:  the same rectangles in reverse order, each with the final out and lse; the keys walk back home,
               and the sums of their gradients follow one step behind, in float32

A rectangle is an ordinary call of an implementation of `attention`: `Context.origin` says which tokens it is about, so
that every mask, modifier and dropout means the undivided sequence.

Source: Liu, Zaharia, Abbeel, "Ring Attention with Blockwise Transformers" (arXiv:2310.01889).
"""

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jattn._collectives import all_gather, pass_on, reduce_scatter
from jattn._layout import SequenceLayout
from jattn._mask import And, Mask, parts
from jattn._mask_rules import Causal, Dense, Predicate, Segments
from jattn._problem import Options, accumulator
from jattn._tile import Grid
from jattn._varying import vary, varying_axes
from jattn.attention import _backward as backward_of
from jattn.attention import _forward as forward_of
from jattn.partials import merge


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is compiled in."""

    layout: SequenceLayout  # over the devices of `axis`
    axis: str | None  # mesh axis that the keys are spread over; None when they are all here
    path: tuple[int, ...]  # distances of the devices whose keys come by, see `_layout.path`
    gather: bool  # all keys at once, instead of one device's after the other's
    options: Options  # of every rectangle


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Keys:
    """The keys of one device, or all of them."""

    key: Any  # [B, S, K, H]
    value: Any  # [B, S, K, D]
    ids: tuple = ()  # of each segment mask, [B or 1, 1, 1, S]


@functools.partial(jax.jit, static_argnums=0)
@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def attend(plan: Plan, arrays, context):
    """`(out [B, T, N, D], lse [B, T, N])` of this device's queries.

    `arrays` and `context` are those of `_problem`, with this device's queries and keys in layout order. bias, aux and
    the arrays of masks have this device's rows and all columns, these in natural order; tables (aux) and key ids are
    not spread out yet. key and value may come in the accumulator's dtype, holding values of the query's: their
    gradients then are not rounded.
    """
    return _attend_forward(plan, arrays, context)[0]


def _attend_forward(plan, arrays, context):
    dtype, wide = arrays.query.dtype, jnp.zeros((), arrays.key.dtype)
    keys = Keys(arrays.key.astype(dtype), arrays.value.astype(dtype), tuple(_key_ids(context.mask)))
    arrays = dataclasses.replace(arrays, key=None, value=None)
    with jax.named_scope("jattn.sequence"):
        out, lse, keys = Shard(plan, arrays, context, keys).forward(keys)
    if not arrays.aux and all(x is None for x in (arrays.scale, arrays.bias, arrays.sinks)):
        out = out.astype(dtype)  # else those gradients want it as it was before rounding, as in `attention`
    # Keys and values are kept as they lie after the last step, from where the backward begins.
    out, keys = checkpoint_name((out, keys), "jattn_out")
    lse = checkpoint_name(lse, "jattn_lse")
    return (out.astype(dtype), lse), (arrays, context, keys, wide, out, lse)


def _attend_backward(plan, saved, cotangents):
    return _backward(plan, saved, cotangents), None


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _backward(plan, saved, cotangents):
    arrays, context, keys, wide, out, lse = saved
    with jax.named_scope("jattn.sequence"):
        gradients = Shard(plan, arrays, context, keys).backward(keys, out, lse, *cotangents)
    like = dataclasses.replace(arrays, key=wide, value=wide)
    return jax.tree.map(lambda g, x: g.astype(x.dtype), gradients, like)


@_backward.defjvp
def _refuse_second_derivative(plan, primals, tangents):
    raise NotImplementedError(
        "jattn ops have first derivatives in reverse mode only: second derivatives are not implemented"
    )


attend.__wrapped__.defvjp(_attend_forward, _attend_backward)


class Shard:
    """One device's part of a call: `arrays` and `context` without the keys, and loops over those."""

    def __init__(self, plan, arrays, context, keys):
        self.plan, self.arrays, self.context = plan, arrays, context
        self.layout, self.options = plan.layout, plan.options
        self.ordered = dataclasses.replace(plan.options, ordered=True)
        self.B, T, self.N, _ = arrays.query.shape
        self.D = keys.value.shape[-1]
        self.pieces = self.layout.pieces
        self.rows = T // self.pieces  # of a piece
        self.T, self.S = (n * self.layout.size for n in (T, keys.key.shape[1]))
        self.terms = parts(context.mask) if context.mask is not None else []
        self.index = jnp.int32(0) if plan.axis is None else lax.axis_index(plan.axis)
        self.dtype = accumulator(arrays.query.dtype)
        self.axes = varying_axes((arrays, context, keys))
        self.offset = self.options.query_offset
        if context.query_offset is not None:
            self.offset = context.query_offset.reshape(-1, 1, 1, 1)

    # The way of the keys.

    def forward(self, keys):
        """out and lse in the accumulator's dtype, and the keys where they are in the end."""
        if not self.T or not self.S:
            state = self._start()
        elif self.plan.gather:
            state = self._over_gathered(self._see, self._start(), keys)
        else:
            state, keys = self._walk(keys)
        return *state, keys

    def _walk(self, keys):
        way, state = self.plan.path, self._start()

        def step(keys, state, distance, shift):
            see = functools.partial(self._see, state, keys, distance)
            (keys,), state = self._while_working(see, (keys, shift))
            return keys, state

        for i, count, shift in _runs(_differences(way)):
            keys, state = _repeat(
                count, lambda n, c, i=i, shift=shift: step(*c, way[i] + n * shift, shift), (keys, state)
            )
        return self._see(state, keys, way[-1]), keys

    def backward(self, keys, out, lse, dout, dlse):
        """Gradients of every array, in the accumulator's dtype."""
        see = functools.partial(self._see_backward, (out, lse, dout, dlse))
        walk = self._gather_and_scatter if self.plan.gather else self._walk_home
        if not self.T or not self.S:
            totals, (key, value) = self._zero_totals(), (self._zeros(x.shape) for x in (keys.key, keys.value))
        else:
            totals, (key, value) = walk(see, self._zero_totals(), keys)
        return dataclasses.replace(totals, key=key, value=value, sinks=self._sinks_gradient(out, lse, dout, dlse))

    def _walk_home(self, see, totals, keys):
        """The way of `_walk` backwards: keys come home, and the sums of their gradients behind them."""
        way, last = self.plan.path, len(self.plan.path) - 1
        back = [-shift for shift in _differences(way)]  # back[m]: from way[m + 1] to way[m]

        def step(keys, sums, totals, distance, keys_shift, sums_shift):
            work = functools.partial(see, totals, keys, distance)
            (keys, sums), (totals, own) = self._while_working(work, (keys, keys_shift), (sums, sums_shift))
            return keys, _add(sums, own), totals

        work = functools.partial(see, totals, keys, way[last])
        if not last:
            return work()
        (keys,), (totals, sums) = self._while_working(work, (keys, back[last - 1]))
        shifts = [(back[m - 1], back[m]) for m in range(last - 1, 0, -1)]
        for i, count, pair in _runs(shifts):
            distance = way[last - 1 - i]
            keys, sums, totals = _repeat(
                count, lambda n, c, d=distance, pair=pair: step(*c, d + n * pair[0], *pair), (keys, sums, totals)
            )
        work = functools.partial(see, totals, keys, 0)
        (sums,), (totals, own) = self._while_working(work, (sums, back[0]))
        return totals, _add(sums, own)

    def _source(self, distance):
        """The device `distance` before this one; None of None, which is all."""
        return None if distance is None else (self.index - distance) % self.layout.size

    def _while_working(self, work, *moves):
        """`(arrived, work())`: each `(tree, shift)` of `moves` comes from the device `shift` before this one meanwhile.

        Trees with one shift travel as one message.
        """
        trees, shifts = zip(*moves, strict=True)
        if one := len(set(shifts)) == 1:
            trees, shifts = (trees,), shifts[:1]
        send = functools.partial(pass_on, name=self.plan.axis)
        sent = [_together(functools.partial(send, shift=n), x) for x, n in zip(trees, shifts, strict=True)]
        # Without the barrier the compiler may wait for the messages before it starts to work.
        sent, done = lax.optimization_barrier((sent, work()))
        arrived = [_apart(message, tree) for message, tree in zip(sent, trees, strict=True)]
        return arrived[0] if one else arrived, done

    def _over_gathered(self, see, state, keys):
        """`see(state, keys, distance)` for the keys of all devices: in one call where their order can be restored."""
        everyone = self._gather(keys)
        if self.layout.stride == 1:
            return see(state, jax.tree.map(self._natural, everyone, Keys(1, 1, (3,) * len(keys.ids))), None)

        def step(source, state):
            return see(state, jax.tree.map(lambda x: x[source], everyone), self.index - source)

        return lax.fori_loop(0, self.layout.size, step, state)

    def _gather(self, keys):
        """The keys of all devices, in a new first axis."""
        return _apart(_together(lambda x: all_gather(x, self.plan.axis), keys), keys)

    def _natural(self, x, axis):
        """`[P, ..., tokens, ...]` in natural order, tokens at `axis` of the result."""
        x = jnp.moveaxis(x, 0, axis)
        return self.layout.unshard(x.reshape(*x.shape[:axis], self.S, *x.shape[axis + 2 :]), axis)

    def _gather_and_scatter(self, see, totals, keys):
        size = self.layout.size
        keys = lax.optimization_barrier(keys)  # else what the forward gathered would be kept for the backward
        if self.layout.stride == 1:
            natural = jax.tree.map(self._natural, self._gather(keys), Keys(1, 1, (3,) * len(keys.ids)))
            totals, sums = see(totals, natural, None)
            sums = [self.layout.shard(x, 1) for x in sums]
            sums = [jnp.moveaxis(x.reshape(x.shape[0], size, self.S // size, *x.shape[2:]), 1, 0) for x in sums]
        else:
            everyone = self._gather(keys)

            def step(source, state):
                totals, sums = state
                totals, own = see(totals, jax.tree.map(lambda x: x[source], everyone), self.index - source)
                return totals, [x.at[source].set(o) for x, o in zip(sums, own, strict=True)]

            sums = [self._zeros((size, *x.shape)) for x in (keys.key, keys.value)]
            totals, sums = lax.fori_loop(0, size, step, (totals, sums))
        both = jnp.concatenate(sums, -1)
        both = reduce_scatter(both, self.plan.axis)
        return totals, jnp.split(both, [sums[0].shape[-1]], -1)

    # Where the order of tokens decides alone: a rectangle for a device's own keys, two squares for those of another.

    def _in_order(self, distance) -> bool:
        """Whether a causal mask and segments are all there is, or less, over the two pieces of a zigzag layout.

        A device's tokens are in order. Its first piece lies before both pieces of any device after it, its second piece
        behind both: there the second piece of the queries sees all keys, here all queries the first piece of the keys.
        Either way the second piece of the queries sees the first piece of the keys, and one other square is to be done.
        """
        a, c, o = self.arrays, self.context, self.options
        plain = a.bias is None and o.mod is None and not o.dropout_threshold and c.query_lengths is None
        same = self.pieces == 2 and self.T == self.S and o.query_offset == 0 and c.query_offset is None
        known = all(isinstance(m, And | Causal | Segments) for m in self.terms)
        return distance is not None and plain and same and known

    def _over_ordered(self, distance, see, state):
        """`see(queries, keys, causal, state)`, given the ranges (start, size) of this device's queries and of the
        other's keys. Which ones they are is computed: a conditional would have the host wait for the device."""
        size = self.layout.size
        rows, columns = self.T // size, self.S // size
        if not any(isinstance(m, Causal) for m in self.terms):
            return see((0, rows), (0, columns), False, state)
        own = functools.partial(see, (0, rows), (0, columns), True)
        if isinstance(distance, int) and distance == 0:
            return own(state)
        source, rows, columns = self._source(distance), rows // 2, columns // 2

        def another(state):
            half = jnp.where(source < self.index, 0, 1)
            state = see((rows, rows), (0, columns), False, state)
            return see((half * rows, rows), (half * columns, columns), False, state)

        return another(state) if isinstance(distance, int) else lax.cond(source == self.index, own, another, state)

    def _ordered(self, queries, keys, causal, held):
        """`(arrays, context)` of such a rectangle."""
        ids = iter(held.ids)
        segments = [
            Segments(_range(m.query_ids, queries, 2), _range(next(ids), keys, 3))
            for m in self.terms
            if isinstance(m, Segments)
        ]
        masks = [Causal()] * causal + segments
        arrays = dataclasses.replace(
            self.arrays, query=_range(self.arrays.query, queries), key=_range(held.key, keys),
            value=_range(held.value, keys), sinks=None,
        )  # fmt: skip
        return arrays, dataclasses.replace(
            self.context, mask=functools.reduce(And, masks) if masks else None, origin=None
        )

    def _see_ordered(self, held, alone, queries, keys, causal, state):
        """`state` with these keys in it; without what was before where they are the first."""
        out, lse, _ = forward_of(self.ordered, *self._ordered(queries, keys, causal, held), unrounded=True)
        if not alone:
            out, lse = merge(tuple(_range(x, queries) for x in state), (out, lse))
        return _put(state[0], out, queries[0]), _put(state[1], lse, queries[0])

    def _see_backward_ordered(self, saved, held, queries, keys, causal, state):
        """`_see_backward` of such a rectangle; the state is (totals, gradients of the keys and values)."""
        totals, own = state
        out, lse, dout, dlse = (_range(x, queries) for x in saved)
        call = (*self._ordered(queries, keys, causal, held), out, lse, jnp.zeros_like(lse))
        g = backward_of(self.ordered, call, (dout, dlse))
        query = _put(totals.query, _range(totals.query, queries) + g.query, queries[0])
        own = [_put(x, _range(x, keys) + y, keys[0]) for x, y in zip(own, (g.key, g.value), strict=True)]
        return self._add_totals(dataclasses.replace(totals, query=query), g, None, None, None), own

    # Rectangles: piece i of the queries and piece j of the keys of device `source`; None: of all keys.

    def _see(self, state, keys, distance):
        """`state`, out and lse, with the keys of the device `distance` before this one in it; None: of all."""
        if self._in_order(distance):
            alone = isinstance(distance, int) and distance == 0 and self.arrays.sinks is None
            return self._over_ordered(distance, functools.partial(self._see_ordered, keys, alone), state)
        source = self._source(distance)

        def see(i, j, state):
            def attend(partial):
                out, lse, _ = forward_of(self.options, *self._rectangle(i, j, keys, source), unrounded=True)
                return merge(partial, (out, lse))

            partial = tuple(_piece(x, i, self.rows) for x in state)
            partial = self._if_visible(i, j, keys, source, attend, partial)
            return tuple(_put_piece(x, i, new) for x, new in zip(state, partial, strict=True))

        return self._over_rectangles(source, see, state)

    def _see_backward(self, saved, totals, keys, distance):
        """`totals` with what comes from these keys in it, and the gradients of these keys and values."""
        if self._in_order(distance):
            state = totals, [self._zeros(x.shape) for x in (keys.key, keys.value)]
            return self._over_ordered(distance, functools.partial(self._see_backward_ordered, saved, keys), state)
        source = self._source(distance)
        columns = self._columns(source)

        def see(i, j, state):
            def attend(state):
                query, key, value, totals = state
                out, lse, dout, dlse = (_piece(x, i, self.rows) for x in saved)
                call = (*self._rectangle(i, j, keys, source), out, lse, jnp.zeros_like(lse))
                g = backward_of(self.options, call, (dout, dlse))
                return query + g.query, key + g.key, value + g.value, self._add_totals(totals, g, i, j, source)

            query, key, value, totals = state
            piece = _piece(query, i, self.rows), _piece(key, j, columns), _piece(value, j, columns), totals
            *new, totals = self._if_visible(i, j, keys, source, attend, piece)
            places = zip((query, key, value), (i, j, j), new, strict=True)
            return *(_put_piece(x, n, piece) for x, n, piece in places), totals

        query, totals = totals.query, dataclasses.replace(totals, query=None)
        sums = (self._zeros(x.shape) for x in (keys.key, keys.value))
        query, key, value, totals = self._over_rectangles(source, see, (query, *sums, totals))
        return dataclasses.replace(totals, query=query), [key, value]

    def _over_rectangles(self, source, body, state):
        """`state = body(i, j, state)` for each."""
        parts = 1 if source is None else self.pieces
        return _repeat(self.pieces * parts, lambda n, state: body(n // parts, n % parts, state), state)

    def _if_visible(self, i, j, keys, source, function, state):
        """`function(state)`, or `state` where the mask hides the whole rectangle."""
        mask = self._mask(i, j, keys, source)
        if mask is None:
            return function(state)
        columns = self._columns(source)
        starts = self._starts(i, j, source)
        grid = Grid(self.rows, columns, self.rows, columns, self.offset, starts, self.layout.stride)
        return lax.cond(jnp.any(mask.possible(grid)[0]), function, lambda state: state, state)

    def _starts(self, i, j, source):
        """Indices of the first query and the first key."""
        query = jnp.stack(self.layout.starts(self.index, self.T))[i]
        return query, jnp.int32(0) if source is None else jnp.stack(self.layout.starts(source, self.S))[j]

    def _columns(self, source):
        return self.S if source is None else self.S // self.layout.multiple

    def _rectangle(self, i, j, keys, source):
        """`(arrays, context)` of one rectangle, as `_problem` has them."""
        key, value = (_piece(x, j, self._columns(source)) for x in (keys.key, keys.value))
        a = self.arrays
        bias = None if a.bias is None else self._cut(a.bias, i, j, source)
        arrays = dataclasses.replace(
            a, query=_piece(a.query, i, self.rows), key=key, value=value, bias=bias, sinks=None,
            aux=tuple(self._aux(n, x, i, j, source)[0] for n, x in enumerate(a.aux)),
        )
        base = jnp.zeros(4, jnp.int32) if self.context.origin is None else self.context.origin
        query_start, key_start = self._starts(i, j, source)
        origin = base + jnp.stack([jnp.int32(0), jnp.int32(0), query_start, key_start])
        mask = self._mask(i, j, keys, source)
        return arrays, dataclasses.replace(self.context, mask=mask, origin=vary(origin, self.axes))

    def _mask(self, i, j, keys, source):
        ids = (_piece(x, j, self._columns(source), 3) for x in keys.ids)
        cut = functools.partial(self._cut, i=i, j=j, source=source)
        return map_mask(self.context.mask, cut, cut, lambda _: next(ids))

    def _cut(self, x, i, j, source):
        """`x`, which broadcasts to `[B, N, own rows, S]`, restricted to a rectangle."""
        view, start, sizes = self._place(x, i, j, source)
        return lax.dynamic_slice(x.reshape(view), start, sizes).reshape(sizes[:4])

    def _add_cut(self, total, update, i, j, source):
        """Adds `update`, the gradient of `_cut(total)`, to its place in `total`."""
        view, start, sizes = self._place(total, i, j, source)
        there = lax.dynamic_slice(total.reshape(view), start, sizes) + update.reshape(sizes)
        return lax.dynamic_update_slice(total.reshape(view), there, start).reshape(total.shape)

    def _place(self, x, i, j, source):
        """`x` seen with its columns in rows of `stride`, and start and sizes of a rectangle in that."""
        B, N, T, S = x.shape
        row, rows = (0, 1) if T == 1 else (i * self.rows, self.rows)
        stride, start, columns = 1, 0, S
        if S != 1 and source is not None:
            stride, start, columns = self.layout.stride, self._starts(i, j, source)[1], self._columns(source)
        at = (0, 0, row, start, 0) if stride == 1 else (0, 0, row, 0, start)
        return (B, N, T, S // stride, stride), [jnp.asarray(n, jnp.int32) for n in at], (B, N, rows, columns, 1)

    def _aux(self, n, x, i, j, source):
        """The modifier's n-th array in a rectangle, and the transpose of cutting it out: gradient, total -> total."""
        if self.options.mod.kinds[n] == "element":
            return self._cut(x, i, j, source), lambda g, total: self._add_cut(total, g, i, j, source)
        query_start, key_start = self._starts(i, j, source)
        offset = self.offset + query_start - key_start
        spread, pull = jax.vjp(
            lambda table: _diagonals(table, self.rows, self._columns(source), offset, self.layout.stride),
            vary(x.astype(self.dtype), self.axes),
        )
        return spread, lambda g, total: total + pull(g)[0]

    # Sums.

    def _zeros(self, shape):
        return vary(jnp.zeros(shape, self.dtype), self.axes)

    def _start(self):
        """The result over no keys: empty, or a sink alone."""
        shape = self.arrays.query.shape[:3]
        lse = jnp.full(shape, -jnp.inf, self.dtype)
        if self.arrays.sinks is not None:
            lse = jnp.broadcast_to(self.arrays.sinks.astype(self.dtype), shape)
            if self.context.query_lengths is not None:
                row = self.layout.positions(self.T, self.index)[:, None]
                lse = jnp.where(row < self.context.query_lengths[:, None, None], lse, -jnp.inf)
        return self._zeros((*shape, self.D)), vary(lse, self.axes)

    def _zero_totals(self):
        a, zeros = self.arrays, lambda x: None if x is None else self._zeros(x.shape)
        return dataclasses.replace(
            a, query=zeros(a.query), scale=zeros(a.scale), bias=zeros(a.bias), aux=tuple(map(zeros, a.aux)), sinks=None
        )

    def _add_totals(self, totals, g, i, j, source):
        aux = [self._aux(n, x, i, j, source)[1] for n, x in enumerate(self.arrays.aux)]
        return dataclasses.replace(
            totals, scale=None if g.scale is None else totals.scale + g.scale,
            bias=None if g.bias is None else self._add_cut(totals.bias, g.bias, i, j, source),
            aux=tuple(add(x, total) for add, x, total in zip(aux, g.aux, totals.aux, strict=True)),
        )

    def _sinks_gradient(self, out, lse, dout, dlse):
        """A sink is a key without a value: its weight times what one more unit of weight costs."""
        if self.arrays.sinks is None:
            return None
        delta = jnp.sum(dout.astype(self.dtype) * out.astype(self.dtype), -1) - dlse
        empty = lse == -jnp.inf
        weights = jnp.exp(self.arrays.sinks.astype(self.dtype) - jnp.where(empty, 0, lse))
        return -jnp.sum(jnp.where(empty, 0, weights * delta), (0, 1))


# Masks and tables.


def _key_ids(mask):
    """Key ids of the segment masks in a mask, in order."""
    if isinstance(mask, Segments):
        return [mask.key_ids]
    return [ids for x in vars(mask).values() if isinstance(x, Mask) for ids in _key_ids(x)] if mask is not None else []


def map_mask(mask, arrays, query_ids, key_ids, rest=lambda mask: mask):
    """The mask with functions applied to its arrays that have rows and columns, to its ids, and to its other parts."""
    if mask is None:
        return None
    if isinstance(mask, Dense):
        return Dense(arrays(mask.array))
    if isinstance(mask, Predicate):
        return Predicate(tuple(map(arrays, mask.aux)), mask.function)
    if isinstance(mask, Segments):
        return Segments(query_ids(mask.query_ids), key_ids(mask.key_ids))
    parts = {name: x for name, x in vars(mask).items() if isinstance(x, Mask)}
    if not parts:
        return rest(mask)
    return dataclasses.replace(mask, **{n: map_mask(x, arrays, query_ids, key_ids, rest) for n, x in parts.items()})


def _diagonals(table, rows, columns, offset, stride):
    """`table [N or 1, L]` by diagonals: `[B or 1, N or 1, rows + columns - 1]`, as `mods.bind` has them."""
    middle = table.shape[1] // 2
    diagonal = jnp.arange(rows + columns - 1, dtype=jnp.int32) - (rows - 1)
    index = middle + stride * diagonal - jnp.reshape(offset, (-1, 1))
    return jnp.moveaxis(jnp.take(table, jnp.clip(index, 0, table.shape[1] - 1), axis=1), 0, 1)


# Messages.


def _together(collective, tree):
    """A collective of keys, values and their gradients `[B, S, K, features]` as one operand, and of ids (a hundredth of
    that) by themselves: what `_apart` takes apart."""
    packed, ids = _packed_and_ids(tree)
    return collective(_pack(packed)), [collective(x) for x in ids]


def _apart(message, like):
    """The tree in a message that was made of one like it."""
    words, ids = message
    packed, ids = iter(_unpack(words, _packed_and_ids(like)[0])), iter(ids)
    return jax.tree.map(lambda x: next(ids) if _is_id(x) else next(packed), like)


def _packed_and_ids(tree):
    leaves = jax.tree.leaves(tree)
    return [x for x in leaves if not _is_id(x)], [x for x in leaves if _is_id(x)]


def _is_id(x):
    return jnp.issubdtype(x.dtype, jnp.integer)


def _pack(arrays):
    """Arrays that differ in the last axis alone as one, bit for bit. The other axes stay, since they may be sharded."""
    word = jnp.dtype(f"uint{8 * min(x.dtype.itemsize for x in arrays)}")
    widths = [x.shape[-1] * x.dtype.itemsize // word.itemsize for x in arrays]
    words = [lax.bitcast_convert_type(x, word).reshape(*x.shape[:-1], n) for x, n in zip(arrays, widths, strict=True)]
    return jnp.concatenate(words, -1)


def _unpack(message, like):
    """The inverse of `_pack`; `message` may have more leading axes."""
    ratios = [x.dtype.itemsize // message.dtype.itemsize for x in like]
    ends = itertools.accumulate(x.shape[-1] * r for x, r in zip(like, ratios, strict=True))
    parts = jnp.split(message, list(ends)[:-1], -1)
    for part, ratio, x in zip(parts, ratios, like, strict=True):
        words = part if ratio == 1 else part.reshape(*part.shape[:-1], x.shape[-1], ratio)
        yield lax.bitcast_convert_type(words, x.dtype)


# Pieces and loops.


def _piece(x, i, length, axis=1):
    return x if length == x.shape[axis] else lax.dynamic_slice_in_dim(x, i * length, length, axis)


def _range(x, place, axis=1):
    """Rows `[start, start + size)`, whose start may be traced."""
    start, size = place
    return x if size == x.shape[axis] else lax.dynamic_slice_in_dim(x, start, size, axis)


def _put_piece(x, i, piece):
    return _put(x, piece, i * piece.shape[1])


def _put(x, part, start):
    return part if part.shape == x.shape else lax.dynamic_update_slice_in_dim(x, part, start, 1)


def _differences(numbers):
    return [b - a for a, b in itertools.pairwise(numbers)]


def _runs(items):
    """(first index, length, item) of each run of equal items."""
    first = 0
    for item, group in itertools.groupby(items):
        count = len(list(group))
        yield first, count, item
        first += count


def _repeat(count, body, state):
    return body(0, state) if count == 1 else lax.fori_loop(0, count, body, state)


def _add(trees, others):
    return jax.tree.map(jnp.add, trees, others)
