"""Attention of one sequence spread over many devices: `ring_attention` and its kin, and how tokens are laid out.

Every op is `attention` of the undivided sequence, mask by mask and bit of dropout by bit, whatever the layout; the
layout only decides who works how much, the op what travels. docs/sequence.md says when to take which.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jattn import _check, _dispatch, mods
from jattn._layout import SequenceLayout as SequenceLayout
from jattn._layout import path
from jattn._mask import And, Or
from jattn._mask_rules import Blocks, Causal, Window
from jattn._problem import Context, Differentiable, Options, Problem, accumulator
from jattn._ring import Plan, attend, map_mask
from jattn._tile import Shape
from jattn._varying import vary, varying_axes

__all__ = [
    "SequenceLayout", "allgather_attention", "hybrid_attention", "ring_attention", "ulysses_attention",
]


def ring_attention(query, key, value, bias=None, mask=None, *, axis=None, layout=None, mesh=None, **options):
    """`attention` of a sequence spread over a mesh axis: keys and values travel from device to device.

    Each device keeps its queries. The keys and values of the P devices come by in P - 1 steps, one message each, while
    those before are at work; the backward walks back in P. Steps in which nothing is visible are skipped, and windows
    that are known when compiling make the way shorter. A device holds nothing longer than its own part.

    Inside your own `shard_map` the arrays are one device's. Outside, they are whole, and the op maps itself over
    `axis`; other mesh axes, over batch or heads, are left as they are.

    Args:
        query: `[*B, T, N, H]`, tokens in layout order; inside `shard_map` T is the device's own length. So S below.
        key: `[*B, S, K, H]`, in the same layout.
        value: `[*B, S, K, D]`.
        bias: floating-point, broadcastable to `[*B, N, T, S]`. Its rows lie as the queries do; its columns are never
            cut and in natural order. So do those of dense masks and of the aux arrays of modifiers and predicates.
        mask: a mask of `jattn.masks`, or a bool array like `bias`. Positions count in the undivided sequence. Segment
            ids lie as their tokens do.
        axis: name of the mesh axis; None outside `shard_map` when the sharding of `query` tells.
        layout: a `SequenceLayout` as large as the axis; None is contiguous. "zigzag" gives causal attention equal work.
        mesh: None, or outside `shard_map` the mesh, where neither arrays nor `jax.set_mesh` tell.
        **options: those of `attention`; lengths and `query_offset` are those of the undivided sequence, and dropout
            draws its bits.

    Returns:
        As `attention`: `[*B, T, N, D]` in layout order, and with `return_residual` also lse `[*B, T, N]`.

    Raises:
        ValueError, TypeError: as `attention`; also lengths that the layout does not divide, an axis that is not in the
            mesh, layouts that differ, and arrays that are sharded along a wrong axis.
        NotImplementedError: as `attention`.

    Example:
        >>> layout = jattn.SequenceLayout("zigzag", mesh.shape["sp"])
        >>> x = jax.device_put(layout.shard(x), NamedSharding(mesh, P(None, "sp")))
        >>> out = layout.unshard(jattn.ring_attention(q, k, v, is_causal=True, axis="sp", layout=layout))

    Source: Liu, Zaharia, Abbeel, "Ring Attention with Blockwise Transformers for Near-Infinite Context"
    (arXiv:2310.01889); the zigzag layout from Llama 3 (arXiv:2407.21783).
    """
    return _call("ring", _names(axis), layout, mesh, query, key, value, bias, mask, **options)


def allgather_attention(query, key, value, bias=None, mask=None, *, axis=None, layout=None, mesh=None, **options):
    """`attention` of a sequence spread over a mesh axis: every device gathers all keys and values.

    One message instead of P - 1 (in the backward one more, which sums the gradients of keys and values in float32), few
    large calls instead of many small ones, but the keys and values of the whole sequence on every device.

    Args, returns, raises: those of `ring_attention`.

    Example:
        >>> out = jattn.allgather_attention(q, k, v, is_causal=True, axis="sp", layout=layout)

    Source: Llama 3 (arXiv:2407.21783), section 3.3.2.
    """
    return _call("allgather", _names(axis), layout, mesh, query, key, value, bias, mask, **options)


def ulysses_attention(query, key, value, bias=None, mask=None, *, axis=None, layout=None, mesh=None, **options):
    """`attention` of a sequence spread over a mesh axis: tokens are exchanged for heads.

    An all-to-all gives each device the whole sequence for N / P of the heads, another brings the outputs back. The work
    is equal under every mask. P must divide N; key heads are replicated to the least common multiple of K and P, whose
    gradients are summed in float32. Arrays that have rows but no heads (a dense mask for all heads) are gathered.

    Args, returns, raises: those of `ring_attention`.

    Example:
        >>> out = jattn.ulysses_attention(q, k, v, is_causal=True, axis="sp")

    Source: Jacobs et al., "DeepSpeed Ulysses" (arXiv:2309.14509).
    """
    return _call("ulysses", _names(axis), layout, mesh, query, key, value, bias, mask, **options)


def hybrid_attention(query, key, value, bias=None, mask=None, *, axes, layout=None, mesh=None, **options):
    """`attention` of a sequence spread over two mesh axes: a ring over the first, tokens for heads over the second.

    The exchange runs between near devices, the ring between far ones, where it can hide its messages; only the second
    axis has to divide the heads.

    Args:
        axes: `(ring, ulysses)`, names of mesh axes: tokens are sharded along `P(..., (ring, ulysses), ...)`.
        layout: a `SequenceLayout` as large as the ring axis, each of whose parts the other axis cuts evenly.
        The others, returns, raises: those of `ring_attention`.

    Example:
        >>> out = jattn.hybrid_attention(q, k, v, is_causal=True, axes=("nodes", "gpus"))

    Source: Fang, Zhao, "USP: A Unified Sequence Parallelism Approach" (arXiv:2405.07719).
    """
    if not isinstance(axes, tuple | list) or len(axes) != 2 or not all(isinstance(a, str) for a in axes):
        raise ValueError(f"axes={axes!r} must be two names of mesh axes, (ring, ulysses)")
    return _call("hybrid", tuple(axes), layout, mesh, query, key, value, bias, mask, **options)


def _names(axis):
    if axis is not None and not isinstance(axis, str):
        raise TypeError(f"axis={axis!r} must be the name of a mesh axis, not {type(axis).__name__}")
    return () if axis is None else (axis,)


@dataclasses.dataclass(frozen=True)
class _Static:
    """What is compiled in, as the caller said it."""

    strategy: str
    axes: tuple[str | None, str | None]  # ring (or all-gather), ulysses
    layout: SequenceLayout | None
    scale: float | None
    query_offset: Any  # int, "end", or None for an array
    soft_cap: float | None
    dropout_threshold: int
    deterministic: bool
    implementation: str | None
    config: Any

    @property
    def names(self):
        return tuple(a for a in self.axes if a is not None)


def _call(
    strategy, names, layout, mesh, query, key, value, bias, mask, *, scale=None, is_causal=False, query_offset=0,
    query_seq_lengths=None, key_value_seq_lengths=None, local_window_size=None, segment_ids=None, logits_soft_cap=None,
    score_mod=None, sinks=None, dropout_rate=0.0, dropout_key=None, return_residual=False, deterministic=False,
    implementation=None, config=None,
):
    _check.flag(return_residual, "return_residual")
    query, key, value = _check.operands(query, key, value, "[*B, T, N, H]")
    names, mesh = _find(
        2 if strategy == "hybrid" else 1, names, mesh, dict(query=query, key=key, value=value),
        dict(bias=bias, mask=mask if hasattr(mask, "ndim") else None, sinks=sinks),
    )
    axes = {"hybrid": names, "ulysses": (None, *names)}.get(strategy, (*names, None))
    batch, T, S, H = query.shape[:-3], query.shape[-3], key.shape[-3], query.shape[-1]
    parts = 1 if mesh is not None else math.prod(map(lax.axis_size, names))
    key_lengths = _check.lengths(key_value_seq_lengths, "key_value_seq_lengths", batch, parts * S)
    query_lengths = _check.lengths(query_seq_lengths, "query_seq_lengths", batch, parts * T)
    mask = _check.mask(
        mask, is_causal=is_causal, local_window_size=local_window_size,
        segment_ids=_check.segment_ids(segment_ids, T, S),
        key_lengths=None if key_lengths is None else key_lengths.reshape(batch),
    )
    if score_mod is not None and not isinstance(score_mod, mods.ScoreMod):
        score_mod = mods.score_mod(score_mod)
    static_scale, scale = _check.scale(scale, H)
    threshold, words = _check.dropout(dropout_rate, dropout_key)
    offset = query_offset if hasattr(query_offset, "shape") or isinstance(query_offset, list | tuple) else None
    static = _Static(
        strategy, axes, _layout(layout), static_scale, query_offset if offset is None else None,
        _check.soft_cap(logits_soft_cap), threshold, _check.flag(deterministic, "deterministic"), implementation,
        config,
    )
    arrays = dict(
        query=query, key=key, value=value, bias=None if bias is None else _check.array(bias, "bias"), mask=mask,
        scale=scale, sinks=None if sinks is None else _check.array(sinks, "sinks"), score_mod=score_mod,
        dropout_key=words, query_offset=None if offset is None else _check.array(offset, "query_offset"),
        query_lengths=query_lengths, key_lengths=key_lengths,
    )
    out, lse = _on_device(static, arrays) if mesh is None else _on_mesh(static, mesh, arrays)
    return (out, lse) if return_residual else out


# One device's part, inside a `shard_map`.


@dataclasses.dataclass(frozen=True)
class _ShardShape(Shape):
    """T and S of the undivided sequence for what counts in it, `local` for arrays that have a device's tokens."""

    local: tuple[int, int] = (0, 0)
    names: tuple[str, ...] = ()

    def per_token(self, x, name, axis):
        return Shape(self.batch, self.heads, *self.local).per_token(x, name, axis)

    def scores(self, x, name):
        T, S = self.local
        over = _over(self.names)
        if x.ndim >= 1 and x.shape[-1] not in (1, self.num_keys) and x.shape[-1] == S:
            raise ValueError(
                f"{name} has shape {x.shape} on a device: its columns are cut to S={S} of {self.num_keys}; shard its "
                f"rows T alone{over}, and leave all {self.num_keys} columns in natural order"
            )
        if x.ndim >= 2 and x.shape[-2] not in (1, T) and x.shape[-2] == self.num_queries:
            raise ValueError(
                f"{name} has shape {x.shape} on a device: all T={self.num_queries} rows; shard its rows{over}, {T} a "
                "device, in the layout of the queries"
            )
        return Shape(self.batch, self.heads, T, self.num_keys).scores(x, name)


