"""`implementation="mosaic"` of `decode_attention` and `paged_attention`: what the Hopper kernel needs, and its reasons.

The kernel is in `jattn.pallas.hopper.decode`.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax

from jattn._varying import unvary, vary, varying_axes
from jattn.pallas import lowering, partition, primitives
from jattn.pallas.attention import PLATFORM, why_not_here
from jattn.pallas.hopper.decode import launch
from jattn.pallas.hopper.decode_plan import ROWS, DecodeConfig, Inputs, Plan, quantised_rows
from jattn.pallas.hopper.mma import FORMATS
from jattn.pallas.lowering import readable, with_bools

__all__ = ["PLATFORM", "DecodeConfig", "choose", "forward", "why_not", "why_not_here"]

_MULTIPROCESSORS = 132  # of an H100 or H200 SXM; on a card with fewer, the rest of the blocks run afterwards
_PARTS_BYTES = 2**31  # of all queries: each has a float32 part a split
# A sequence's, of one key head, whose parts may be more: they are a quarter, with H = D, of the keys and values that
# block tables have room for, and whether decoding runs here must not depend on how many sequences there are.
_QUERIES = 256


def forward(arrays, options, *, interpret=False, multiprocessors=_MULTIPROCESSORS):
    """`(out, lse float32)` of a described call, shaped as its query, out in its dtype (see `_problem`).

    Args:
        interpret: emulate the kernel on the CPU, with race detection.
        multiprocessors: thread blocks at most.
    """
    axes, shape = varying_axes(arrays), arrays.query.shape[:-1]
    arrays = unvary(arrays)  # the body of a kernel is not about them
    if arrays.cu_queries is not None:
        arrays = dataclasses.replace(arrays, query=arrays.query[None])
    part = functools.partial(_part, options=options, interpret=interpret, multiprocessors=multiprocessors)
    if 0 in arrays.query.shape or 0 in arrays.key.shape[:2] or 0 in arrays.block_tables.shape:
        out, lse = _nothing(arrays)
    elif interpret:  # it calls back to the host in order, which what may be divided cannot
        out, lse = part(arrays)
    else:
        out, lse = _divided(part, arrays, own_pages=not options.config.tables)
    return vary((out.reshape(*shape, arrays.value.shape[3]), lse.reshape(shape)), axes)


def _nothing(arrays):
    """The results of a call without keys or without queries."""
    *shape, _ = arrays.query.shape
    out = jnp.zeros((*shape, arrays.value.shape[3]), arrays.query.dtype)
    return out, jnp.full(shape, -jnp.inf, jnp.float32)


def _part(arrays, options, interpret, multiprocessors, origin=None):
    """`(out, lse)` of one device's part of the batch and the heads, or of all; not empty.

    Args:
        origin: int32 `[2]`, the batch index and the head where that part begins.
    """
    (_, T, N, H), (P, page, K, _), (B, width) = arrays.query.shape, arrays.key.shape, arrays.block_tables.shape
    spec = lowering.lower_mask(arrays.mask, row_bounds=False)
    left, right = _bounds(spec, T, width * page)
    plan = Plan(
        B=B, T=T, S=width * page, N=N, K=K, H=H, D=arrays.value.shape[3], pages=P, page=page if width > 1 else None,
        dtype=arrays.query.dtype, scale=options.scale, left=left, right=right, soft_cap=options.soft_cap,
        config=options.config, sinks=arrays.sinks is not None, packed=arrays.cu_queries is not None,
        scales=None if arrays.key_scale is None else tuple(map(_per, (arrays.key_scale, arrays.value_scale))),
        mod=with_bools(options.mod, arrays.aux), rule=spec.rule, rule_of_new=_is_of_new(arrays.mask),
    )  # fmt: skip
    scales = dict(k_scale=arrays.key_scale, v_scale=arrays.value_scale)
    inputs = Inputs(
        q=arrays.query.reshape(-1, N, H), k=arrays.key, v=arrays.value, lengths=arrays.lengths,
        tables=arrays.block_tables if options.config.tables else None, cu_queries=arrays.cu_queries,
        query_lengths=arrays.query_lengths, limits=None if spec.key_length is None else spec.key_length.reshape(-1),
        scale=None if arrays.scale is None else arrays.scale.astype(jnp.float32).reshape(1),
        sinks=None if arrays.sinks is None else arrays.sinks.astype(jnp.float32)[None],
        aux=tuple(map(readable, arrays.aux)), mask_arrays=tuple(map(readable, spec.arrays)),
        origin=origin if plan.mod or plan.rule else None,
        **{name: x if x is None or x.ndim else x[None] for name, x in scales.items()},
    )  # fmt: skip
    out, lse = launch(plan, inputs, interpret=interpret, multiprocessors=multiprocessors)
    shape = arrays.query.shape[:3]
    return out.reshape(*shape, -1), lse.reshape(shape)


def _per(scale) -> str:
    """What one of these scales belongs to."""
    return {0: "tensor", 1: "head", 3: "token"}[scale.ndim]


def _is_of_new(mask) -> bool:
    """Whether what a mask hides beyond its bounds is among the keys of the queries themselves: a tree does."""
    return all(type(term).__name__ in ("Causal", "Window", "Lengths", "Tree") for term in lowering.conjunction(mask))


def _bounds(spec, T, S):
    """The window of a mask, None where it hides no key: the last of T queries sits at most at S - 1, the first at most
    T - 1 before the last key. Numbers that hide all are cut to what 32 bits can add."""
    left = None if spec.left is None or spec.left >= S - 1 else max(spec.left, -S - T)
    right = None if spec.right is None or spec.right >= T - 1 else max(spec.right, -S - T)
    return left, right


def _divided(part, arrays, own_pages: bool):
    """`part(arrays)`, on each device for its part of the batch and the heads (see `partition`); packed queries stay
    together.

    Args:
        own_pages: whether sequence b is page b; else every device that has some of the sequences has all pages.
    """
    heads, group = arrays.query.shape[2], arrays.query.shape[2] // arrays.key.shape[2]
    operands, structure = jax.tree.flatten(arrays)
    batch = None if arrays.cu_queries is not None else "b"
    page = batch if own_pages else None
    known = {
        "query": (batch, None, "n", None), "key": (page, None, "k", None), "value": (page, None, "k", None),
        "block_tables": (batch, None), "lengths": (batch,), "query_lengths": (batch,), "cu_queries": (None,),
        "scale": (), "sinks": ("n",),
        **{f"{x}_scale": _scale_letters(getattr(arrays, f"{x}_scale"), page) for x in ("key", "value")},
    }  # fmt: skip

    def letters(path, x):
        if path[0].name in known:
            return known[path[0].name]
        sizes = zip((batch, "n"), x.shape, strict=False)  # of masks and modifiers: [B or 1, N or 1, ...]
        return (*(letter if size > 1 else None for letter, size in sizes), *[None] * (x.ndim - 2))

    def one(first, head, *operands):
        arrays = jax.tree.unflatten(structure, operands)
        own = partition.with_own_keys(arrays, head[0], group)
        own = _with_own_scales(own, head[0] // group, arrays.key.shape[2])
        return part(own, origin=jnp.stack([first[0], head[0]]))

    leaves, _ = jax.tree_util.tree_flatten_with_path(arrays)
    axes = [(batch,), ("n",), *(letters(path, x) for path, x in leaves)]
    results = (batch, None, "n", None), (batch, None, "n")
    numbers = (jnp.arange(n, dtype=jnp.int32) for n in (arrays.query.shape[0], heads))
    return partition.cut(one, axes, results)(*numbers, *operands)


def _scale_letters(scale, page):
    return {0: (), 1: ("k",), 3: (page, None, "k")}[0 if scale is None else scale.ndim]


def _with_own_scales(arrays, first, heads):
    """Leaves out scales of the key heads, of `heads`, whose keys were left out."""
    mine = arrays.key.shape[2]
    if mine == heads or arrays.key_scale is None:
        return arrays

    def own(scale):
        return scale if scale.ndim == 0 else lax.dynamic_slice_in_dim(scale, first, mine, axis=scale.ndim - 1)

    return dataclasses.replace(arrays, key_scale=own(arrays.key_scale), value_scale=own(arrays.value_scale))


def choose(problem, config) -> DecodeConfig:
    """The caller's config, checked, or splits of 1024 keys, whatever the call: a choice by its size would show in the
    bits. Splits of 512 cost 3% more: twice the parts to write and to merge."""
    if config is None:
        config = DecodeConfig()
    if not isinstance(config, DecodeConfig):
        raise TypeError(f"config={config!r} is not a jattn.pallas.decode.DecodeConfig, which mosaic takes")
    return dataclasses.replace(config, tables=problem.op == "paged_attention")


def why_not(problem) -> str | None:
    """The reason why this kernel cannot run the problem, or None."""
    if problem.dtype not in ("bfloat16", "float16"):
        return f"runs bfloat16 and float16, not {problem.dtype}"
    quantised = problem.stored != (problem.dtype, problem.dtype)
    if quantised and (problem.dtype != "bfloat16" or not set(problem.stored) <= set(FORMATS)):
        stored = " and ".join(problem.stored)
        return f"runs bfloat16 over int8 and fp8 keys and values, not {problem.dtype} over {stored}"
    for letter, width in (("H", problem.H), ("D", problem.D)):
        if width % 8 or not 8 <= width <= 256:
            return f"head dims must be multiples of 8 up to 256, not {letter}={width}"
        if quantised and width % 16:
            return f"head dims of quantised caches must be multiples of 16, not {letter}={width}"
    sizes = dict(B=problem.B, T=problem.T, S=problem.S, N=problem.N)
    symbolic = [f"{letter}={size}" for letter, size in sizes.items() if not isinstance(size, int)]
    if symbolic:
        return f"needs static shapes, not {symbolic[0]}"
    most, whose = (quantised_rows(problem.D)[-1], " of a quantised cache") if quantised else (ROWS, "")
    if problem.N // problem.K > most:
        return f"at most {most} query heads for a key head{whose}, not N/K={problem.N // problem.K}"
    if problem.partial:
        return "pieces of a longer sequence are not implemented"
    if problem.S > problem.page and problem.page % 16:
        return f"pages must be multiples of 16, not {problem.page}"
    unknown = [kind for kind in problem.mask_kinds if kind not in lowering.KINDS]
    if unknown:
        return f"the kernel does not know masks of kind {unknown[0]}"
    packed = problem.sequences is not None
    queries = problem.T if packed else problem.B * problem.T
    parts = 4 * queries * problem.N * problem.D * -(-problem.S // DecodeConfig().split)
    if problem.T * problem.N // problem.K > _QUERIES * (problem.B if packed else 1) and parts > _PARTS_BYTES:
        return f"the parts of {queries} queries over S={problem.S} keys would take {parts / 2**30:.1f} GiB, over 2"
    return primitives.why_not(problem.operations)
