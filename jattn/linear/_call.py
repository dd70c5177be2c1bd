"""Checks a call of a linear-attention op and describes it, in the voice of `jattn._check`."""

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
import numpy as np

from jattn import _check
from jattn._linear import CHUNK, LARGEST_H, LARGEST_STEP, Arrays, Context, Options, Problem, Rule, StepArrays
from jattn._problem import accumulator

_DTYPES = ("bfloat16", "float16", "float32", "float64")
_STATE_DTYPES = ("float32", "bfloat16", "float64")
RAW_GATES = ("softplus", "bounded")  # those that make decays of something else
GATES = (None, *RAW_GATES, "clipped")
BETA_ACTIVATIONS = (None, "sigmoid", "sigmoid2")


@dataclasses.dataclass(frozen=True)
class Call:
    """A checked call, as an implementation gets it, and as dispatch does."""

    arrays: Any  # Arrays, or StepArrays
    context: Any  # Context, or None
    options: Options
    problem: Problem
    batch: tuple[int, ...]  # batch axes of the tokens; () when packed
    sequences: tuple[int, ...]  # those of the states


def describe(
    rule: Rule, query, key, value, g=None, beta=None, *, initial_state=None, cu_seqlens=None, segment_ids=None,
    checkpoints=None, mode="chunk", residuals="save", state_dtype=None, unrounded=False, **rest,
) -> Call:  # fmt: skip
    """Describes a call of an op. `unrounded` asks for out in the accumulator's dtype; for `rest` see `_options`."""
    packed, lengths = cu_seqlens is not None, None
    query, key, value = _tokens(query, key, value, "[T, heads, H], packed" if packed else "[*B, T, heads, H]")
    *batch, T, N, D = value.shape
    batch = tuple(batch)
    if packed:
        offsets = _check.cu_seqlens(cu_seqlens, "cu_seqlens", T)
        if isinstance(cu_seqlens, np.ndarray | list | tuple):
            lengths = np.diff(cu_seqlens)
        cu_seqlens = offsets
        if segment_ids is not None:
            raise ValueError("segment_ids and cu_seqlens are two ways to say where sequences end; give one")
    sequences = (cu_seqlens.shape[0] - 1,) if packed else batch
    M = math.prod(sequences)
    arrays, options = _options(rule, query, key, value, g, beta, batch, **rest)
    dtype = accumulator(query.dtype)
    options = dataclasses.replace(
        options,
        state_dtype=_state_dtype(state_dtype, dtype),
        out_dtype=str(dtype if unrounded else query.dtype),
        mode=choice(mode, "mode", ("chunk", "recurrent")),
        residuals=choice(residuals, "residuals", ("save", "recompute")),
    )
    h0 = _state(initial_state, "initial_state", (*sequences, N), query.shape[-1], D, options.state_layout)
    arrays = dataclasses.replace(arrays, initial_state=None if h0 is None else h0.reshape(M, *h0.shape[-3:]))
    context = Context(
        cu_seqlens=cu_seqlens,
        resets=resets(segment_ids, batch, T),
        checkpoints=_checkpoints(checkpoints, sequences, M, T, lengths),
    )
    return Call(arrays, context, options, _problem(rule.op, arrays, context, options, M), batch, sequences)


def describe_step(
    rule: Rule, query, key, value, g, beta, state, *, state_indices=None, query_seq_lengths=None, unrounded=False,
    **rest,
) -> Call:  # fmt: skip
    """Describes a `*_step`. `rest` are the keywords of `_options`."""
    query, key, value = _tokens(query, key, value, "[B, T, heads, H]")
    B, T, N, D = value.shape
    if not 1 <= T <= LARGEST_STEP:
        raise ValueError(f"query length T={T} must be from 1 to {LARGEST_STEP}: longer ones are for jattn.{rule.op}")
    arrays, options = _options(rule, query, key, value, g, beta, (B,), **rest)
    state = _check.array(state, "state")
    P = state.shape[0] if state.ndim else 0
    state = _state(state, "state", (P, N), query.shape[-1], D, options.state_layout)
    if state_indices is None and P != B:
        raise ValueError(f"state has P={P} places for B={B} sequences; give state_indices, or one place a sequence")
    lengths = _check.lengths(query_seq_lengths, "query_seq_lengths", (B,), T)
    out_dtype = accumulator(query.dtype) if unrounded else query.dtype
    options = dataclasses.replace(
        options, state_dtype=str(state.dtype), out_dtype=str(out_dtype), mode="recurrent", residuals="recompute"
    )
    step = StepArrays(arrays, state, indices(state_indices, B), lengths)
    problem = dataclasses.replace(
        _problem(f"{rule.op}_step", arrays, Context(), options, None), initial_state=str(state.dtype)
    )
    return Call(step, None, options, problem, (B,), (P,))