def _on_device(static, x):
    ring, ulysses = static.axes
    size = [1 if a is None else lax.axis_size(a) for a in static.axes]
    *batch, T, N, H = x["query"].shape
    batch, S = tuple(batch), x["key"].shape[-3]
    whole = math.prod(size)
    layout = _layout_of(static, size, T * whole, S * whole)
    shape = _ShardShape(batch, N, T * whole, S * whole, None, (T, S), static.names)
    query, key, value = (a.reshape(math.prod(batch), *a.shape[-3:]) for a in (x["query"], x["key"], x["value"]))
    mod, sinks = x["score_mod"], x["sinks"]
    if sinks is not None and sinks.shape != (N,):
        raise ValueError(
            f"sinks have shape {sinks.shape} on a device; expected one a query head, ({N},): do not shard them"
            f"{_over(static.names)}"
        )
    arrays = Differentiable(
        query, key, value, scale=x["scale"], bias=_check.bias(x["bias"], shape), aux=_bind_aux(mod, shape),
        sinks=_check.sinks(sinks, N),
    )
    static_offset, offset = _offset(static, x, batch, shape)
    context = Context(
        mask=None if x["mask"] is None else x["mask"].bind(shape), dropout_key=x["dropout_key"], query_offset=offset,
        query_lengths=x["query_lengths"],
    )
    arrays, context = vary((arrays, context), varying_axes((arrays, context)) | set(static.names))
    if ulysses is not None:
        restore = layout.unshard if ring is None else lambda x, axis: x
        arrays, context = _Exchange(ulysses, T, arrays.query.shape[2], restore).to_heads(arrays, context, mod)
        layout = layout if ring is not None else SequenceLayout("contiguous", 1)
    plan = _plan(static, layout, arrays, context, mod, static_offset)
    out, lse = attend(plan, arrays, context)
    if ulysses is not None:
        order = SequenceLayout("contiguous", 1) if ring is not None else static.layout or layout
        out, lse = (_all_to_all(order.shard(a, 1), ulysses, 1, 2) for a in (out, lse))
    return tuple(a.reshape(*batch, *a.shape[1:]) for a in (out, lse))


