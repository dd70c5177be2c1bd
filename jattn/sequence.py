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
from jax.sharding import PartitionSpec as P

from jattn import _check, _dispatch, mods
from jattn._layout import SequenceLayout as SequenceLayout
from jattn._layout import path
from jattn._mapped import in_auto_mode
from jattn._mask import And, Or, parts
from jattn._mask_rules import Causal, Window
from jattn._mesh import find, over
from jattn._problem import Context, Differentiable, Options, Problem, accumulator
from jattn._ring import Plan, attend, map_mask
from jattn._tile import Shape
from jattn._ulysses import Exchange, counts_heads
from jattn._varying import vary, varying_axes
from jattn.attention import _operations, _slope_operations

__all__ = [
    "SequenceLayout", "StrategyChoice", "allgather_attention", "choose_strategy", "hybrid_attention", "ring_attention",
    "sequence_attention", "ulysses_attention",
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


def sequence_attention(
    query, key, value, bias=None, mask=None, *, axis=None, layout=None, mesh=None, strategy="auto",
    return_residual=False, **options,
):
    """`attention` of a sequence spread over a mesh axis, by the strategy named, or by the one that fits.

    Args:
        strategy: "ring", "allgather", "ulysses", or "auto": what `choose_strategy` says, and why.
        The others, returns, raises: those of `ring_attention`; ValueError for an unknown strategy.

    Example:
        >>> out = jattn.sequence_attention(q, k, v, is_causal=True, axis="sp", layout=layout)
    """
    if strategy not in ("auto", *_SINGLE):
        raise ValueError(f"strategy={strategy!r} is unknown; choose from 'auto', {', '.join(map(repr, _SINGLE))}")
    call = _describe("ring", _names(axis), layout, mesh, query, key, value, bias, mask, **options)
    static, *rest = call
    strategy = _choose(*call).strategy if strategy == "auto" else strategy
    static = dataclasses.replace(static, strategy=strategy, axes=_axes(strategy, static.names))
    return _run(static, *rest, return_residual)


_SINGLE = ("ring", "allgather", "ulysses")  # strategies over one axis


@dataclasses.dataclass(frozen=True)
class StrategyChoice:
    """The strategy of a call, for each one why it was or was not taken, and from `jattn.explain` what runs the part of
    it that a device computes at once."""

    strategy: str
    reasons: dict[str, str]
    on_device: _dispatch.Explanation | None = None

    def __repr__(self):
        lines = [f"runs as {self.strategy}: {self.reasons[self.strategy]}"]
        lines += [f"  not {n}: {why}" for n, why in self.reasons.items() if n != self.strategy]
        return "\n".join(lines + ([] if self.on_device is None else ["on a device:", repr(self.on_device)]))


def choose_strategy(query, key, value, bias=None, mask=None, *, axis=None, layout=None, mesh=None, **options):
    """What `sequence_attention(..., strategy="auto")` runs as, and why. Nothing runs.

    A ring, unless tokens can be exchanged for heads without replicating or gathering anything and a device sends less
    that way. The rule counts bytes; docs/sequence.md has what it leaves out.

    Args, raises: those of `ring_attention`.

    Returns:
        A `StrategyChoice` with `strategy`, `reasons` and a readable `repr`.

    Example:
        >>> print(jattn.sequence.choose_strategy(q, k, v, is_causal=True, axis="sp", mesh=mesh))
    """
    return _choose(*_describe("ring", _names(axis), layout, mesh, query, key, value, bias, mask, **options))


def _choose(static, arrays, mesh) -> StrategyChoice:
    (name,) = static.names
    size = lax.axis_size(name) if mesh is None else mesh.shape[name]
    layout = static.layout or SequenceLayout("contiguous", size)
    T, S = (arrays[n].shape[-3] * (size if mesh is None else 1) for n in ("query", "key"))
    N, K, H, D = *(arrays[n].shape[-2] for n in ("query", "key")), arrays["key"].shape[-1], arrays["value"].shape[-1]
    steps = len(_way(layout, T, S, arrays["mask"], static.query_offset)) - 1
    ring, exchanged = steps * S * K * (H + D), (size - 1) * (T * N + S * K) * (H + D) // size
    reasons = {"allgather": f"it would hold all S={S} keys and values on each device"}
    times = f"{exchanged / ring:.2g} times what a ring sends" if ring else "something, and a ring nothing"
    if K % size:
        reasons["ulysses"] = f"{size} devices do not divide K={K} key heads, which would be replicated"
    elif (name := _with_rows(arrays)) is not None:
        reasons["ulysses"] = f"the rows of {name} would have to be sent too"
    elif exchanged >= ring:
        reasons["ulysses"] = f"a device would send {times}"
    else:
        reasons["ulysses"] = f"a device sends {times}, and work is equal under every mask"
        reasons["ring"] = f"a device would send more, in {steps} of {size - 1} steps"
        return StrategyChoice("ulysses", reasons)
    reasons["ring"] = f"keys and values go {steps} of {size - 1} steps, hidden behind the work on those before"
    return StrategyChoice("ring", reasons)


def _with_rows(arrays):
    """The name of the first array with a row for each query, or None."""
    found, mod = [("bias", arrays["bias"])], arrays["score_mod"]
    if mod is not None:
        found += [(mod.name, a) for a, kind in zip(mod.aux, mod.kinds, strict=True) if kind == "element"]

    def seen(x):
        found.append(("mask", x))
        return x

    map_mask(arrays["mask"], seen, lambda ids: ids, lambda ids: ids)
    return next((n for n, a in found if a is not None and a.ndim >= 2 and a.shape[-2] != 1), None)


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


def _describe(
    strategy, names, layout, mesh, query, key, value, bias, mask, *, scale=None, is_causal=False, query_offset=0,
    query_seq_lengths=None, key_value_seq_lengths=None, local_window_size=None, segment_ids=None, logits_soft_cap=None,
    score_mod=None, sinks=None, dropout_rate=0.0, dropout_key=None, deterministic=False, implementation=None,
    config=None, **unknown,
):
    """`(static, arrays, mesh)` of a call; the mesh is None inside a `shard_map`."""
    if unknown:
        raise TypeError(f"unknown options {sorted(unknown)}: sequence-parallel ops take those of attention")
    query, key, value = _check.operands(query, key, value, "[*B, T, N, H]")
    names, mesh = find(
        2 if strategy == "hybrid" else 1, names, mesh, dict(query=query, key=key, value=value),
        dict(bias=bias, mask=mask if hasattr(mask, "ndim") else None, sinks=sinks),
    )
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
        strategy, _axes(strategy, names), _layout(layout), static_scale, query_offset if offset is None else None,
        _check.soft_cap(logits_soft_cap), threshold, _check.flag(deterministic, "deterministic"), implementation,
        config,
    )
    arrays = dict(
        query=query, key=key, value=value, bias=None if bias is None else _check.array(bias, "bias"), mask=mask,
        scale=scale, sinks=None if sinks is None else _check.array(sinks, "sinks"), score_mod=score_mod,
        dropout_key=words, query_offset=None if offset is None else _check.array(offset, "query_offset"),
        query_lengths=query_lengths, key_lengths=key_lengths,
    )
    return static, arrays, mesh


