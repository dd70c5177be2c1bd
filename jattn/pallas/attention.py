"""`implementation="mosaic"` of `attention`: what the Hopper kernels need to know of a call, prepared and launched.

The kernels are in `jattn.pallas.hopper`; here are the reasons why they cannot run a call, their tile config, and the
small arrays that steer them (which key blocks a query tile visits, which thread block works on which tile).
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jattn._tile import Grid
from jattn.pallas import configs, lowering, schedule
from jattn.pallas.hopper.attention_forward import Inputs, Plan, launch

_MULTIPROCESSORS = 132  # of an H100 or H200 SXM; on a card with fewer, the rest of the blocks run afterwards


def forward(arrays, context, options, *, interpret=False, multiprocessors=_MULTIPROCESSORS):
    """`(out [B, T, N, D] in the query's dtype, lse float32 [B, T, N], None)` of a described call (see `_problem`).

    `interpret=True` emulates the kernel on the CPU, with race detection.
    """
    (B, T, N, H), (S, K), D = arrays.query.shape, arrays.key.shape[1:3], arrays.value.shape[3]
    if 0 in (B, T, N, S):
        return *_nothing_to_see(arrays, context, (B, T, N, D)), None
    spec = lowering.lower_mask(context.mask)
    length = S if spec.key_length is None else spec.key_length
    plan = Plan(
        B=B, T=T, S=S, N=N, K=K, H=H, D=D, dtype=arrays.query.dtype, scale=options.scale, left=spec.left,
        right=spec.right, offset=options.query_offset if context.query_offset is None else None,
        key_length=min(S, length) if isinstance(length, int) else None,
        query_length=T if context.query_lengths is None else None, config=options.config, soft_cap=options.soft_cap,
        mod=options.mod, aux_kinds=options.mod.kinds if options.mod else (), rule=spec.rule,
        biased=arrays.bias is not None, dropout_threshold=options.dropout_threshold,
    )
    inputs = Inputs(
        q=arrays.query, k=arrays.key, v=arrays.value, table=_schedule(plan, multiprocessors),
        sequences=_sequences(plan, context, length), ranges=_visible_ranges(plan, context) if spec.rule else None,
        scale=None if arrays.scale is None else arrays.scale.astype(jnp.float32).reshape(1),
        bias=_readable(arrays.bias), aux=tuple(map(_readable, arrays.aux)),
        mask_arrays=tuple(map(_readable, spec.arrays)),
        sinks=None if arrays.sinks is None else arrays.sinks.astype(jnp.float32),
        dropout_key=None if context.dropout_key is None else lax.bitcast_convert_type(context.dropout_key, jnp.int32),
    )
    return *launch(plan, inputs, interpret=interpret), None


def _nothing_to_see(arrays, context, shape):
    """The results of a problem without keys or without queries."""
    lse = jnp.full(shape[:3], -jnp.inf, jnp.float32)
    if arrays.sinks is not None:
        lse = jnp.broadcast_to(arrays.sinks.astype(jnp.float32), shape[:3])
    if context.query_lengths is not None:
        exists = jnp.arange(shape[1], dtype=jnp.int32)[:, None] < context.query_lengths.reshape(-1, 1, 1)
        lse = jnp.where(exists, lse, -jnp.inf)
    return jnp.zeros(shape, arrays.query.dtype), lse


def _readable(x):
    """An array as the kernel's element loads take it: at most 32 bits, no bool."""
    if x is None or (x.dtype.itemsize <= 4 and x.dtype != jnp.bool_):
        return x
    if x.dtype == jnp.bool_:
        return x.astype(jnp.int8)
    return x.astype(jnp.float32 if jnp.issubdtype(x.dtype, jnp.floating) else jnp.int32)


def _sequences(plan, context, length):
    """int32 [B, 3]: offset, key length and query length of each batch row."""
    offset = plan.offset if context.query_offset is None else context.query_offset.reshape(-1)
    keys = plan.key_length if isinstance(length, int) else jnp.clip(length.reshape(-1), 0, plan.S)
    queries = plan.T if context.query_lengths is None else context.query_lengths.reshape(-1)
    columns = [jnp.broadcast_to(jnp.asarray(c, jnp.int32), (plan.B,)) for c in (offset, keys, queries)]
    return jnp.stack(columns, axis=1)


