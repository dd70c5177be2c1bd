"""Decoding over a cache that is spread over the devices of a mesh axis: each attends to the keys that it has.

Every device has all queries, computes their attention over its own keys, and all merge the P partial results
`(out, lse)`, which one all-gather brings. Keys and values do not travel. docs/sequence.md has layouts and costs.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from jattn import _check, _dispatch, decode, mods, paged
from jattn._collectives import gather_copies
from jattn._layout import SequenceLayout
from jattn._mapped import check_same, check_sharding, mapped, mesh_for
from jattn._mask_rules import Causal
from jattn.paged import PagedCache
from jattn.partials import merge
from jattn.reference.spread import Place, SpreadArrays, SpreadOptions

__all__ = ["sequence_append", "sequence_decode_attention", "sequence_paged_attention"]


def sequence_decode_attention(
    query, key, value, lengths=None, mask=None, *, axis, layout=None, mesh=None, return_residual=False, **options
):
    """`decode_attention` over a contiguous cache whose tokens are spread over a mesh axis.

    Inside your own `shard_map` keys and values are one device's, and the queries are the same on all. Outside, they are
    whole, and the op maps itself over `axis`; another axis, over heads, is left as it is.

    Args:
        query: `[*B, T, N, H]`, T from 1 to 64, not sharded over `axis`.
        key: `[*B, S, K, H]`, slots in layout order; inside `shard_map` S is the device's own number. An array in the
            query's dtype, or a `Quantized`.
        value: `[*B, S, K, D]`, likewise.
        lengths: int `[*B]`, tokens of each whole sequence, those of the queries included (None: all slots hold one).
        mask: as in `decode_attention`; positions count in the undivided sequence.
        axis: name of the mesh axis.
        layout: a `SequenceLayout` as large as the axis, of the slots; None is contiguous. In a "striped" cache token s
            is on device s mod P, so that all devices have equally many whatever the length.
        mesh: None, or outside `shard_map` the mesh, where neither arrays nor `jax.set_mesh` tell.
        **options: those of `decode_attention`. implementation="mosaic" runs calls without masks and modifiers, and
            with `is_causal` for one query a sequence; its partial results have the query's dtype.

    Returns:
        `[*B, T, N, D]` in the query's dtype, the same on every device; with `return_residual` also lse `[*B, T, N]`,
        as `decode_attention`.

    Raises:
        ValueError, TypeError: as `decode_attention`; also slots that the layout does not divide, an axis that is not in
            the mesh, queries or lengths that are sharded over it.
        NotImplementedError: as `decode_attention`.

    Example:
        >>> import jax, jax.numpy as jnp, jattn
        >>> q, k, v = jnp.ones((2, 1, 4, 8)), jnp.ones((2, 64, 2, 8)), jnp.ones((2, 64, 2, 8))
        >>> mesh = jax.make_mesh((1,), ("sp",))
        >>> jattn.sequence_decode_attention(q, k, v, jnp.array([50, 0]), axis="sp", mesh=mesh).shape
        (2, 1, 4, 8)

    Source: the merge of Flash-Decoding (Dao, Haziza, Massa, Sizov, 2023), over devices; Yang et al., "Context
    Parallelism for Scalable Million-Token Inference" (arXiv:2411.01783) for decoding so.
    """
    call = prepare_decode(query, key, value, lengths, mask, axis=axis, layout=layout, mesh=mesh, **options)
    return _run(call, return_residual)


def sequence_paged_attention(
    query, cache, cu_seqlens_q=None, mask=None, *, axis, mesh=None, return_residual=False, **options
):
    """`paged_attention` over a cache whose pages are spread over a mesh axis: page w of a sequence on device w mod P.

    The cache is a `PagedCache` like any other: P · n pages in its pools, of which device r has those from r · n to
    (r + 1) · n - 1, and entry w of a block table names a page of device w mod P. So lengths grow evenly, and `gather`,
    the allocator's pages (one allocator a device) and `debug.check_cache` are what they are. Ids of other devices'
    pages are as unspecified as ids out of range.

    Args:
        query: `[B, T, N, H]`, or packed `[T, N, H]` with `cu_seqlens_q`; not sharded over `axis`.
        cache: pools sharded along their pages; inside your own `shard_map` they are the device's own n pages. Block
            tables (ids as above) and lengths are whole on every device.
        cu_seqlens_q, mask: as in `paged_attention`; positions count in the undivided sequence.
        axis, mesh, **options: as in `sequence_decode_attention`.

    Returns:
        As `paged_attention`, the same on every device.

    Raises:
        ValueError, TypeError: as `paged_attention`; also pools that P does not divide, an axis that is not in the mesh,
            queries, tables or lengths that are sharded over it.
        NotImplementedError: as `paged_attention`.

    Example:
        >>> import jax, jax.numpy as jnp, jattn
        >>> mesh = jax.make_mesh((1,), ("sp",))
        >>> cache = jattn.PagedCache.zeros(8, 16, 2, 8, sequences=2, pages_per_sequence=4)
        >>> k = jnp.ones((2, 1, 2, 8))
        >>> cache = jattn.sequence_append(cache, k, k, axis="sp", mesh=mesh)
        >>> jattn.sequence_paged_attention(jnp.ones((2, 1, 4, 8)), cache, axis="sp", mesh=mesh).shape
        (2, 1, 4, 8)

    Source: as `sequence_decode_attention`; Kwon et al., "PagedAttention" (2023).
    """
    return _run(prepare_paged(query, cache, cu_seqlens_q, mask, axis=axis, mesh=mesh, **options), return_residual)


def sequence_append(cache, key, value, cu_seqlens=None, *, axis, mesh=None, seq_lengths=None, rotate=None):
    """`append` to a cache whose pages are spread over a mesh axis: each device writes the tokens of its own pages.

    Args:
        cache: as in `sequence_paged_attention`.
        key, value: the new tokens, `[B, T, K, H]` and `[B, T, K, D]` or packed, not sharded over `axis`.
        cu_seqlens, seq_lengths, rotate: as in `append`.
        axis, mesh: as in `sequence_paged_attention`.

    Returns:
        The cache with its tokens and lengths, spread as before. No message is sent.

    Raises:
        ValueError, TypeError: as `append` and `sequence_paged_attention`.

    Example:
        See `sequence_paged_attention`.
    """
    cache, mesh = _spread_cache(cache, axis, mesh)
    x = dict(cache=cache, key=_check.array(key, "key"), value=_check.array(value, "value"))
    if cu_seqlens is not None:
        x["cu_seqlens"] = _check.cu_seqlens(cu_seqlens, "cu_seqlens")
    if seq_lengths is not None:
        x["seq_lengths"] = _check.integers(seq_lengths, "seq_lengths")
    _refuse_spread({n: a for n, a in x.items() if n != "cache"}, axis)
    if mesh is None or not cache.num_pages:
        return _append_on_device(axis, rotate, x) if mesh is None else paged.append(**x, rotate=rotate)
    return _append_on_mesh(axis, rotate, mesh, x)


# What a call is.


@dataclasses.dataclass(frozen=True)
class _Static:
    """What is compiled in, as the caller said it."""

    op: str
    axis: str
    place: Place
    capacity: int  # slots of a sequence on all devices together
    scale: float | None
    soft_cap: float | None
    implementation: str | None
    config: Any


@dataclasses.dataclass(frozen=True)
class Call:
    """A checked call: the mesh is None inside a `shard_map`, `stored` the specs of keys and values."""

    static: _Static
    mesh: Any
    arrays: dict[str, Any]
    stored: Any

    @property
    def specs(self):
        return {n: jax.tree.map(lambda _: P(), a) for n, a in self.arrays.items()} | dict(stored=self.stored)


def prepare_decode(query, key, value, lengths=None, mask=None, *, axis, layout=None, mesh=None, **options) -> Call:
    """Checks a call of `sequence_decode_attention` and describes it."""
    query, key, value = _check.array(query, "query"), _check.stored(key, "key"), _check.stored(value, "value")
    for name, x in (("query", query), ("key", key), ("value", value)):
        if len(x.shape) < 3 or x.shape[:-3] != query.shape[:-3]:
            raise ValueError(f"{name} has shape {x.shape}; expected [*B, T or S, heads, H], with one *B for all")
    mesh, batch = mesh_for(axis, mesh, (query, key, value)), query.shape[:-3]
    size = lax.axis_size(axis) if mesh is None else mesh.shape[axis]
    layout = _layout(layout, axis, size)
    slots = key.shape[-3] * (size if mesh is None else 1)
    layout.check(slots, "key length S")
    run = slots // layout.multiple if layout.stride == 1 else 1
    lengths = _check.lengths(slots if lengths is None else lengths, "lengths", batch, slots).reshape(batch)
    for name, x in (("key", key), ("value", value)):
        check_sharding(name, x, axis, len(batch), "tokens")
    stored = jax.tree.map(lambda x: P(*[None] * len(batch), axis) if x.ndim >= len(batch) + 2 else P(), (key, value))
    x = dict(query=query, stored=(key, value), lengths=lengths)
    place = Place(max(run, 1), size, layout.kind == "zigzag")
    return _describe("decode_attention", axis, mesh, place, slots, x, stored, mask, **options)


def prepare_paged(query, cache, cu_seqlens_q=None, mask=None, *, axis, mesh=None, **options) -> Call:
    """Checks a call of `sequence_paged_attention` and describes it."""
    cache, mesh = _spread_cache(cache, axis, mesh)
    x = dict(
        query=_check.array(query, "query"), stored=(cache.key_pages, cache.value_pages),
        tables=paged._int32(cache.block_tables), lengths=paged._int32(cache.lengths),
        cu=None if cu_seqlens_q is None else _check.cu_seqlens(cu_seqlens_q, "cu_seqlens_q"),
    )  # fmt: skip
    place = Place(cache.page_size, lax.axis_size(axis) if mesh is None else mesh.shape[axis])
    stored = _pools(x["stored"], axis)
    return _describe("paged_attention", axis, mesh, place, cache.capacity, x, stored, mask, **options)


def _describe(
    op, axis, mesh, place, capacity, x, stored, mask, *, scale=None, is_causal=True, query_seq_lengths=None,
    local_window_size=None, logits_soft_cap=None, score_mod=None, sinks=None, implementation=None, config=None,
):  # fmt: skip
    mask = _check.mask(
        mask, is_causal=is_causal, local_window_size=local_window_size, segment_ids=None, key_lengths=None
    )
    _check.positional(mask, score_mod)
    if score_mod is not None and not isinstance(score_mod, mods.ScoreMod):
        score_mod = mods.score_mod(score_mod)
    if x["query"].ndim < 3:
        raise ValueError(f"query has shape {x['query'].shape}; expected [.., T, N, H]")
    static_scale, scale = _check.scale(scale, x["query"].shape[-1])
    counts = _check.lengths(query_seq_lengths, "query_seq_lengths", x["lengths"].shape, x["query"].shape[-3])
    static = _Static(op, axis, place, capacity, static_scale, _check.soft_cap(logits_soft_cap), implementation, config)
    x = x | dict(
        mask=mask, score_mod=score_mod, scale=scale, sinks=None if sinks is None else _check.array(sinks, "sinks"),
        query_lengths=None if counts is None else counts.reshape(x["lengths"].shape),
    )  # fmt: skip
    x = {name: a for name, a in x.items() if a is not None}
    _refuse_spread({n: a for n, a in x.items() if n != "stored"}, axis)
    return Call(static, mesh, x, stored)


def _run(call, return_residual):
    _check.flag(return_residual, "return_residual")
    static, x = call.static, call.arrays
    if call.mesh is None:
        out, lse = _on_device(static, x)
    elif 0 in (static.capacity, x["stored"][0].shape[0], *x["query"].shape):
        out, lse = _without_devices(static, x)
    else:
        out, lse = _on_mesh(static, call.mesh, x, _Specs(call.specs))
    return (out, lse) if return_residual else out


def _without_devices(static, x):
    """Where there is nothing to spread. XLA for CPUs crashes on empty arrays that are sharded."""
    options = dict(
        mask=x.get("mask"), is_causal=False, score_mod=x.get("score_mod"), logits_soft_cap=static.soft_cap,
        scale=static.scale if static.scale is not None else x["scale"], sinks=x.get("sinks"), return_residual=True,
        query_seq_lengths=x.get("query_lengths"), implementation=static.implementation, config=static.config,
    )  # fmt: skip
    if static.op == "decode_attention":
        return decode.decode_attention(x["query"], *x["stored"], x["lengths"], **options)
    return paged.paged_attention(
        x["query"], PagedCache(*x["stored"], x["tables"], x["lengths"]), x.get("cu"), **options
    )


def _layout(layout, axis, size):
    if layout is None:
        return SequenceLayout("contiguous", size)
    if not isinstance(layout, SequenceLayout):
        raise TypeError(f"layout={layout!r} must be a SequenceLayout, not {type(layout).__name__}")
    if layout.size != size:
        raise ValueError(f"layout={layout} must have the size of mesh axis {axis!r}, {size}")
    return layout


def _spread_cache(cache, axis, mesh):
    cache = paged.checked(cache)
    mesh = mesh_for(axis, mesh, cache)
    if mesh is not None and cache.num_pages % mesh.shape[axis]:
        raise ValueError(
            f"num_pages={cache.num_pages} must be a multiple of {mesh.shape[axis]}, the size of mesh axis {axis!r}"
        )
    for name in ("key_pages", "value_pages"):
        check_sharding(name, getattr(cache, name), axis, 0, "pages")
    for name in ("block_tables", "lengths"):
        check_sharding(name, getattr(cache, name), axis)
        check_same(name, getattr(cache, name), axis)
    return cache, mesh


def _refuse_spread(arrays, axis):
    for name, x in arrays.items():
        check_sharding(name, x, axis)
        check_same(name, x, axis)


# One device's part, inside a `shard_map`.


def _on_device(static, x):
    call = device_call(static, x)
    out, lse = paged.run(call, implementation=static.implementation, config=static.config, return_residual=True)
    out, lse = _merged(static.axis, out, lse)
    shape = x["query"].shape[:-1]
    return out.astype(x["query"].dtype).reshape(*shape, out.shape[-1]), lse.reshape(shape)


def device_call(static, x) -> paged.Call:
    """What a device attends to: its own keys."""
    device = lax.axis_index(static.axis)
    mask, mod, options = x.get("mask"), x.get("score_mod"), dict(query_seq_lengths=x.get("query_lengths"))
    alone = "cu" not in x and x["query"].shape[-3] == 1
    # The last token sees all that there is: then positions do not matter, nor which tokens a device has.
    plain = mod is None and (mask is None or isinstance(mask, Causal) and alone)
    options |= dict(
        mask=None if plain else mask, is_causal=False, score_mod=mod, logits_soft_cap=static.soft_cap,
        scale=static.scale if static.scale is not None else x["scale"], sinks=x.get("sinks"),
    )  # fmt: skip
    if static.op == "decode_attention":
        call = decode.prepare(x["query"], *x["stored"], **options)
    else:
        tables = _own_tables(x["tables"], device, static.place.size, x["stored"][0].shape[0])
        call = paged.prepare(x["query"], PagedCache(*x["stored"], tables, x["lengths"]), x.get("cu"), **options)
    return _placed(static, call, x["lengths"].reshape(-1), device, plain)


def _placed(static, call, lengths, device, plain):
    """The call over a device's own keys, from that of one that has all keys in its slots."""
    arrays, op = call.arrays, f"sequence_{static.op}"
    if arrays.sinks is not None:  # a sink joins the denominator once
        sinks = jnp.where(device == 0, arrays.sinks, jnp.full_like(arrays.sinks, -jnp.inf))
        arrays = dataclasses.replace(arrays, sinks=sinks)
    if plain:
        own = static.place.count(jnp.clip(lengths, 0, static.capacity), device)
        options = dataclasses.replace(call.options, partial=True)
        return dataclasses.replace(call, arrays=dataclasses.replace(arrays, lengths=own), options=options)
    if static.implementation in set(_dispatch.names(static.op)) - set(_dispatch.names(op)):
        raise NotImplementedError(
            f"no implementation of jattn.{op} can run this call: {static.implementation}: knows no positions of keys "
            "that are spread; it runs calls without masks and modifiers, and with is_causal for one query a sequence"
        )
    fields = {f.name: getattr(arrays, f.name) for f in dataclasses.fields(arrays)}
    arrays = SpreadArrays(**fields | dict(lengths=lengths), device=device)
    fields = {f.name: getattr(call.options, f.name) for f in dataclasses.fields(call.options)}
    options = SpreadOptions(**fields | dict(partial=True), place=static.place, capacity=static.capacity)
    return paged.Call(arrays, options, dataclasses.replace(call.problem, op=op))


