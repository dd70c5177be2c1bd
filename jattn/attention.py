"""`attention`: exact softmax attention, forward and backward, in memory linear in T + S."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding, PartitionSpec

from jattn import _check, _dispatch
from jattn._mask import parts
from jattn._mask_rules import Predicate
from jattn._platform import only_on
from jattn._problem import Context, Differentiable, Options, Problem, accumulator
from jattn._tile import Shape
from jattn._varying import vary, varying_axes

__all__ = ["attention"]


def attention(
    query,
    key,
    value,
    bias=None,
    mask=None,
    *,
    scale=None,
    is_causal: bool = False,
    query_offset=0,
    query_seq_lengths=None,
    key_value_seq_lengths=None,
    local_window_size=None,
    segment_ids=None,
    logits_soft_cap: float | None = None,
    score_mod=None,
    sinks=None,
    dropout_rate: float = 0.0,
    dropout_key=None,
    return_residual: bool = False,
    deterministic: bool = False,
    implementation: str | None = None,
    config: Any = None,
):
    """Softmax attention of `query` over `key` and `value`, exact, without the T x S matrix.

    Per element, in this order: `scale · (q · k)`, `+ bias`, `score_mod`, soft cap, mask, softmax (with sink), dropout,
    `· v`. A query that sees no key gives 0, with lse -inf and zero gradients. Query t sits at position
    `query_offset + t` on the key axis: causal, windows, prefixes and modifiers use that position.

    Args:
        query: `[*B, T, N, H]`, any number of batch axes, none included.
        key: `[*B, S, K, H]` with N a multiple of K: query head n reads key head n // (N // K).
        value: `[*B, S, K, D]`.
        bias: floating-point, broadcastable to `[*B, N, T, S]`, added to the scaled scores; differentiable. -inf hides.
        mask: a mask of `jattn.masks`, or a bool array broadcastable to `[*B, N, T, S]`, true where visible.
        scale: number or scalar array (differentiable); None is 1 / sqrt(H). A Python number compiles in.
        is_causal: hide keys at positions after the query's.
        query_offset: int, int array `[*B]`, or "end" (key length minus query length).
        query_seq_lengths: int `[*B]`: rows at or past it give output 0, lse -inf and no gradient.
        key_value_seq_lengths: int `[*B]`: keys at or past it do not exist (they may hold NaN).
        local_window_size: `(left, right)` keys around the position, inclusive, None for unbounded; int w is (w, w).
        segment_ids: int `[*B, T]`, or a pair for queries and keys: only equal ids see each other.
        logits_soft_cap: c > 0 replaces scores by c · tanh(score / c).
        score_mod: a modifier of `jattn.mods`, or `fn(score, b, n, t, s)`; differentiated by the library.
        sinks: floating-point `[N]`, one logit a head that joins the denominator only; differentiable.
        dropout_rate: in [0, 1), rounded to a multiple of 2^-16; needs `dropout_key`.
        dropout_key: a JAX random key. Which weights drop depends on (key, batch index, head, query position, key
            position) alone. Inside your own `shard_map` indices are local: fold the axis index into the key.
        return_residual: also return lse.
        deterministic: promise bit-equal gradients from run to run (always so on "xla").
        implementation: "mosaic" (a kernel for NVIDIA Hopper), "xla", or None for the best that can run; a name never
            falls back.
        config: tile config of the implementation, for tuning.

    Returns:
        `[*B, T, N, D]` in the query's dtype; with `return_residual` also lse `[*B, T, N]`, the natural log of the
        softmax denominator (sink included), float32 (float64 for float64 inputs), differentiable.

    Raises:
        ValueError, TypeError: an argument is wrong (the message names it and its value).
        NotImplementedError: the named implementation cannot run this call, and why; or second derivatives.

    Example:
        >>> import jax, jattn
        >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 128, 4, 64))
        >>> jattn.attention(q, k, v, is_causal=True, local_window_size=(31, 0)).shape
        (2, 128, 4, 64)

    Sources: Dao, "FlashAttention-2" (2023), for the algorithm; `jax.nn.dot_product_attention` for the shared names.
    """
    call = prepare(
        query, key, value, bias, mask, scale=scale, is_causal=is_causal, query_offset=query_offset,
        query_seq_lengths=query_seq_lengths, key_value_seq_lengths=key_value_seq_lengths,
        local_window_size=local_window_size, segment_ids=segment_ids, logits_soft_cap=logits_soft_cap,
        score_mod=score_mod, sinks=sinks, dropout_rate=dropout_rate, dropout_key=dropout_key,
        deterministic=deterministic,
    )
    return run(call, implementation=implementation, config=config, return_residual=return_residual)


def prepare(
    query, key, value, bias=None, mask=None, *, query_offset=0, query_seq_lengths=None, key_value_seq_lengths=None,
    is_causal=False, local_window_size=None, segment_ids=None, **options,
) -> "Call":
    """Checks a call and describes it."""
    query, key, value = _check.operands(query, key, value, "[*B, T, N, H]")
    *batch, T, N, _ = query.shape
    batch, S = tuple(batch), key.shape[-3]
    query_lengths = _check.lengths(query_seq_lengths, "query_seq_lengths", batch, T)
    key_lengths = _check.lengths(key_value_seq_lengths, "key_value_seq_lengths", batch, S)
    offset = _check.offset(
        query_offset, batch, T if query_lengths is None else query_lengths, S if key_lengths is None else key_lengths
    )
    mask = _check.mask(
        mask, is_causal=is_causal, local_window_size=local_window_size,
        segment_ids=_check.segment_ids(segment_ids, T, S),
        key_lengths=None if key_lengths is None else key_lengths.reshape(batch),
    )
    flat = [x.reshape(math.prod(batch), *x.shape[-3:]) for x in (query, key, value)]
    return assemble(
        "attention", flat, Shape(batch, N, T, S), batch, bias=bias, mask=mask, offset=offset,
        query_lengths=query_lengths, **options,
    )


@dataclasses.dataclass(frozen=True)
class Call:
    """A checked call: `_problem`'s views of it, and the batch axes of its results."""

    arrays: Differentiable
    context: Context
    options: Options
    problem: Problem
    batch: tuple[int, ...]