def _problem(op, arrays, context, options, M):
    B, T, K, H = arrays.query.shape
    N, D = arrays.value.shape[2:]
    h0 = arrays.initial_state
    return Problem(
        op=op, B=B, T=T, S=T, N=N, K=K, H=H, D=D, dtype=str(arrays.query.dtype),
        sequences=None if context.cu_seqlens is None else M, traced_scale=arrays.scale is not None, gate=options.gate,
        beta_activation=options.beta_activation, qk_l2norm=options.qk_l2norm, state_layout=options.state_layout,
        state_dtype=options.state_dtype, initial_state=None if h0 is None else str(h0.dtype),
        checkpoints=None if context.checkpoints is None else context.checkpoints.shape[1],
        segments=context.resets is not None, mode=options.mode, residuals=options.residuals,
    )  # fmt: skip


def _tokens(query, key, value, rank):
    named = [(name, _check.array(x, name)) for name, x in (("query", query), ("key", key), ("value", value))]
    (_, query), (_, key), (_, value) = named
    if str(query.dtype) not in _DTYPES:
        raise TypeError(f"query has dtype {query.dtype}; expected one of {', '.join(_DTYPES)}")
    exact = {"[T, heads, H], packed": 3, "[B, T, heads, H]": 4}.get(rank)
    for name, x in named:
        if x.ndim < 3 or x.ndim != (exact or query.ndim):
            raise ValueError(f"{name} has shape {x.shape}; expected {rank}")
        if x.dtype != query.dtype:
            raise TypeError(f"{name} dtype {x.dtype} must equal query's {query.dtype}")
        if x.shape[:-2] != query.shape[:-2]:
            raise ValueError(f"{name} has tokens {x.shape[:-2]}; query has {query.shape[:-2]}")
    if key.shape != query.shape:
        raise ValueError(f"key has shape {key.shape}; it must equal query's {query.shape}")
    (K, H), (N, D) = query.shape[-2:], value.shape[-2:]
    if min(K, H, N, D) == 0:
        raise ValueError(f"heads and head dims must be >= 1; got K={K}, N={N}, H={H}, D={D}")
    if N % K:
        raise ValueError(f"value heads N={N} must be a multiple of query and key heads K={K}")
    if H > LARGEST_H:
        raise ValueError(f"query head dim H={H} must be at most {LARGEST_H}")
    return query, key, value


def _options(
    rule, query, key, value, g, beta, batch, *, scale=None, qk_l2norm=False, gate=None, A_log=None, dt_bias=None,
    lower_bound=-5.0, beta_activation=None, state_layout="kv",
):  # fmt: skip
    """Arrays, with one batch axis, and options of what ops and steps have in common."""
    (T, N), H = value.shape[-3:-1], query.shape[-1]
    gate = choice(gate, "gate", GATES)
    A_log, dt_bias = gate_parameters(gate, A_log, dt_bias, N, H if rule.decay == "channel" else None)
    static_scale, scale = _check.scale(scale, H)
    if rule.decay is not None:
        g = _gates(g, "g", (*batch, T, N), H if rule.decay == "channel" else None)
    if rule.delta:
        beta = _gates(beta, "beta", (*batch, T, N), None)
    flat = [
        None if x is None else x.reshape(math.prod(batch), *x.shape[len(batch) :]) for x in (query, key, value, g, beta)
    ]
    arrays = Arrays(*flat, scale=scale, A_log=A_log, dt_bias=dt_bias)
    options = Options(
        rule=rule, scale=static_scale, qk_l2norm=_check.flag(qk_l2norm, "qk_l2norm"), gate=gate,
        lower_bound=bound(lower_bound),
        beta_activation=choice(beta_activation, "beta_activation", BETA_ACTIVATIONS),
        state_layout=choice(state_layout, "state_layout", ("kv", "vk")),
        state_dtype="", mode="", residuals="", out_dtype="",
    )  # fmt: skip
    return arrays, options


def _gates(x, name, tokens, H):
    """`[*B, T, N]` or, with H, `[*B, T, N, H]`; a g `[N]` serves all tokens."""
    x = floating(x, name)
    if H is None and name == "g" and x.shape == tokens[-1:]:
        return jnp.broadcast_to(x, tokens)
    want = tokens if H is None else (*tokens, H)
    if x.shape != want:
        raise ValueError(f"{name} has shape {x.shape}; expected {want}, one a token and value head")
    return x