def _merged(axis, out, lse):
    """Attention over the keys of all devices, the same bits on each: all merge in the order of the axis."""
    message = jnp.concatenate([out.astype(lse.dtype), lse[..., None]], -1)
    every = gather_copies(message, axis, to="invarying")
    return merge(*((every[i, ..., :-1], every[i, ..., -1]) for i in range(every.shape[0])))


def _own_tables(tables, device, size, pages):
    """The entries `[B, W / size]` of a device's own pages, as numbers in its pool; the last may be nobody's."""
    tables = jnp.pad(tables, ((0, 0), (0, -tables.shape[1] % size)), constant_values=-1)
    tables = tables.reshape(tables.shape[0], -1, size)
    return _own_ids(lax.dynamic_index_in_dim(tables, device, 2, keepdims=False), device, pages)


def _own_ids(ids, device, pages):
    return jnp.where(ids < 0, -1, ids - device * pages)


def _append_on_device(axis, rotate, x):
    cache = x["cache"]
    # The pages of others have ids out of range here, where nothing is written.
    tables = _own_ids(paged._int32(cache.block_tables), lax.axis_index(axis), cache.num_pages)
    new = paged.append(**x | dict(cache=dataclasses.replace(cache, block_tables=tables)), rotate=rotate)
    return dataclasses.replace(new, block_tables=cache.block_tables)