def assemble(
    op, operands, shape, batch, *, bias, mask, offset, query_lengths, cu_queries=None, cu_keys=None, scale=None,
    logits_soft_cap=None, score_mod=None, sinks=None, dropout_rate=0.0, dropout_key=None, deterministic=False,
) -> Call:
    """Describes a call whose operands, mask (not bound), offset and lengths are checked; checks the rest."""
    query, key, value = operands
    B, T, N, H = query.shape
    static_offset, offset = offset
    at = static_offset if offset is None else offset.reshape(-1, 1, 1, 1)
    mod = _check.mod(score_mod, shape, at, accumulator(query.dtype))
    static_scale, scale = _check.scale(scale, H)
    threshold, words = _check.dropout(dropout_rate, dropout_key)
    arrays = Differentiable(
        query, key, value, scale=scale, bias=_check.bias(bias, shape), aux=mod.aux if mod else (),
        sinks=_check.sinks(sinks, N),
    )
    context = Context(
        mask=None if mask is None else mask.bind(shape), dropout_key=words, query_offset=offset,
        query_lengths=query_lengths, cu_queries=cu_queries, cu_keys=cu_keys,
    )
    options = Options(
        scale=static_scale, query_offset=static_offset, soft_cap=_check.soft_cap(logits_soft_cap),
        mod=None if mod is None else mod.without_arrays(), dropout_threshold=threshold,
        deterministic=_check.flag(deterministic, "deterministic"),
    )
    problem = Problem(
        op=op, B=B, T=T, S=key.shape[1], N=N, K=key.shape[2], H=H, D=value.shape[3], dtype=str(query.dtype),
        mask=None if mask is None else repr(mask), bias=None if arrays.bias is None else arrays.bias.shape,
        score_mod=None if mod is None else repr(mod), soft_cap=options.soft_cap, sinks=sinks is not None,
        dropout=threshold > 0, deterministic=options.deterministic, sequences=shape.sequences,
        traced_scale=static_scale is None,
        mask_kinds=() if mask is None else tuple(sorted({type(m).__name__ for m in parts(mask)})),
        operations=_operations(mask, mod, accumulator(query.dtype)),
        slope_operations=_slope_operations(mod, accumulator(query.dtype)),
    )
    return Call(arrays, context, options, problem, batch)


def _operations(mask, mod, dtype) -> tuple[str, ...]:
    """What predicates and modifier compute on scores of this dtype."""
    place = [jnp.int32] * 4
    predicates = [] if mask is None else [m for m in parts(mask) if isinstance(m, Predicate)]
    found = [p.function.operations([*place, *(a.dtype for a in p.aux)]) for p in predicates]
    if mod is not None:
        found.append(mod.function.operations(_arguments(mod, dtype)))
    return tuple(sorted(frozenset().union(*found)))


def _slope_operations(mod, dtype) -> tuple[str, ...]:
    """What the modifier and its derivative by the score compute."""
    return () if mod is None else tuple(sorted(mod.function.operations(_arguments(mod, dtype), slope=True)))


def _arguments(mod, dtype) -> list:
    """The dtypes of what a modifier is called with."""
    aux = [dtype if jnp.issubdtype(a.dtype, jnp.floating) else a.dtype for a in mod.aux]
    return [dtype, *[jnp.int32] * 4, *aux]


