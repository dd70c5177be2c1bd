"""Calls about a piece of a longer sequence (`Options.partial`): a range of its queries and a range of its keys.

Kernels count offsets and lengths from the piece's first query and key, so that bounds need nothing else. Rules,
modifiers and dropout, which ask where an element is in the whole, add `Context.origin`.
"""

import dataclasses

import jax.numpy as jnp

from jattn._tile import Grid


def own_bounds(context, options, spec, queries: int):
    """Context and mask spec with offset and lengths as the piece has them."""
    if not options.partial or options.ordered:
        return context, spec
    query, key = context.origin[2], context.origin[3]
    offset = options.query_offset if context.query_offset is None else context.query_offset
    lengths, limit = context.query_lengths, spec.key_length
    context = dataclasses.replace(
        context, query_offset=jnp.asarray(offset, jnp.int32).reshape(-1) + (query - key),
        query_lengths=None if lengths is None else jnp.clip(lengths - query, 0, queries),
    )  # fmt: skip
    return context, dataclasses.replace(spec, key_length=None if limit is None else limit - key)


def grid(plan, context, block_q: int, block_k: int) -> Grid:
    """The blocks of the piece within the whole; `context` has the piece's own bounds."""
    offset = plan.offset if context.query_offset is None else context.query_offset.reshape(-1, 1, 1, 1)
    if not plan.piece or context.origin is None:
        return Grid(plan.T, plan.S, block_q, block_k, offset)
    query, key = context.origin[2], context.origin[3]
    return Grid(plan.T, plan.S, block_q, block_k, offset - query + key, (query, key))


def origin(plan, inputs) -> tuple:
    """Batch index, head, query index and key index that 0 stands for, within a kernel."""
    if inputs.origin is None:
        return 0, 0, 0, 0
    return tuple(inputs.origin[i] if i < 2 or plan.piece else 0 for i in range(4))
