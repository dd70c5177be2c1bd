"""`implementation="mosaic"` of `attention`: what the Hopper kernels need to know of a call, prepared and launched.

The kernels are in `jattn.pallas.hopper`; here are the reasons why they cannot run a call, their tile config, and the
small arrays that steer them (which key blocks a query tile visits, which thread block works on which tile).
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from jattn._varying import unvary, vary, varying_axes
from jattn.pallas import configs, lowering, partition, pieces, primitives, schedule
from jattn.pallas.attention_gradients import backward, why_not_backward
from jattn.pallas.hopper.attention_forward import launch
from jattn.pallas.hopper.forward_plan import Inputs, Plan
from jattn.pallas.lowering import readable, with_bools
from jattn.pallas.packing import clipped_offsets, most_tiles, owner, running, with_ends

__all__ = ["PLATFORM", "SUMS", "backward", "choose", "forward", "why_not", "why_not_backward", "why_not_here"]

PLATFORM = "cuda"
SUMS = False
_MULTIPROCESSORS = 132  # of an H100 or H200 SXM; on a card with fewer, the rest of the blocks run afterwards


def forward(arrays, context, options, *, unrounded=False, interpret=False, multiprocessors=_MULTIPROCESSORS):
    """`(out [B, T, N, D], lse float32 [B, T, N], None)` of a described call (see `_problem`).

    Args:
        unrounded: out in float32, else in the query's dtype.
        interpret: emulate the kernel on the CPU, with race detection.
    """
    axes = varying_axes((arrays, context))
    arrays, context = unvary((arrays, context))  # the body of a kernel is not about them
    part = functools.partial(
        _part, options=options, unrounded=unrounded, interpret=interpret, multiprocessors=multiprocessors
    )
    (B, T, N, _), (_, S, _, D) = arrays.query.shape, arrays.value.shape
    if 0 in (B, T, N, S) or (context.cu_queries is not None and context.cu_queries.shape == (1,)):
        out = jnp.zeros((B, T, N, D), jnp.float32 if unrounded else arrays.query.dtype)
        results = out, _lse_without_keys(arrays, context, (B, T, N))
    elif interpret:  # it calls back to the host in order, which what may be divided cannot
        results = part(arrays, context)
    else:
        results = partition.divided(part, arrays, context)
    return *vary(results, axes), None


def _part(arrays, context, options, unrounded, interpret, multiprocessors):
    """`(out, lse)` of one device's part of the batch and the heads, or of all; not empty."""
    (B, T, N, H), (S, K), D = arrays.query.shape, arrays.key.shape[1:3], arrays.value.shape[3]
    packed = context.cu_queries is not None
    sequences = context.cu_queries.shape[0] - 1 if packed else None
    spec = lowering.lower_mask(context.mask, row_bounds=not packed and not options.partial)
    context, spec = pieces.own_bounds(context, options, spec, T)
    plan = Plan(
        B=B, T=T, S=S, N=N, K=K, H=H, D=D, dtype=arrays.query.dtype, scale=options.scale, left=spec.left,
        right=spec.right, offset=options.query_offset if context.query_offset is None else None,
        key_length=S if spec.key_length is None and not packed else None,
        query_length=T if context.query_lengths is None and not packed else None, config=options.config,
        out_dtype=jnp.float32 if unrounded else None,
        packed_tiles=most_tiles(T, sequences, options.config.rows) if packed else None, soft_cap=options.soft_cap,
        mod=with_bools(options.mod, arrays.aux), aux_kinds=options.mod.kinds if options.mod else (), rule=spec.rule,
        row_bounds=spec.row_end is not None, biased=arrays.bias is not None,
        dropout_threshold=options.dropout_threshold, piece=options.partial,
    )
    plain = not (plan.rule or plan.mod or plan.dropout_threshold)
    inputs = Inputs(
        q=arrays.query, k=arrays.key, v=arrays.value, **_steering(plan, context, spec, multiprocessors),
        scale=None if arrays.scale is None else arrays.scale.astype(jnp.float32).reshape(1),
        bias=readable(arrays.bias), aux=tuple(map(readable, arrays.aux)),
        mask_arrays=tuple(map(readable, spec.arrays)),
        sinks=None if arrays.sinks is None else arrays.sinks.astype(jnp.float32),
        dropout_key=None if context.dropout_key is None else lax.bitcast_convert_type(context.dropout_key, jnp.int32),
        origin=None if plain else context.origin,
    )
    return launch(plan, inputs, interpret=interpret)