def _plan(static, layout, arrays, context, mod, offset) -> Plan:
    """The options of every rectangle, resolved, and the way of the keys."""
    (B, T, N, H), (S, K) = arrays.query.shape, arrays.key.shape[1:3]
    if mod is not None:
        kinds = tuple("element" if kind == "element" else "diagonal" for kind in mod.kinds)
        mod = mods.ScoreMod((), mod.function, kinds, mod.name)
    options = Options(
        scale=static.scale, query_offset=offset, soft_cap=static.soft_cap, mod=mod,
        dropout_threshold=static.dropout_threshold, deterministic=static.deterministic, stride=layout.stride,
        partial=True,
    )
    gather = static.strategy == "allgather" and layout.size > 1
    columns = S * layout.size if gather and layout.stride == 1 else S // layout.pieces
    problem = Problem(
        op="attention", B=B, T=T // layout.pieces, S=columns, N=N, K=K, H=H, D=arrays.value.shape[3],
        dtype=str(arrays.query.dtype), mask=None if context.mask is None else repr(context.mask),
        bias=None if arrays.bias is None else arrays.bias.shape, score_mod=None if mod is None else repr(mod),
        soft_cap=options.soft_cap, dropout=options.dropout_threshold > 0, deterministic=options.deterministic,
        stride=layout.stride, partial=True,
    )
    options = _dispatch.resolve(problem, options, static.implementation, static.config)
    left, right = (None, None) if context.query_offset is not None else _band(context.mask)
    left, right = None if left is None else left - offset, None if right is None else right + offset
    way = path(layout, T * layout.size, S * layout.size, left, right)
    return Plan(layout, static.axes[0] if layout.size > 1 else None, way, gather, options)