def gate_parameters(gate, A_log, dt_bias, N, H):
    """A_log `[N]` and dt_bias `[N, H]` (H None: `[N]`) of a gate, or None."""
    if gate not in RAW_GATES:
        for name, x in (("A_log", A_log), ("dt_bias", dt_bias)):
            if x is not None:
                raise ValueError(f"{name} belongs to another gate: with gate={gate!r} g is the log of the decay itself")
        return None, None
    if A_log is None and gate == "softplus":
        raise ValueError("A_log=None: gate='softplus' needs one number a head")
    if A_log is not None:
        A_log = floating(A_log, "A_log")
        if A_log.shape != (N,):
            raise ValueError(f"A_log has shape {A_log.shape}; expected one a value head, ({N},)")
    if dt_bias is not None:
        dt_bias, want = floating(dt_bias, "dt_bias"), (N,) if H is None else (N, H)
        if H is not None and dt_bias.shape == (N * H,):
            dt_bias = dt_bias.reshape(N, H)
        if dt_bias.shape != want:
            raise ValueError(f"dt_bias has shape {dt_bias.shape}; expected {want}")
    return A_log, dt_bias


def bound(x):
    if isinstance(x, bool) or not isinstance(x, int | float | np.number):
        raise TypeError(f"lower_bound={x!r} must be a Python number: it is compiled in")
    if not -5 <= x < 0:
        raise ValueError(f"lower_bound={x!r} must be in [-5, 0)")
    return float(x)


def floating(x, name):
    x = _check.array(x, name)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"{name} must be floating-point, not {x.dtype}")
    return x


def choice(x, name, choices):
    if not isinstance(x, str | None) or x not in choices:
        raise ValueError(f"{name}={x!r} must be one of {', '.join(map(repr, choices))}")
    return x


def _state_dtype(x, accumulated):
    name = accumulated.name if x is None else jnp.dtype(x).name
    if name not in _STATE_DTYPES:
        raise TypeError(f"state_dtype={name} must be one of {', '.join(_STATE_DTYPES)}: states may exceed 65504")
    return name


def _state(x, name, heads, H, D, layout):
    if x is None:
        return None
    x = _check.array(x, name)
    want = (*heads, *((H, D) if layout == "kv" else (D, H)))
    if x.shape != want:
        raise ValueError(f"{name} has shape {x.shape}; expected {want}, with state_layout={layout!r}")
    if str(x.dtype) not in _STATE_DTYPES:
        raise TypeError(f"{name} has dtype {x.dtype}; expected one of {', '.join(_STATE_DTYPES)}")
    return x


def resets(ids, batch, T):
    """bool [B, T]: where a token's id differs from the one before."""
    if ids is None:
        return None
    ids = _integers(ids, "segment_ids")
    if ids.shape == (T,):
        ids = jnp.broadcast_to(ids, (*batch, T))
    if ids.shape != (*batch, T):
        raise ValueError(f"segment_ids has shape {ids.shape}; expected {(*batch, T)}, one a token")
    ids = ids.reshape(math.prod(batch), T)
    return jnp.concatenate([jnp.zeros_like(ids[:, :1], bool), ids[:, 1:] != ids[:, :-1]], axis=1)


def _checkpoints(given, sequences, M, T, lengths=None):
    """int32 [M, n]. Host values must be multiples of 64 in range; traced ones are data. `lengths` are those of packed
    sequences, where they are known now."""
    if given is None:
        return None
    on_host = isinstance(given, np.ndarray | np.generic | list | tuple | int)
    x = np.zeros(0, np.int32) if np.size(given) == 0 and isinstance(given, list | tuple) else given
    x = _integers(x, "checkpoints")
    if x.ndim == 1:
        x = jnp.broadcast_to(x, (*sequences, *x.shape))
    if x.ndim != len(sequences) + 1 or x.shape[:-1] != sequences:
        want = ", ".join(map(str, (*sequences, "n")))
        raise ValueError(f"checkpoints have shape {x.shape}; expected [n] or [{want}] numbers of tokens")
    if on_host and x.size:
        host, most = np.asarray(given), T if lengths is None else lengths[:, None]
        if np.any((host % CHUNK != 0) | (host < 0) | (host > most)):
            end = f"{T} tokens" if lengths is None else f"the {lengths.tolist()} tokens of the sequences"
            raise ValueError(f"checkpoints={host.tolist()} must be multiples of {CHUNK} from 0 to {end}")
    return _int32(x).reshape(M, x.shape[-1])


def indices(x, B):
    """int32 [B], or None for row by row."""
    if x is None:
        return None
    x = _integers(x, "state_indices")
    if x.shape != (B,):
        raise ValueError(f"state_indices has shape {x.shape}; expected one a sequence, ({B},)")
    return _int32(x)


def _integers(x, name):
    if isinstance(x, bool | float):
        raise TypeError(f"{name}={x!r} must be an int array")
    x = _check.array(x, name)
    if not jnp.issubdtype(x.dtype, jnp.integer):
        raise TypeError(f"{name} must be integers, not {x.dtype}")
    return x


def _int32(x):
    """`x` as int32, what does not fit at the ends of its range: a wild number must not become another one."""
    own, wanted = jnp.iinfo(x.dtype), jnp.iinfo(jnp.int32)
    return jnp.clip(x, max(own.min, wanted.min), min(own.max, wanted.max)).astype(jnp.int32)