def _axes(strategy, names):
    return {"hybrid": names, "ulysses": (None, *names)}.get(strategy, (*names, None))


def _call(strategy, names, *args, return_residual=False, **options):
    return _run(*_describe(strategy, names, *args, **options), return_residual)


def _run(static, arrays, mesh, return_residual):
    _check.flag(return_residual, "return_residual")
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
        where = over(self.names)
        if x.ndim >= 1 and x.shape[-1] not in (1, self.num_keys) and x.shape[-1] == S:
            raise ValueError(
                f"{name} has shape {x.shape} on a device: its columns are cut to S={S} of {self.num_keys}; shard its "
                f"rows T alone{where}, and leave all {self.num_keys} columns in natural order"
            )
        if x.ndim >= 2 and x.shape[-2] not in (1, T) and x.shape[-2] == self.num_queries:
            raise ValueError(
                f"{name} has shape {x.shape} on a device: all T={self.num_queries} rows; shard its rows{where}, {T} a "
                "device, in the layout of the queries"
            )
        return Shape(self.batch, self.heads, T, self.num_keys).scores(x, name)


def _on_device(static, x):
    plan, arrays, context, change, _ = _planned(static, x)
    out, lse = attend(plan, arrays, context)
    if change is not None:
        out, lse = (change.tokens_for_heads(a, 2, 1) for a in (out, lse))
    batch = x["query"].shape[:-3]
    return tuple(a.reshape(*batch, *a.shape[1:]) for a in (out, lse))