def _lse_without_keys(arrays, context, shape):
    """lse of a problem without keys or without queries."""
    if arrays.sinks is None:
        return jnp.full(shape, -jnp.inf, jnp.float32)
    row = jnp.arange(shape[1], dtype=jnp.int32)[None, :, None]
    start, end = 0, shape[1]
    if context.cu_queries is not None:
        start, end = _packed_rows(context, row)
    if context.query_lengths is not None and context.cu_queries is None:
        end = context.query_lengths.reshape(-1, 1, 1)
    lse = jnp.where((row >= start) & (row < end), arrays.sinks.astype(jnp.float32), -jnp.inf)
    return jnp.broadcast_to(lse, shape)


def _packed_rows(context, row):
    """First row and end of the used rows of each row's sequence; equal where a row has none."""
    starts = clipped_offsets(context.cu_queries, row.shape[1])
    used = jnp.diff(starts)
    if context.query_lengths is not None:
        used = jnp.minimum(used, context.query_lengths)
    sequence = jnp.searchsorted(starts, row, side="right") - 1
    known = (sequence >= 0) & (sequence < used.shape[0])
    at = jnp.clip(sequence, 0, max(0, used.shape[0] - 1))
    start = starts[at]
    return start, jnp.where(known, start + (used[at] if used.shape[0] else 0), start)


# --- what steers the kernel -------------------------------------------------------------------------------------------