def run(call: Call, *, implementation, config, return_residual):
    """Dispatches a described call and gives its results the caller's batch axes."""
    _check.flag(return_residual, "return_residual")
    batch, problem = call.batch, call.problem
    options = _dispatch.resolve(problem, call.options, implementation, config)
    arrays, context = vary((call.arrays, call.context), varying_axes((call.arrays, call.context)))
    with jax.named_scope(f"jattn.{problem.op}"):
        out, lse = _in_auto_mode(functools.partial(_attend, options), arrays, context)
    if batch != (problem.B,):
        out, lse = (x.reshape(*batch, *x.shape[1:]) for x in (out, lse))
    return (out, lse) if return_residual else out


def _in_auto_mode(attend, arrays, context):
    """Calls `attend`; under a mesh with Explicit axes, leaves the sharding of its loops to the compiler and gives out
    and lse the query's sharding."""
    sharding = jax.typeof(arrays.query).sharding
    if not sharding.mesh.explicit_axes:
        return attend(arrays, context)
    batch, rows, heads, _ = sharding.spec
    # With the mesh in them, because arrays may be explicitly sharded where no mesh is set.
    out = NamedSharding(sharding.mesh, PartitionSpec(batch, rows, heads, None))
    lse = NamedSharding(sharding.mesh, PartitionSpec(batch, rows, heads))
    return jax.sharding.auto_axes(attend, axes=sharding.mesh.explicit_axes, out_sharding=(out, lse))(arrays, context)


@functools.partial(jax.jit, static_argnums=0)
@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(options, arrays, context):
    out, lse, _ = _forward(options, arrays, context)
    return out, lse


def _attend_forward(options, arrays, context):
    # The rounding error of a 16-bit out shifts whole rows of score gradients by one amount. That averages out in dq
    # and dk, but not in gradients that sum over rows or keys: those read out as it was before rounding.
    sums = arrays.aux or any(x is not None for x in (arrays.scale, arrays.bias, arrays.sinks))
    out, lse, rest = _forward(options, arrays, context, unrounded=bool(sums))
    # Named so that checkpoint policies can keep them, and with them everything a backward needs besides q, k, v.
    out, (lse, rest) = checkpoint_name(out, "jattn_out"), checkpoint_name((lse, rest), "jattn_lse")
    return (out.astype(arrays.query.dtype), lse), (arrays, context, out, lse, rest)


def _attend_backward(options, saved, cotangents):
    return _backward(options, saved, cotangents), None


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _backward(options, saved, cotangents):
    here = functools.partial(_backward_on, options.backward or options)
    if options.elsewhere is None or options.backward is not None:
        return here(saved, cotangents)
    elsewhere = functools.partial(_backward_on, options.elsewhere)
    return lax.platform_dependent(saved, cotangents, default=elsewhere, **{_module(options).PLATFORM: here})


def _backward_on(options, saved, cotangents):
    arrays, context, *results = saved
    grads = _module(options).backward(arrays, context, options, *results, *cotangents)
    if options.sums is None:
        return grads
    # Whoever does not use these gradients does not compute them: nothing else comes from the same call.
    sums = _module(options.sums).backward(arrays, context, options.sums, *results, *cotangents)
    return dataclasses.replace(grads, scale=sums.scale, bias=sums.bias, aux=sums.aux)


@jax.custom_jvp
def _undifferentiated(arrays):
    return arrays


@_undifferentiated.defjvp
@_backward.defjvp
def _refuse_second_derivative(*_):
    raise NotImplementedError(
        "jattn ops have first derivatives in reverse mode only: second derivatives are not implemented; "
        "jax.nn.dot_product_attention has them, with O(T·S) memory"
    )


_attend.__wrapped__.defvjp(_attend_forward, _attend_backward)


def _forward(options, arrays, context, unrounded=False):
    """`(out, lse, rest)`, on whichever platform this is lowered for; out in the query's dtype unless `unrounded`."""
    here = functools.partial(_forward_on, options, unrounded)
    if options.elsewhere is None:
        return here(arrays, context)
    elsewhere = functools.partial(_forward_on, options.elsewhere, unrounded)
    return lax.platform_dependent(arrays, context, default=elsewhere, **{_module(options).PLATFORM: here})


def _forward_on(options, unrounded, arrays, context):
    module = _module(options)
    if module.PLATFORM is not None:
        arrays = _undifferentiated(arrays)
        query = only_on(module.PLATFORM, arrays.query, f"implementation={options.implementation!r}")
        arrays = dataclasses.replace(arrays, query=query)
    out, lse, rest = module.forward(arrays, context, options, unrounded=unrounded)
    out = out if unrounded else out.astype(arrays.query.dtype)
    return out, lse, jnp.zeros_like(lse) if rest is None else rest


def _module(options):
    return _dispatch.module("attention", options.implementation)
