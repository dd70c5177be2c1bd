"""`implementation="mosaic"` of `decode_attention` and `paged_attention`: what the Hopper kernel needs, and its reasons.

The kernel is in `jattn.pallas.hopper.decode`.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax

from jattn._varying import unvary, vary, varying_axes
from jattn.pallas import lowering, partition
from jattn.pallas.attention import PLATFORM, why_not_here
from jattn.pallas.hopper.decode import launch
from jattn.pallas.hopper.decode_plan import QUANTISED_ROWS, ROWS, DecodeConfig, Inputs, Plan
from jattn.pallas.hopper.mma import FORMATS

__all__ = ["PLATFORM", "DecodeConfig", "choose", "forward", "why_not", "why_not_here"]

_MULTIPROCESSORS = 132  # of an H100 or H200 SXM; on a card with fewer, the rest of the blocks run afterwards
_QUERIES = 256  # of one key head; each has a float32 part a split, which together are then half as large as the cache
_MASKS = ("And", "Causal", "Window")


def forward(arrays, options, *, interpret=False, multiprocessors=_MULTIPROCESSORS):
    """`(out [B, T, N, D] in the query's dtype, lse float32 [B, T, N])` of a described call (see `_problem`).

    Args:
        interpret: emulate the kernel on the CPU, with race detection.
        multiprocessors: thread blocks at most.
    """
    axes = varying_axes(arrays)
    arrays = unvary(arrays)  # the body of a kernel is not about them
    part = functools.partial(_part, options=options, interpret=interpret, multiprocessors=multiprocessors)
    if 0 in arrays.query.shape or 0 in arrays.key.shape[:2] or 0 in arrays.block_tables.shape:
        results = _nothing(arrays)
    elif interpret:  # it calls back to the host in order, which what may be divided cannot
        results = part(arrays)
    else:
        results = _divided(part, arrays, own_pages=not options.config.tables)
    return vary(results, axes)


def _nothing(arrays):
    """The results of a call without keys or without queries."""
    *shape, _ = arrays.query.shape
    out = jnp.zeros((*shape, arrays.value.shape[3]), arrays.query.dtype)
    return out, jnp.full(shape, -jnp.inf, jnp.float32)


def _part(arrays, options, interpret, multiprocessors):
    """`(out, lse)` of one device's part of the batch and the heads, or of all; not empty."""
    (B, T, N, H), (P, page, K, _), width = arrays.query.shape, arrays.key.shape, arrays.block_tables.shape[1]
    left, right = _bounds(lowering.lower_mask(arrays.mask), T, width * page)
    plan = Plan(
        B=B, T=T, S=width * page, N=N, K=K, H=H, D=arrays.value.shape[3], pages=P, page=page if width > 1 else None,
        dtype=arrays.query.dtype, scale=options.scale, left=left, right=right, soft_cap=options.soft_cap,
        config=options.config, sinks=arrays.sinks is not None,
        scales=None if arrays.key_scale is None else tuple(map(_per, (arrays.key_scale, arrays.value_scale))),
    )  # fmt: skip
    scales = dict(k_scale=arrays.key_scale, v_scale=arrays.value_scale)
    inputs = Inputs(
        q=arrays.query, k=arrays.key, v=arrays.value, lengths=arrays.lengths,
        tables=arrays.block_tables if options.config.tables else None, query_lengths=arrays.query_lengths,
        scale=None if arrays.scale is None else arrays.scale.astype(jnp.float32).reshape(1),
        sinks=None if arrays.sinks is None else arrays.sinks.astype(jnp.float32)[None],
        **{name: x if x is None or x.ndim else x[None] for name, x in scales.items()},
    )  # fmt: skip
    return launch(plan, inputs, interpret=interpret, multiprocessors=multiprocessors)


def _per(scale) -> str:
    """What one of these scales belongs to."""
    return {0: "tensor", 1: "head", 3: "token"}[scale.ndim]


def _bounds(spec, T, S):
    """The window of a mask, None where it hides no key: the last of T queries sits at most at S - 1, the first at most
    T - 1 before the last key. Numbers that hide all are cut to what 32 bits can add."""
    left = None if spec.left is None or spec.left >= S - 1 else max(spec.left, -S - T)
    right = None if spec.right is None or spec.right >= T - 1 else max(spec.right, -S - T)
    return left, right


def _divided(part, arrays, own_pages: bool):
    """`part(arrays)`, on each device for its part of the batch and the heads (see `partition`).

    Args:
        own_pages: whether sequence b is page b; else every device that has some of the sequences has all pages.
    """
    heads, group = arrays.query.shape[2], arrays.query.shape[2] // arrays.key.shape[2]
    operands, structure = jax.tree.flatten(arrays)
    page = "b" if own_pages else None
    letters = {
        "query": ("b", None, "n", None), "key": (page, None, "k", None), "value": (page, None, "k", None),
        "block_tables": ("b", None), "lengths": ("b",), "query_lengths": ("b",), "scale": (), "sinks": ("n",),
        **{f"{x}_scale": _scale_letters(getattr(arrays, f"{x}_scale"), page) for x in ("key", "value")},
    }  # fmt: skip
    leaves, _ = jax.tree_util.tree_flatten_with_path(arrays)

    def one(head, *operands):
        arrays = jax.tree.unflatten(structure, operands)
        kept = partition.with_own_keys(arrays, head[0], group)
        return part(_with_own_scales(kept, head[0] // group, arrays.key.shape[2]))

    axes = [("n",), *(letters[path[0].name] for path, _ in leaves)]
    return partition.cut(one, axes, partition.RESULTS)(jnp.arange(heads, dtype=jnp.int32), *operands)


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
        if width % 8 or not 8 <= width <= 128:
            return f"head dims must be multiples of 8 up to 128, not {letter}={width}"
        if quantised and width % 16:
            return f"head dims of quantised caches must be multiples of 16, not {letter}={width}"
    sizes = dict(B=problem.B, T=problem.T, S=problem.S, N=problem.N)
    symbolic = [f"{letter}={size}" for letter, size in sizes.items() if not isinstance(size, int)]
    if symbolic:
        return f"needs static shapes, not {symbolic[0]}"
    if problem.sequences is not None:
        return "packed queries are not implemented"
    group = problem.N // problem.K
    most, whose = (QUANTISED_ROWS[-1], " of a quantised cache") if quantised else (ROWS, "")
    if group > most:
        return f"at most {most} query heads for a key head{whose}, not N/K={group}"
    if problem.T * group > _QUERIES:
        return f"at most {_QUERIES} queries for a key head, not T={problem.T} times N/K={group}"
    if problem.partial:
        return "pieces of a longer sequence are not implemented"
    if problem.S > problem.page and problem.page % 16:
        return f"pages must be multiples of 16, not {problem.page}"
    unknown = [kind for kind in problem.mask_kinds if kind not in _MASKS]
    if unknown:
        return f"the kernel does not know masks of kind {unknown[0]}"
    return None if problem.score_mod is None else "score modifiers are not implemented"
