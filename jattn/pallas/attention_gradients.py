"""The backward half of `implementation="mosaic"`: what its kernel needs to know of a call, prepared and launched."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax import lax

from jattn._varying import unvary, vary, varying_axes
from jattn.pallas import configs, lowering, partition, pieces, primitives, schedule
from jattn.pallas.hopper import attention_backward
from jattn.pallas.hopper.backward_plan import Inputs, Plan
from jattn.pallas.lowering import readable, with_bools
from jattn.pallas.packing import clipped_offsets, most_tiles, owner, running, with_ends

_MULTIPROCESSORS = 132  # of an H100 or H200 SXM; on a card with fewer, the rest of the blocks run afterwards
_FEWEST = 78  # of a Hopper card: an H20


def backward(
    arrays, context, options, out, lse, rest, dout, dlse, *, interpret=False, multiprocessors=_MULTIPROCESSORS
):
    """Gradients of query, key, value and sinks in their dtypes (of pieces in float32), from the cotangents of out and
    lse. In the place of gradients that sum over rows (scale, bias, the modifier's arrays) stands None."""
    delta = jnp.sum(dout.astype(jnp.float32) * out.astype(jnp.float32), axis=-1) - dlse
    axes = varying_axes((arrays, context, dout, delta))
    inputs = unvary((arrays, context, (dout.astype(arrays.query.dtype), lse, delta)))
    without_sequences = context.cu_queries is not None and context.cu_queries.shape == (1,)
    if 0 in (*arrays.query.shape, arrays.key.shape[1]) or without_sequences:
        dtype = jnp.float32 if options.partial else arrays.query.dtype
        grads = tuple(jnp.zeros(x.shape, dtype) for x in (arrays.query, arrays.key, arrays.value))
    else:
        part = functools.partial(_part, options=options, interpret=interpret, multiprocessors=multiprocessors)
        grads = part(*inputs) if interpret else partition.divided_backward(part, *inputs)
    dq, dk, dv = vary(grads, axes)
    sinks = _sink_gradient(arrays.sinks, lse, delta)
    return dataclasses.replace(arrays, query=dq, key=dk, value=dv, sinks=sinks, scale=None, bias=None, aux=())


def _sink_gradient(sinks, lse, delta):
    """A sink is a key without a value, so its weight moves nothing but delta."""
    if sinks is None:
        return None
    seen = lse > -jnp.inf  # delta of a row that does not exist may be NaN
    weight = jnp.exp(sinks.astype(jnp.float32) - jnp.where(seen, lse, 0))
    return -jnp.sum(jnp.where(seen, weight * delta, 0), axis=(0, 1)).astype(sinks.dtype)


def _part(arrays, context, saved, options, interpret, multiprocessors):
    """`(dq, dk, dv)` of one device's part of the batch and the heads, or of all; not empty."""
    plan, context, spec = _plan(arrays, context, options)
    dout, lse, delta = saved
    negated = jnp.where(lse == -jnp.inf, lse, lse * -math.log2(math.e))
    plain = not (plan.rule or plan.mod or plan.dropout_threshold)
    steering, rows = _steering(plan, context, spec, multiprocessors)
    inputs = Inputs(
        q=arrays.query, k=arrays.key, v=arrays.value, dout=dout, lse=rows(negated, -jnp.inf), delta=rows(delta, 0),
        **steering, scale=None if arrays.scale is None else arrays.scale.astype(jnp.float32).reshape(1),
        bias=readable(arrays.bias), aux=tuple(map(readable, arrays.aux)), mask_arrays=tuple(map(readable, spec.arrays)),
        dropout_key=None if context.dropout_key is None else lax.bitcast_convert_type(context.dropout_key, jnp.int32),
        origin=None if plain else context.origin,
    )  # fmt: skip
    return attention_backward.launch(plan, inputs, interpret=interpret)


def _plan(arrays, context, options):
    (B, T, N, H), (S, K), D = arrays.query.shape, arrays.key.shape[1:3], arrays.value.shape[3]
    packed = context.cu_queries is not None
    sequences = context.cu_queries.shape[0] - 1 if packed else None
    spec = lowering.lower_mask(context.mask, row_bounds=False)
    context, spec = pieces.own_bounds(context, options, spec, T)
    features = [x is not None for x in (spec.rule, options.mod, options.soft_cap, arrays.bias)]
    dropout = options.dropout_threshold > 0
    config = configs.backward_config(
        H, D, features=sum(features) + dropout, modifier=options.mod is not None, dropout=dropout,
        deterministic=options.deterministic, packed=packed,
    )  # fmt: skip
    blocks = T // config.block_q + sequences + 3 if packed else -(-T // config.block_q)
    plan = Plan(
        B=B, T=T, S=S, N=N, K=K, H=H, D=D, dtype=arrays.query.dtype, scale=options.scale, left=spec.left,
        right=spec.right, offset=options.query_offset if context.query_offset is None else None,
        key_length=S if spec.key_length is None and not packed else None,
        query_length=T if context.query_lengths is None and not packed else None, config=config,
        rows=blocks * config.block_q, packed_tiles=most_tiles(S, sequences, config.keys) if packed else None,
        soft_cap=options.soft_cap, mod=with_bools(options.mod, arrays.aux),
        aux_kinds=options.mod.kinds if options.mod else (), rule=spec.rule, biased=arrays.bias is not None,
        dropout_threshold=options.dropout_threshold, deterministic=options.deterministic, piece=options.partial,
    )  # fmt: skip
    return plan, context, spec


# --- what steers the kernel -------------------------------------------------------------------------------------------


def _steering(plan, context, spec, multiprocessors):
    """The inputs that say who works on what, see `Inputs` for each; and the function that lays out lse and delta."""
    if plan.packed:
        found, costs, rows = _packed(plan, context, spec)
    else:
        found, costs, rows = dict(sequences=_sequences(plan, context, spec)), None, functools.partial(_by_head, plan)
        if plan.listed:
            found["lists"], found["ranks"], costs = _block_lists(plan, context)
        else:
            begin, end = _ranges(plan, found["sequences"])
            found["ranks"] = _ranks(plan, begin)
            late = schedule.known_late(plan) and plan.B * plan.K * plan.tiles > multiprocessors
            costs = plan.group * (end - begin) if late else None
    if not plan.deterministic:
        found["ranks"] = None
    return found | dict(table=_table(plan, costs, multiprocessors)), rows


def _table(plan, costs, multiprocessors):
    pairs = plan.B * plan.K
    blocks = min(multiprocessors, pairs * plan.tiles)
    bytes_per_pair = plan.T * plan.group * (2 * (plan.H + plan.D) + 4 * plan.H)
    section = schedule.section_size(pairs, 1, bytes_per_pair, plan.config.section_mb << 20)
    if plan.deterministic:
        blocks = min(blocks, _at_the_same_time())
        if plan.packed:
            existing = jnp.sum(costs > 0, dtype=jnp.int32)
            return schedule.last_first_of_existing(pairs, plan.tiles, existing, section, blocks)
        known = (1.0,) * plan.tiles if costs is not None else _static_costs(plan)
        return jnp.asarray(schedule.last_first(pairs, known, section, blocks))
    if costs is None:
        return jnp.asarray(schedule.table(pairs, _static_costs(plan), section, blocks))
    return schedule.deal(costs, pairs // costs.shape[0], section, blocks)


def _at_the_same_time() -> int:
    """Blocks that surely run at the same time, as those of a deterministic plan must, which wait for each other."""
    device = jax.devices()[0]
    return device.core_count if device.platform == "gpu" else _FEWEST


def _static_costs(plan) -> tuple[float, ...]:
    """Query blocks of each key tile, as far as it is known now."""
    offset, length = plan.offset or 0, plan.S if plan.key_length is None else plan.key_length
    ranges = (plan.block_range(i * plan.config.keys, offset, length, plan.query_blocks) for i in range(plan.tiles))
    return tuple(float(plan.group * (end - begin)) for begin, end in ranges)


def _sequences(plan, context, spec):
    keys = plan.S if spec.key_length is None else jnp.clip(spec.key_length.reshape(-1), 0, plan.S)
    queries = plan.T if context.query_lengths is None else context.query_lengths.reshape(-1)
    offset = plan.offset if context.query_offset is None else context.query_offset.reshape(-1)
    columns = [jnp.broadcast_to(jnp.asarray(c, jnp.int32), (plan.B,)) for c in (offset, keys, queries)]
    return jnp.stack(columns, axis=1)


def _by_head(plan, x, fill):
    """`[B, T, N]` as `[B, N, rows]`, with `fill` where no query is."""
    return jnp.pad(jnp.swapaxes(x, 1, 2), ((0, 0), (0, 0), (0, plan.rows - plan.T)), constant_values=fill)


def _ranges(plan, sequences):
    """The query blocks `[begin, end)` of every tile, `[B, tiles]` each."""
    first = jnp.arange(plan.tiles, dtype=jnp.int32) * plan.config.keys
    both = plan.block_range(first, sequences[:, :1], sequences[:, 1:2], plan.query_blocks)
    return (jnp.broadcast_to(x, (sequences.shape[0], plan.tiles)) for x in both)


def _ranks(plan, begin):
    """`Inputs.ranks` of ranges: the last tile that visits each block of queries."""
    block = jnp.arange(plan.query_blocks, dtype=jnp.int32)
    return jax.vmap(lambda b: owner(b, block))(begin) - 1


def _block_lists(plan, context):
    """`(Inputs.lists, Inputs.ranks, costs [groups of pairs, tiles])`."""
    config = plan.config
    some, every = context.mask.possible(pieces.grid(plan, context, config.block_q, config.keys))
    shape = (*jnp.broadcast_shapes(some.shape, every.shape)[:2], plan.query_blocks, plan.tiles)
    some, hidden = (_of_key_heads(plan, jnp.broadcast_to(x, shape)) for x in (some, ~every))
    tile = jnp.arange(plan.tiles, dtype=jnp.int32)[:, None]
    cut = some & (hidden | ((tile + 1) * config.keys > plan.S))
    # Every tile visits a block, for its gradients to be written.
    first = jnp.arange(plan.query_blocks, dtype=jnp.int32) == 0
    nothing = ~jnp.any(some, axis=-1, keepdims=True) & first
    cut, some = cut | nothing, some | nothing
    kind = jnp.where(cut, 0, jnp.where(some, 1, 2)).astype(jnp.int8)
    order = jnp.argsort(kind, axis=-1, stable=True).astype(jnp.int32)
    counts = [jnp.sum(x, axis=-1, keepdims=True, dtype=jnp.int32) for x in (cut, some)]
    until = jnp.cumsum(some[:, :, ::-1], axis=2, dtype=jnp.int32)[:, :, ::-1]  # tiles from this one on
    ranks = jnp.take_along_axis(until - some.astype(jnp.int32), order, axis=-1)
    costs = counts[1][..., 0]
    if costs.shape[1] > 1:
        costs = jnp.broadcast_to(costs, (plan.B, *costs.shape[1:]))
    return jnp.concatenate([*counts, order], axis=-1), ranks, costs.reshape(-1, plan.tiles)


def _of_key_heads(plan, x):
    """`[b, n, query blocks, tiles]` as `[b, key heads or 1, tiles, query blocks]`: of any head of a group."""
    x = jnp.swapaxes(x, 2, 3)
    if x.shape[1] == 1:
        return x
    return jnp.any(x.reshape(x.shape[0], plan.K, plan.group, *x.shape[2:]), axis=2)


# --- packed sequences -------------------------------------------------------------------------------------------------


def _packed(plan, context, spec):
    """`(inputs, costs [1, tiles], layout of lse and delta)` of the sequences, the keys before the first and after the
    last, and one of nothing."""
    cu_queries, cu_keys = clipped_offsets(context.cu_queries, plan.T), clipped_offsets(context.cu_keys, plan.S)
    count, block = cu_queries.shape[0] - 1, plan.config.block_q

    column = functools.partial(with_ends, count)
    queries, keys = jnp.diff(cu_queries), jnp.diff(cu_keys)
    used_queries = queries if context.query_lengths is None else jnp.clip(context.query_lengths, 0, queries)
    used_keys = keys if spec.key_length is None else jnp.clip(spec.key_length.reshape(-1), 0, keys)
    offset = plan.offset if context.query_offset is None else context.query_offset
    blocks = jnp.maximum(-(-column(queries) // block), 1)
    ends = running(jnp.sum, blocks)
    sequences = jnp.stack([
        column(offset), column(used_keys), column(used_queries), column(cu_queries[:-1]),
        column(cu_keys[:-1], 0, cu_keys[-1]), column(keys, cu_keys[0], plan.S - cu_keys[-1]), (ends - blocks) * block,
        blocks,
    ], axis=1)  # fmt: skip
    packed, begin, costs = _packed_tiles(plan, sequences)
    number = jnp.arange(plan.query_blocks, dtype=jnp.int32)
    found = dict(sequences=sequences, packed=packed, ranks=owner(begin, number)[None] - 1)
    return found, costs[None], functools.partial(_packed_rows, plan, sequences, ends)


def _packed_tiles(plan, sequences):
    """`Inputs.packed`; of each tile the first block it visits, counted over all sequences; how many it visits."""
    offset, key_length, keys, blocks = (sequences[:, i] for i in (0, 1, 5, 7))
    tiles = -(-keys // plan.config.keys)
    ends = running(jnp.sum, tiles)
    number = jnp.arange(plan.tiles, dtype=jnp.int32)
    sequence = jnp.minimum(owner(ends, number), sequences.shape[0] - 1)
    exists = number < ends[-1]
    key = jnp.where(exists, (number - (ends - tiles)[sequence]) * plan.config.keys, 0)
    begin, end = plan.block_range(key, offset[sequence], key_length[sequence], blocks[sequence])
    first = sequences[sequence, 6] // plan.config.block_q + begin
    return jnp.stack([sequence, key], axis=1), first, jnp.where(exists, plan.group * (end - begin), 0)


def _packed_rows(plan, sequences, ends, x, fill):
    """`[1, T, N]` as `[1, N, rows]`: every sequence from the beginning of a block on, `fill` where no query is."""
    row = jnp.arange(plan.rows, dtype=jnp.int32)
    sequence = jnp.minimum(owner(ends, row // plan.config.block_q), sequences.shape[0] - 1)
    local = row - sequences[sequence, 6]
    x = x[0, jnp.clip(sequences[sequence, 3] + local, 0, plan.T - 1)]
    return jnp.where((local < sequences[sequence, 2])[:, None], x, fill).T[None]


# --- refusals ---------------------------------------------------------------------------------------------------------


def why_not_backward(problem) -> str | None:
    """The reason why the backward kernel cannot run the problem, which the forward kernel runs, or None."""
    return primitives.why_not(problem.slope_operations)