def _band(mask):
    """`(left, right)`, None for unbounded: whatever is visible has -right <= query position - key position <= left."""
    if isinstance(mask, Causal):
        return None, 0
    if isinstance(mask, Window):
        return mask.left, mask.right
    if isinstance(mask, And | Or):
        pairs = zip(_band(mask.left), _band(mask.right), strict=True)
        if isinstance(mask, Or):
            return tuple(None if None in pair else max(pair) for pair in pairs)
        return tuple(min((b for b in pair if b is not None), default=None) for pair in pairs)
    return None, None


def _offset(static, x, batch, shape):
    lengths = shape.num_queries, shape.num_keys
    given = x["query_lengths"], x["key_lengths"]
    lengths = (n if g is None else g for n, g in zip(lengths, given, strict=True))
    return _check.offset(static.query_offset if x["query_offset"] is None else x["query_offset"], batch, *lengths)


def _bind_aux(mod, shape):
    """The modifier's arrays as `[B or 1, N or 1, T or 1, S or 1]`; tables as they are, `[N or 1, L]`."""
    if mod is None:
        return ()
    for a, kind in zip(mod.aux, mod.kinds, strict=True):
        if kind == "table" and a.shape[0] not in (1, shape.heads):
            raise ValueError(f"relative_bias table has {a.shape[0]} heads; expected 1 or N={shape.heads}")
    named = zip(mod.aux, mod.kinds, strict=True)
    return tuple(shape.scores(a, f"{mod.name} aux {i}") if k == "element" else a for i, (a, k) in enumerate(named))


def _layout(layout):
    if isinstance(layout, tuple | list):
        if len(layout) != 2 or layout[0] != layout[1]:
            raise ValueError(f"layout={layout!r}: queries and keys must have one layout")
        layout = layout[0]
    if layout is not None and not isinstance(layout, SequenceLayout):
        raise TypeError(f"layout={layout!r} must be a SequenceLayout, not {type(layout).__name__}")
    return layout


def _layout_of(static, size, T, S) -> SequenceLayout:
    axis, want = (static.axes[1], size[1]) if static.axes[0] is None else (static.axes[0], size[0])
    layout = SequenceLayout("contiguous", want) if static.layout is None else static.layout
    if layout.size != want:
        raise ValueError(f"layout={layout} must have the size of mesh axis {axis!r}, {want}")
    layout.check(T, "query length T")
    layout.check(S, "key length S")
    return layout


# Tokens for heads.