def _planned(static, x):
    """What a device computes by, from which arrays, how they were exchanged, and what dispatch was asked."""
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
            f"{over(static.names)}"
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
    change = None
    if ulysses is not None:
        one, count = SequenceLayout("contiguous", 1), counts_heads(context.mask, mod, static.dropout_threshold > 0)
        change = Exchange.of(ulysses, layout if ring is None else one, T, N, arrays.key.shape[2], count)
        arrays, context = change.to_heads(arrays, context, mod)
        layout = one if ring is None else layout
    plan, problem = _plan(static, layout, arrays, context, mod, static_offset)
    return plan, arrays, context, change, problem


def _plan(static, layout, arrays, context, mod, offset) -> tuple[Plan, Problem]:
    """The options of every rectangle, resolved, and the way of the keys."""
    (B, T, N, H), (S, K) = arrays.query.shape, arrays.key.shape[1:3]
    dtype = accumulator(arrays.query.dtype)
    operations, slope_operations = _operations(context.mask, mod, dtype), _slope_operations(mod, dtype)
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
        stride=layout.stride, partial=True, operations=operations, slope_operations=slope_operations,
        mask_kinds=() if context.mask is None else tuple(sorted({type(m).__name__ for m in parts(context.mask)})),
    )
    options = _dispatch.resolve(problem, options, static.implementation, static.config)
    known = offset if context.query_offset is None else None
    way = _way(layout, T * layout.size, S * layout.size, context.mask, known)
    return Plan(layout, static.axes[0] if layout.size > 1 else None, way, gather, options), problem


def _way(layout, T, S, mask, offset):
    """The way of the keys; an offset that is no int is not known yet."""
    left, right = _band(mask) if isinstance(offset, int) else (None, None)
    return path(layout, T, S, None if left is None else left - offset, None if right is None else right + offset)


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


# Whole arrays, outside of any `shard_map`.


@functools.partial(jax.jit, static_argnums=(0, 1))
def _on_mesh(static, mesh, x):
    names = static.names if len(static.names) > 1 else static.names[0]
    batch, whole = x["query"].ndim - 3, math.prod(mesh.shape[a] for a in static.names)
    T, S = x["query"].shape[-3], x["key"].shape[-3]
    for name, length in (("query length T", T), ("key length S", S)):
        SequenceLayout("contiguous", whole).check(length, name)
    layout = _layout_of(static, [1 if a is None else mesh.shape[a] for a in static.axes], T, S)
    if not T or not S:
        return _over_no_keys(layout, x)
    tokens = P(*[None] * batch, names)
    mapped = functools.partial(
        jax.shard_map, functools.partial(_on_device, static), in_specs=(_specs(x, names, tokens),),
        out_specs=(tokens, tokens), axis_names=set(static.names),
    )
    sharding = jax.typeof(x["query"]).sharding
    if not sharding.mesh.explicit_axes:
        return mapped(mesh=in_auto_mode(mesh))(x)
    # The loops inside leave the sharding over other axes to the compiler; out has that of the queries.
    explicit, mapped = sharding.mesh.explicit_axes, mapped(mesh=in_auto_mode(sharding.mesh))
    out_sharding = P(*sharding.spec), P(*sharding.spec[:-1])
    return jax.sharding.auto_axes(mapped, axes=explicit, out_sharding=out_sharding)(x)


def _over_no_keys(layout, x):
    """The results where there is no key (or no query). XLA for CPUs crashes on empty arrays that are sharded."""
    query, sinks, lengths = x["query"], x["sinks"], x["query_lengths"]
    lse = jnp.full(query.shape[:-1], -jnp.inf, accumulator(query.dtype))
    if sinks is not None:
        lse = jnp.broadcast_to(sinks.astype(lse.dtype), lse.shape)
    if lengths is not None:
        row = layout.positions(query.shape[-3])[:, None]
        lse = jnp.where(row < lengths.reshape(*query.shape[:-3], 1, 1), lse, -jnp.inf)
    return jnp.zeros((*query.shape[:-1], x["value"].shape[-1]), query.dtype), lse


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