def _visible_ranges(plan, context):
    """int32 [B or 1, N or 1, tiles, 4]: the key blocks `[begin, end)` that a query tile visits (at least one), and
    those `[whole_begin, whole_end)` among them that it sees whole: the last such run."""
    config = plan.config
    offset = plan.offset if context.query_offset is None else context.query_offset.reshape(-1, 1, 1, 1)
    some, every = context.mask.possible(Grid(plan.T, plan.S, config.rows, config.block_k, offset))
    shape = (*jnp.broadcast_shapes(some.shape, every.shape)[:2], plan.tiles, plan.key_blocks)
    some, every = jnp.broadcast_to(some, shape), jnp.broadcast_to(some & every, shape)
    block = jnp.arange(plan.key_blocks, dtype=jnp.int32)
    every = every & ((block + 1) * config.block_k <= plan.S)

    def last(where):  # -1 when there is none
        return jnp.max(jnp.where(where, block, -1), axis=-1)

    end = jnp.maximum(last(some) + 1, 1)
    begin = jnp.minimum(jnp.min(jnp.where(some, block, plan.key_blocks), axis=-1), end - 1)
    whole_end = last(every) + 1
    whole_begin = last(~every & (block < whole_end[..., None])) + 1
    return jnp.stack([begin, end, whole_begin, whole_end], axis=-1).astype(jnp.int32)


def _schedule(plan, multiprocessors):
    """`Inputs.table`, from the lengths known now."""
    config, pairs = plan.config, plan.B * plan.N
    blocks = min(multiprocessors, pairs * plan.tiles)
    kv_bytes = 2 * plan.S * (plan.H + plan.D)
    section = schedule.section_size(pairs, plan.N // plan.K, kv_bytes, config.section_mb << 20)
    costs = tuple(float(end - begin) for begin, end in map(plan.block_range, range(plan.tiles)))
    if plan.rule is not None:  # how much of the bounds it leaves is known at run time only
        costs = (1.0,) * plan.tiles
    return jnp.asarray(np.pad(schedule.table(pairs, costs, section, blocks), ((0, 1), (0, 0))))


def choose(problem, config) -> configs.TileConfig:
    """The caller's tile config, checked, or the one for the problem's class.

    Raises:
        TypeError: a config of another implementation; ValueError: one that these head dims cannot use.
    """
    if config is None:
        mask = problem.mask or ""
        bounds = all(term.startswith(("causal", "window(", "lengths(")) for term in mask.split(" & ") if term)
        changes = (problem.bias, problem.score_mod, problem.soft_cap)
        return configs.forward_config(
            problem.H, problem.D, query_length=problem.T, bounded="causal" in mask or "window(" in mask,
            key_length=problem.S, features=sum(c is not None for c in changes) + bool(problem.dropout) + (not bounds),
        )
    if not isinstance(config, configs.TileConfig):
        raise TypeError(f"config={config!r} is not a jattn.pallas.configs.TileConfig, which mosaic takes")
    reason = config.why_not(problem.H, problem.D)
    if reason:
        raise ValueError(f"config={config!r} {reason}")
    return config


# --- refusals ---------------------------------------------------------------------------------------------------------


def why_not(problem) -> str | None:
    """The reason why this kernel cannot run the problem, or None."""
    if problem.dtype not in ("bfloat16", "float16"):
        return f"runs bfloat16 and float16, not {problem.dtype}"
    for letter, width in (("H", problem.H), ("D", problem.D)):
        if width % 8 or not 8 <= width <= 256:
            return f"head dims must be multiples of 8 up to 256, not {letter}={width}"
    if problem.op != "attention":
        return f"{problem.op} is not implemented"
    return _why_not_here()


def _why_not_here() -> str | None:
    if jax.default_backend() != "gpu":
        return f"needs a GPU of compute capability 9.0, and the default backend is {jax.default_backend()}"
    capability = jax.devices()[0].compute_capability
    return None if capability == "9.0" else f"needs compute capability 9.0, not {capability}"