# Whole arrays, outside of any `shard_map`.


class _Specs:
    """A pytree of specs that is hashable."""

    def __init__(self, tree):
        self.leaves, self.structure = jax.tree.flatten(tree, is_leaf=lambda x: isinstance(x, P))

    def __hash__(self):
        return hash((tuple(self.leaves), self.structure))

    def __eq__(self, other):
        return (self.leaves, self.structure) == (other.leaves, other.structure)

    @property
    def tree(self):
        return self.structure.unflatten(self.leaves)


def _pools(stored, axis):
    return jax.tree.map(lambda x: P(axis) if x.ndim >= 3 else P(), stored)


@functools.partial(jax.jit, static_argnums=(0, 1, 3))
def _on_mesh(static, mesh, x, specs):
    def out_sharding(found):
        spec = found["query"]
        return P(*spec), P(*spec[:-1])

    return mapped(functools.partial(_on_device, static), mesh, static.axis, x, specs.tree, (P(), P()), out_sharding)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _append_on_mesh(axis, rotate, mesh, x):
    specs = {name: jax.tree.map(lambda _: P(), a) for name, a in x.items()}
    pools = {n: _pools(getattr(x["cache"], n), axis) for n in ("key_pages", "value_pages")}
    specs["cache"] = dataclasses.replace(specs["cache"], **pools)
    body = functools.partial(_append_on_device, axis, rotate)
    return mapped(body, mesh, axis, x, specs, specs["cache"], lambda found: found["cache"])