def _all_to_all(x, name, split, concat):
    return lax.all_to_all(x, name, split_axis=split, concat_axis=concat, tiled=True)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _replicated(name, count, x):
    """Keys `[B, T, K, H]`, each head `count` times, exchanged; in the accumulator's dtype, so that gradients are."""
    return _all_to_all(jnp.repeat(x, count, 2), name, 2, 1).astype(accumulator(x.dtype))


def _replicated_backward(name, count, like, g):
    g = _all_to_all(g, name, 1, 2)
    return (jnp.sum(g.reshape(*g.shape[:2], -1, count, g.shape[3]), 3).astype(like.dtype),)


_replicated.defvjp(
    lambda name, count, x: (_replicated(name, count, x), jnp.zeros((), x.dtype)), _replicated_backward
)


@dataclasses.dataclass(frozen=True)
class _Exchange:
    """From a device's tokens of all heads to all tokens of its heads; `restore(x, axis)` puts these in order."""

    name: str
    T: int
    N: int
    restore: Any

    def to_heads(self, arrays, context, mod):
        size, K = lax.axis_size(self.name), arrays.key.shape[2]
        if self.N % size:
            raise ValueError(
                f"query heads N={self.N} must be a multiple of {size}, the size of mesh axis {self.name!r}, to be "
                "exchanged for tokens"
            )
        query = _all_to_all(arrays.query, self.name, 2, 1)
        count = math.lcm(K, size) // K
        if count == 1:
            key, value = (_all_to_all(x, self.name, 2, 1) for x in (arrays.key, arrays.value))
        else:
            key, value = (_replicated(self.name, count, x) for x in (arrays.key, arrays.value))
        query, key, value = (self.restore(x, 1) for x in (query, key, value))
        kinds = () if mod is None else mod.kinds
        aux = (self.array(a) if k == "element" else self.heads(a, 0) for a, k in zip(arrays.aux, kinds, strict=True))
        arrays = dataclasses.replace(
            arrays, query=query, key=key, value=value, bias=None if arrays.bias is None else self.array(arrays.bias),
            sinks=None if arrays.sinks is None else self.heads(arrays.sinks, 0), aux=tuple(aux),
        )
        first_head = lax.axis_index(self.name) * (self.N // size)
        origin = jnp.zeros(4, jnp.int32).at[1].set(first_head)
        origin = vary(origin, varying_axes(arrays))
        return arrays, dataclasses.replace(context, mask=self.mask(context.mask), origin=origin)

    def array(self, x):
        """`[B or 1, N or 1, own rows or 1, S or 1]`: rows for heads, where it has both."""
        if x.shape[2] != self.T:
            return self.heads(x, 1)
        if x.shape[1] == 1:
            return self.gather(x, 2)
        return self.restore(_all_to_all(x, self.name, 1, 2), 2)

    def heads(self, x, axis):
        """The own heads of an array that has all."""
        if x.shape[axis] == 1:
            return x
        mine = self.N // lax.axis_size(self.name)
        return lax.dynamic_slice_in_dim(x, lax.axis_index(self.name) * mine, mine, axis)

    def gather(self, x, axis):
        return self.restore(lax.all_gather(x, self.name, axis=axis, tiled=True), axis)

    def mask(self, mask):
        def rest(mask):
            return Blocks(self.heads(mask.block_mask, 1), mask.block_size) if isinstance(mask, Blocks) else mask

        return map_mask(mask, self.array, lambda ids: self.gather(ids, 2), lambda ids: self.gather(ids, 3), rest)


# Whole arrays, outside of any `shard_map`.


@functools.partial(jax.jit, static_argnums=(0, 1))
def _on_mesh(static, mesh, x):
    names = static.names if len(static.names) > 1 else static.names[0]
    batch, whole = x["query"].ndim - 3, math.prod(mesh.shape[a] for a in static.names)
    T, S = x["query"].shape[-3], x["key"].shape[-3]
    for name, length in (("query length T", T), ("key length S", S)):
        SequenceLayout("contiguous", whole).check(length, name)
    _layout_of(static, [1 if a is None else mesh.shape[a] for a in static.axes], T, S)
    tokens = P(*[None] * batch, names)
    mapped = functools.partial(
        jax.shard_map, functools.partial(_on_device, static), in_specs=(_specs(x, names, tokens),),
        out_specs=(tokens, tokens), axis_names=set(static.names),
    )
    sharding = jax.typeof(x["query"]).sharding
    if not sharding.mesh.explicit_axes:
        return mapped(mesh=mesh)(x)
    # The loops inside leave the sharding over other axes to the compiler; out has that of the queries.
    explicit = sharding.mesh.explicit_axes
    mapped = mapped(mesh=sharding.mesh.update_axis_types(dict.fromkeys(explicit, AxisType.Auto)))
    out_sharding = P(*sharding.spec), P(*sharding.spec[:-1])
    return jax.sharding.auto_axes(mapped, axes=explicit, out_sharding=out_sharding)(x)


def _specs(x, names, tokens):
    T = x["query"].shape[-3]

    def rows(a):
        return P(*[None] * (a.ndim - 2), names) if a.ndim > 1 and a.shape[-2] == T else P()

    def last(a):
        return P(*[None] * (a.ndim - 1), names)

    specs = {name: jax.tree.map(lambda _: P(), a) for name, a in x.items()}
    specs |= dict(query=tokens, key=tokens, value=tokens)
    specs["bias"] = None if x["bias"] is None else rows(x["bias"])
    specs["mask"] = map_mask(
        x["mask"], rows, last, lambda ids: None if ids is None else last(ids), lambda m: jax.tree.map(lambda _: P(), m)
    )
    if x["score_mod"] is not None:
        mod = x["score_mod"]
        aux = tuple(rows(a) if k == "element" else P() for a, k in zip(mod.aux, mod.kinds, strict=True))
        specs["score_mod"] = dataclasses.replace(mod, aux=aux)
    return specs


def _find(count, names, mesh, operands, others):
    """`(names, mesh)` of the axes that the sequence is sharded over; the mesh is None inside a `shard_map` over them.

    `operands` and `others` are arrays by name: those with tokens at axis -3, and what the caller gave besides.
    """
    context = jax.sharding.get_abstract_mesh()
    if names and set(names) <= set(context.manual_axes):
        return names, None
    found = {name: _sharding(x) for name, x in (operands | others).items()}
    mesh = next((m for m in (mesh, *(m for m, _ in found.values()), context) if m is not None and not m.empty), None)
    if mesh is None:
        raise ValueError("no mesh: call inside a shard_map or under jax.set_mesh, or give mesh=")
    specs = {name: spec for name, (_, spec) in found.items() if spec is not None}
    along = {name: _tuple(specs[name][-3]) for name in operands if name in specs}
    names = names or along.get("query", ())
    if len(names) != count:
        cure = "use hybrid_attention, or name one" if names else "name the axis of the mesh"
        raise ValueError(f"axis=None, and query is {'' if names else 'not '}sharded along T{_over(names)}: {cure}")
    for name in names:
        if name not in mesh.axis_names:
            raise ValueError(f"axis={name!r} is not an axis of the mesh, {tuple(mesh.axis_names)}")
    for name, spec in specs.items():
        place = -3 if name in operands else -2
        wrong = [i for i, by in enumerate(spec) if i != len(spec) + place and set(_tuple(by)) & set(names)]
        if wrong or (name == "sinks" and any(set(_tuple(by)) & set(names) for by in spec)):
            rule = "do not shard it" if name == "sinks" else f"shard its {'tokens' if place == -3 else 'rows T'} alone"
            raise ValueError(f"{name} is sharded as {P(*spec)}; {rule}{_over(names)}")
    if len(set(along.values())) > 1:
        told = ", ".join(f"{name}{_over(by) or ' over no axis'}" for name, by in along.items())
        raise ValueError(f"query, key and value must be sharded alike along their tokens, not {told}")
    return names, mesh


def _over(names):
    return f" over {' and '.join(map(repr, names))}" if names else ""


def _sharding(x):
    """`(mesh, spec)` of an array, None where unknown; the spec has an entry for each axis."""
    if x is None or not hasattr(x, "ndim"):
        return None, None
    mesh = jax.typeof(x).sharding.mesh if isinstance(x, jax.Array) else None
    known = isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer) and isinstance(x.sharding, NamedSharding)
    if not known and (mesh is None or not mesh.explicit_axes):
        return mesh, None
    sharding = x.sharding if known else jax.typeof(x).sharding
    return sharding.mesh, (*sharding.spec, *[None] * (x.ndim - len(sharding.spec)))


def _tuple(by):
    return by if isinstance(by, tuple) else () if by is None else (by,)
