"""Linear attention without the delta rule: `gla`, `simple_gla`, `linear_attention`."""

import functools
from typing import Any

import jax.numpy as jnp

from jattn import _check
from jattn._linear import RULES
from jattn.linear._call import Call, describe
from jattn.linear._run import results

__all__ = ["gla", "linear_attention", "simple_gla"]

_NORMALISER_EPS = 1e-10


def gla(
    query,
    key,
    value,
    g,
    *,
    scale=None,
    initial_state=None,
    return_final_state: bool = False,
    cu_seqlens=None,
    segment_ids=None,
    checkpoints=None,
    state_layout: str = "kv",
    state_dtype=None,
    mode: str = "chunk",
    residuals: str = "save",
    implementation: str | None = None,
    config: Any = None,
):
    """Gated linear attention: a state that decays by channel.

        S ← Diag(exp g_t) S + k_t v_tᵀ;   o_t = scale · q_tᵀ S

    Args:
        query, key: `[*B, T, K, H]`.
        value: `[*B, T, N, D]` with N a multiple of K, in the same dtype.
        g: `[*B, T, N, H]`: the natural log of the decay, finite and at most 0, however strong.
        scale, initial_state, return_final_state, cu_seqlens, segment_ids, checkpoints, state_layout, state_dtype, mode,
            residuals, implementation, config: as in `kda`.

    Returns:
        As `kda`: out `[*B, T, N, D]`, or a tuple with the states `[*B, N, H, D]` that were asked for.

    Raises:
        ValueError, TypeError, NotImplementedError: as `kda`.

    Example:
        >>> import jax, jattn
        >>> q, k, v, x = jax.random.normal(jax.random.key(0), (4, 2, 100, 4, 32))
        >>> jattn.linear.gla(q, k, v, jax.nn.log_sigmoid(x) / 16).shape
        (2, 100, 4, 32)

    Source: Yang et al., "Gated Linear Attention Transformers with Hardware-Efficient Training" (2023).
    """
    call = prepare_gla(
        query, key, value, g, scale=scale, initial_state=initial_state, cu_seqlens=cu_seqlens,
        segment_ids=segment_ids, checkpoints=checkpoints, state_layout=state_layout, state_dtype=state_dtype, mode=mode,
        residuals=residuals,
    )  # fmt: skip
    return results(call, return_final_state, implementation=implementation, config=config)


def simple_gla(
    query,
    key,
    value,
    g,
    *,
    scale=None,
    initial_state=None,
    return_final_state: bool = False,
    cu_seqlens=None,
    segment_ids=None,
    checkpoints=None,
    state_layout: str = "kv",
    state_dtype=None,
    mode: str = "chunk",
    residuals: str = "save",
    implementation: str | None = None,
    config: Any = None,
):
    """Linear attention whose decay is one number a head: RetNet, lightning attention, the SSD form of Mamba-2.

        S ← exp(g_t) S + k_t v_tᵀ;   o_t = scale · q_tᵀ S

    RetNet: g = log(1 − 2^(−5 − n)), an array `[N]`. Mamba-2: g = dt · A, value = dt · x, key = B, query = C, scale = 1.

    Args:
        query, key: `[*B, T, K, H]`.
        value: `[*B, T, N, D]` with N a multiple of K, in the same dtype.
        g: `[*B, T, N]`, or `[N]` for all tokens: the natural log of the decay, finite and at most 0.
        scale, initial_state, return_final_state, cu_seqlens, segment_ids, checkpoints, state_layout, state_dtype, mode,
            residuals, implementation, config: as in `kda`.

    Returns:
        As `kda`: out `[*B, T, N, D]`, or a tuple with the states `[*B, N, H, D]` that were asked for.

    Raises:
        ValueError, TypeError, NotImplementedError: as `kda`.

    Example:
        >>> import jax, jax.numpy as jnp, jattn
        >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 100, 4, 32))
        >>> jattn.linear.simple_gla(q, k, v, jnp.log1p(-(2.0 ** -(5.0 + jnp.arange(4.0))))).shape
        (2, 100, 4, 32)

    Sources: Sun et al., "Retentive Network" (2023); Dao, Gu, "Transformers are SSMs" (2024).
    """
    call = prepare_simple_gla(
        query, key, value, g, scale=scale, initial_state=initial_state, cu_seqlens=cu_seqlens,
        segment_ids=segment_ids, checkpoints=checkpoints, state_layout=state_layout, state_dtype=state_dtype, mode=mode,
        residuals=residuals,
    )  # fmt: skip
    return results(call, return_final_state, implementation=implementation, config=config)


def linear_attention(
    query,
    key,
    value,
    *,
    normalize: bool = False,
    scale=None,
    initial_state=None,
    return_final_state: bool = False,
    cu_seqlens=None,
    segment_ids=None,
    checkpoints=None,
    state_layout: str = "kv",
    state_dtype=None,
    mode: str = "chunk",
    residuals: str = "save",
    implementation: str | None = None,
    config: Any = None,
):
    """Linear attention without decay: `o_t = scale · q_tᵀ Σ_{s ≤ t} k_s v_sᵀ`.

    Args:
        query, key: `[*B, T, K, H]`, after the feature map, if there is one.
        value: `[*B, T, N, D]` with N a multiple of K, in the same dtype.
        normalize: divide o_t by `scale · q_tᵀ z_t + 1e-10`, where `z_t = Σ_{s ≤ t} k_s`: for features that are not
            negative. States then have a column more, `[*B, N, H, D + 1]`, the last of which is z.
        scale, initial_state, return_final_state, cu_seqlens, segment_ids, checkpoints, state_layout, state_dtype, mode,
            residuals, implementation, config: as in `kda`.

    Returns:
        As `kda`: out `[*B, T, N, D]`, or a tuple with the states `[*B, N, H, D]` that were asked for.

    Raises:
        ValueError, TypeError, NotImplementedError: as `kda`.

    Example:
        >>> import jax, jattn
        >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 100, 4, 32))
        >>> jattn.linear.linear_attention(jax.nn.elu(q) + 1, jax.nn.elu(k) + 1, v, normalize=True).shape
        (2, 100, 4, 32)

    Source: Katharopoulos et al., "Transformers are RNNs" (2020).
    """
    call = prepare_linear_attention(
        query, key, value, normalize=normalize, scale=scale, initial_state=initial_state, cu_seqlens=cu_seqlens,
        segment_ids=segment_ids, checkpoints=checkpoints, state_layout=state_layout, state_dtype=state_dtype, mode=mode,
        residuals=residuals,
    )  # fmt: skip
    found = results(call, return_final_state, implementation=implementation, config=config)
    if not normalize:
        return found
    out, *states = found if isinstance(found, tuple) else (found,)
    out = divided(out, call.arrays.value.dtype)
    return (out, *states) if states else out


# Each checks a call of its op and describes it.

prepare_gla = functools.partial(describe, RULES["gla"])
prepare_simple_gla = functools.partial(describe, RULES["simple_gla"])


def prepare_linear_attention(query, key, value, *, normalize=False, **options) -> Call:
    if _check.flag(normalize, "normalize"):
        value = widened(value)
    return describe(RULES["linear_attention"], query, key, value, unrounded=normalize, **options)


def widened(value):
    """`value` with a channel of ones more: what comes of it divides the others."""
    value = _check.array(value, "value")
    return jnp.concatenate([value, jnp.ones_like(value[..., :1])], axis=-1)


def divided(out, dtype):
    """All channels of out over the last one."""
    return (out[..., :-1] / (out[..., -1:] + jnp.asarray(_NORMALISER_EPS, out.dtype))).astype(dtype)