def _steering(plan, context, spec, multiprocessors) -> dict:
    """The inputs that say who works on what: see `Inputs` for each."""
    blocks = min(multiprocessors, plan.B * plan.N * plan.tiles)
    pairs = plan.B * plan.N
    kv_bytes = 2 * plan.S * (plan.H + plan.D)
    section = schedule.section_size(pairs, plan.N // plan.K, kv_bytes, plan.config.section_mb << 20)
    if plan.packed:
        sequences = _packed_sequences(plan, context, spec)
        packed, costs = _packed_schedule(plan, sequences)
        return dict(table=schedule.deal(costs[None], pairs, section, blocks), sequences=sequences, packed=packed)
    found = dict(sequences=_sequences(plan, context, spec))
    if plan.listed:
        found["lists"] = lists = _block_lists(plan, context)
        costs = lists[..., 1].reshape(-1, plan.tiles)
        if 1 == lists.shape[0] < plan.B and lists.shape[1] == plan.N > 1:
            costs = jnp.tile(costs, (plan.B, 1))
        found["table"] = schedule.deal(costs, pairs // costs.shape[0], section, blocks)
    elif schedule.known_late(plan) and blocks < pairs * plan.tiles:
        found["table"] = schedule.deal(_costs(plan, found["sequences"]), plan.N, section, blocks)
    else:
        found["table"] = jnp.asarray(schedule.table(pairs, _static_costs(plan), section, blocks))
    if plan.row_bounds:
        row = jnp.arange(plan.tiles * plan.config.rows, dtype=jnp.int32)
        found["row_end"] = spec.row_end(row + _offset(plan, context))
    return found


def _offset(plan, context):
    """[B or 1, 1], or an int."""
    return plan.offset if context.query_offset is None else context.query_offset.reshape(-1, 1)


def _static_costs(plan) -> tuple[float, ...]:
    """Key blocks of each query tile, as far as it is known now."""
    offset, length = plan.offset or 0, plan.S if plan.key_length is None else plan.key_length
    ranges = (plan.block_range(i * plan.config.rows, offset, length, plan.T) for i in range(plan.tiles))
    return tuple(float(end - begin) for begin, end in ranges)


def _costs(plan, sequences):
    """The same at run time, for each sequence: `[B, tiles]`."""
    row = jnp.arange(plan.tiles, dtype=jnp.int32) * plan.config.rows
    begin, end = plan.block_range(row, *(sequences[:, i : i + 1] for i in range(3)))
    return end - begin


def _sequences(plan, context, spec):
    keys = plan.S if spec.key_length is None else jnp.clip(spec.key_length.reshape(-1), 0, plan.S)
    queries = plan.T if context.query_lengths is None else context.query_lengths.reshape(-1)
    offset = plan.offset if context.query_offset is None else context.query_offset.reshape(-1)
    columns = [jnp.broadcast_to(jnp.asarray(c, jnp.int32), (plan.B,)) for c in (offset, keys, queries)]
    return jnp.stack(columns, axis=1)


def _block_lists(plan, context):
    config = plan.config
    some, every = context.mask.possible(pieces.grid(plan, context, config.rows, config.block_k))
    shape = (*jnp.broadcast_shapes(some.shape, every.shape)[:2], plan.tiles, plan.key_blocks)
    block = jnp.arange(plan.key_blocks, dtype=jnp.int32)
    some = jnp.broadcast_to(some, shape)
    cut = some & ~(jnp.broadcast_to(every, shape) & ((block + 1) * config.block_k <= plan.S))
    rank = jnp.where(cut, 0, jnp.where(some, 1, 2)).astype(jnp.int8)
    order = jnp.argsort(rank, axis=-1, stable=True).astype(jnp.int32)
    counts = [jnp.sum(x, axis=-1, keepdims=True, dtype=jnp.int32) for x in (cut, some)]
    return jnp.concatenate([counts[0], jnp.maximum(counts[1], 1), order], axis=-1)


def _packed_sequences(plan, context, spec):
    """The sequences, the rows before them, the rows after them, and one of nothing: [M + 3, 6]."""
    cu_queries, cu_keys = clipped_offsets(context.cu_queries, plan.T), clipped_offsets(context.cu_keys, plan.S)
    count = cu_queries.shape[0] - 1

    column = functools.partial(with_ends, count)
    rows, keys = jnp.diff(cu_queries), jnp.diff(cu_keys)
    queries = rows if context.query_lengths is None else jnp.clip(context.query_lengths, 0, rows)
    keys = keys if spec.key_length is None else jnp.clip(spec.key_length.reshape(-1), 0, keys)
    offset = plan.offset if context.query_offset is None else context.query_offset
    first, last = cu_queries[0], cu_queries[-1]
    columns = [
        column(offset), column(keys), column(queries), column(cu_queries[:-1], 0, last), column(cu_keys[:-1]),
        column(rows, first, plan.T - last),
    ]
    return jnp.stack(columns, axis=1)


def _packed_schedule(plan, sequences):
    """`Inputs.packed`, and the key blocks of each tile: 0 when there is no such tile."""
    offset, key_length, query_length, rows = (sequences[:, i] for i in (0, 1, 2, 5))
    tiles = -(-rows // plan.config.rows)
    ends = running(jnp.sum, tiles)
    number = jnp.arange(plan.tiles, dtype=jnp.int32)
    sequence = jnp.minimum(owner(ends, number), sequences.shape[0] - 1)
    row = (number - (ends - tiles)[sequence]) * plan.config.rows
    exists = number < ends[-1]
    begin, end = plan.block_range(row, offset[sequence], key_length[sequence], query_length[sequence])
    packed = jnp.stack([sequence, jnp.where(exists, row, 0)], axis=1)
    return packed, jnp.where(exists, end - begin, 0)


# --- config -----------------------------------------------------------------------------------------------------------


def choose(problem, config) -> configs.TileConfig:
    """The caller's tile config, checked, or the one for the problem's class.

    Raises:
        TypeError: a config of another implementation; ValueError: one that these head dims cannot use.
    """
    if config is None:
        bounds = _only(problem, "Causal", "Window", "Lengths", "Prefix")
        changes = (problem.bias, problem.score_mod, problem.soft_cap)
        return configs.forward_config(
            problem.H, problem.D, query_length=problem.T, bounded=bool({"Causal", "Window"} & set(problem.mask_kinds)),
            key_length=problem.S, features=sum(c is not None for c in changes) + bool(problem.dropout) + (not bounds),
        )
    if not isinstance(config, configs.TileConfig):
        raise TypeError(f"config={config!r} is not a jattn.pallas.configs.TileConfig, which mosaic takes")
    reason = config.why_not(problem.H, problem.D)
    if reason:
        raise ValueError(f"config={config!r} {reason}")
    return config


def _only(problem, *kinds) -> bool:
    """Whether the mask is a conjunction of masks of these kinds, or none."""
    return set(problem.mask_kinds) <= {"And", *kinds}


# --- refusals ---------------------------------------------------------------------------------------------------------


def why_not(problem) -> str | None:
    """The reason why this kernel cannot run the problem, or None."""
    if problem.dtype not in ("bfloat16", "float16"):
        return f"runs bfloat16 and float16, not {problem.dtype}"
    for letter, width in (("H", problem.H), ("D", problem.D)):
        if width % 8 or not 8 <= width <= 256:
            return f"head dims must be multiples of 8 up to 256, not {letter}={width}"
    unknown = [kind for kind in problem.mask_kinds if kind not in lowering.KINDS]
    if unknown:
        return f"the kernel does not know masks of kind {unknown[0]}"
    sizes = dict(B=problem.B, T=problem.T, S=problem.S, N=problem.N)
    symbolic = [f"{letter}={size}" for letter, size in sizes.items() if not isinstance(size, int)]
    if symbolic:
        return f"needs static shapes, not {symbolic[0]}"
    if problem.stride != 1:
        return f"needs neighbouring tokens in pieces of a longer sequence, not every {problem.stride}th"
    if problem.partial and problem.dropout and problem.S % 16:
        return f"dropout over pieces of a longer sequence needs pieces of a multiple of 16 keys, not {problem.S}"
    return primitives.why_not(problem.operations)


def why_not_here() -> str | None:
    """The reason why this machine cannot run it, or None."""
    if jax.default_backend() != "gpu":
        return f"needs a GPU of compute capability 9.0, and the default backend is {jax.default_backend()}"
    capability = jax.devices()[0].compute_capability
    return None if capability == "9.0" else f"needs compute capability 9.0, not {capability}"
