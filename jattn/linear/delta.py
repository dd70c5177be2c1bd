"""The delta rule with and without decay: `kda`, `gated_delta_rule`, `delta_rule`."""

import functools
from typing import Any

from jattn._linear import RULES
from jattn.linear._call import Call, describe
from jattn.linear._run import results

__all__ = ["delta_rule", "gated_delta_rule", "kda"]


def kda(
    query,
    key,
    value,
    g,
    beta,
    *,
    scale=None,
    initial_state=None,
    return_final_state: bool = False,
    cu_seqlens=None,
    segment_ids=None,
    checkpoints=None,
    qk_l2norm: bool = False,
    gate: str | None = None,
    A_log=None,
    dt_bias=None,
    lower_bound: float = -5.0,
    beta_activation: str | None = None,
    state_layout: str = "kv",
    state_dtype=None,
    mode: str = "chunk",
    residuals: str = "save",
    implementation: str | None = None,
    config: Any = None,
):
    """Kimi Delta Attention: a linear recurrence that decays by channel and overwrites what a key retrieves.

    Each value head has a state S `[H, D]`. Token t does, in this order:

        S ← Diag(exp g_t) S
        S ← S + k_t (β_t (v_t − k_tᵀ S))ᵀ
        o_t = scale · q_tᵀ S

    Value head n reads query and key head n // (N // K). For keys of length 1 and β in (0, 2) the state stays bounded;
    for β · |k|² > 2 it grows without bound, as the rule says.

    Args:
        query, key: `[*B, T, K, H]`, any number of batch axes, none included; H at most 256.
        value: `[*B, T, N, D]` with N a multiple of K, in the same dtype.
        g: `[*B, T, N, H]`, any floating dtype: the natural log of the decay, finite and at most 0. With "softplus" and
            "bounded" what the gate makes it of.
        beta: `[*B, T, N]`, any floating dtype. With `beta_activation` what it is made of.
        scale: number or scalar array (differentiable), of the query; None is 1 / sqrt(H).
        initial_state: `[*B, N, H, D]`, float32, bfloat16 or float64; None is zeros.
        return_final_state: also return the state after the last token; after no token it is the initial one.
        cu_seqlens: int `[M + 1]`, offsets of M packed sequences: tokens are then `[T, heads, ..]`, states
            `[M, N, H, D]`. Tokens outside all sequences may hold anything, and their output is 0.
        segment_ids: int `[*B, T]` or `[T]`: wherever it changes, the next token starts from zeros. The initial state is
            that of the first segment, the final one of the last.
        checkpoints: int `[n]`, or `[*B, n]` (packed: `[M, n]`): also return the states after so many tokens of their
            sequence, multiples of 64. Given in a device array they cannot be checked: a state that does not exist is
            NaN.
        qk_l2norm: divide each query and key by sqrt(Σ x² + 1e-6), in float32.
        gate: None, "softplus": −exp(A_log) · softplus(g + dt_bias), "bounded":
            lower_bound · sigmoid(exp(A_log) · (g + dt_bias)), or "clipped": max(g, lower_bound), with no gradient of a
            g that is less. With a bound, kernels need not look how strong decays are.
        A_log: `[N]`; needed for "softplus", None is 0 for "bounded".
        dt_bias: `[N, H]` or `[N · H]`; None is 0.
        lower_bound: of "bounded" and "clipped", in [-5, 0).
        beta_activation: None, "sigmoid", or "sigmoid2", which is 2 · sigmoid.
        state_layout: "kv" or "vk": states are `[.., H, D]` or `[.., D, H]`, as given and as returned.
        state_dtype: of returned states: float32 (default; float64 for float64 inputs) or bfloat16, rounded once.
        mode: "chunk" computes 64 tokens at once, "recurrent" one after the other. Both do so for any length, so that
            the outputs of a prefix are those of the whole, bit for bit.
        residuals: "save" keeps what the backward needs from the forward, "recompute" runs the forward again.
        implementation: None for the best that can run, or a name, which never falls back: "xla", or "mosaic", kernels
            for Hopper GPUs, which take mode="chunk" in bfloat16 with H to 128 and D to 256; with a traced scale or
            checkpoints their gradients are those of "xla".
        config: of the implementation, for tuning.

    Returns:
        out `[*B, T, N, D]` in the query's dtype. With `return_final_state` or `checkpoints` a tuple: out, the final
        state `[*B, N, H, D]` if asked for, the states at checkpoints `[*B, n, N, H, D]` if asked for. All are
        differentiable in all floating-point arguments. Gates, sums and states are float32 (float64 for float64).

    Raises:
        ValueError, TypeError: an argument is wrong (the message names it and its value).
        NotImplementedError: the named implementation cannot run this call, and why; gradients in float16.

    Example:
        >>> import jax, jattn
        >>> q, k, v, g = jax.random.normal(jax.random.key(0), (4, 2, 100, 4, 32))
        >>> beta = jax.random.normal(jax.random.key(1), (2, 100, 4))
        >>> options = dict(qk_l2norm=True, gate="bounded", beta_activation="sigmoid")
        >>> out, state = jattn.linear.kda(q, k, v, g, beta, **options, return_final_state=True)
        >>> out.shape, state.shape
        ((2, 100, 4, 32), (2, 4, 32, 32))

    Source: Kimi Team, "Kimi Linear: An Expressive, Efficient Attention Architecture" (2025).
    """
    call = prepare_kda(
        query, key, value, g, beta, scale=scale, initial_state=initial_state, cu_seqlens=cu_seqlens,
        segment_ids=segment_ids, checkpoints=checkpoints, qk_l2norm=qk_l2norm, gate=gate, A_log=A_log, dt_bias=dt_bias,
        lower_bound=lower_bound, beta_activation=beta_activation, state_layout=state_layout, state_dtype=state_dtype,
        mode=mode, residuals=residuals,
    )  # fmt: skip
    return results(call, return_final_state, implementation=implementation, config=config)


def gated_delta_rule(
    query,
    key,
    value,
    g,
    beta,
    *,
    scale=None,
    initial_state=None,
    return_final_state: bool = False,
    cu_seqlens=None,
    segment_ids=None,
    checkpoints=None,
    qk_l2norm: bool = False,
    gate: str | None = None,
    A_log=None,
    dt_bias=None,
    lower_bound: float = -5.0,
    beta_activation: str | None = None,
    state_layout: str = "kv",
    state_dtype=None,
    mode: str = "chunk",
    residuals: str = "save",
    implementation: str | None = None,
    config: Any = None,
):
    """The gated delta rule: `kda` whose decay is one number a head and token.

        S ← exp(g_t) S;   S ← S + k_t (β_t (v_t − k_tᵀ S))ᵀ;   o_t = scale · q_tᵀ S

    Args:
        query, key: `[*B, T, K, H]`.
        value: `[*B, T, N, D]` with N a multiple of K, in the same dtype.
        g: `[*B, T, N]`, or `[N]` for all tokens: the natural log of the decay, finite and at most 0.
        beta: `[*B, T, N]`.
        dt_bias: `[N]`.
        scale, initial_state, return_final_state, cu_seqlens, segment_ids, checkpoints, qk_l2norm, gate, A_log,
            lower_bound, beta_activation, state_layout, state_dtype, mode, residuals, implementation, config: as in
            `kda`.

    Returns:
        As `kda`: out `[*B, T, N, D]`, or a tuple with the states `[*B, N, H, D]` that were asked for.

    Raises:
        ValueError, TypeError, NotImplementedError: as `kda`.

    Example:
        >>> import jax, jattn
        >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 100, 4, 32))
        >>> g, beta = jax.random.normal(jax.random.key(1), (2, 2, 100, 4))
        >>> jattn.linear.gated_delta_rule(q, k, v, -abs(g), jax.nn.sigmoid(beta), qk_l2norm=True).shape
        (2, 100, 4, 32)

    Source: Yang, Kautz, Hatamizadeh, "Gated Delta Networks: Improving Mamba2 with Delta Rule" (2024).
    """
    call = prepare_gated_delta_rule(
        query, key, value, g, beta, scale=scale, initial_state=initial_state,
        cu_seqlens=cu_seqlens, segment_ids=segment_ids, checkpoints=checkpoints, qk_l2norm=qk_l2norm, gate=gate,
        A_log=A_log, dt_bias=dt_bias, lower_bound=lower_bound, beta_activation=beta_activation,
        state_layout=state_layout, state_dtype=state_dtype, mode=mode, residuals=residuals,
    )  # fmt: skip
    return results(call, return_final_state, implementation=implementation, config=config)


def delta_rule(
    query,
    key,
    value,
    beta,
    *,
    scale=None,
    initial_state=None,
    return_final_state: bool = False,
    cu_seqlens=None,
    segment_ids=None,
    checkpoints=None,
    qk_l2norm: bool = False,
    beta_activation: str | None = None,
    state_layout: str = "kv",
    state_dtype=None,
    mode: str = "chunk",
    residuals: str = "save",
    implementation: str | None = None,
    config: Any = None,
):
    """The delta rule (DeltaNet): `kda` without decay.

        S ← S + k_t (β_t (v_t − k_tᵀ S))ᵀ;   o_t = scale · q_tᵀ S

    Args:
        query, key: `[*B, T, K, H]`.
        value: `[*B, T, N, D]` with N a multiple of K, in the same dtype.
        beta: `[*B, T, N]`.
        scale, initial_state, return_final_state, cu_seqlens, segment_ids, checkpoints, qk_l2norm, beta_activation,
            state_layout, state_dtype, mode, residuals, implementation, config: as in `kda`.

    Returns:
        As `kda`: out `[*B, T, N, D]`, or a tuple with the states `[*B, N, H, D]` that were asked for.

    Raises:
        ValueError, TypeError, NotImplementedError: as `kda`.

    Example:
        >>> import jax, jattn
        >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 100, 4, 32))
        >>> jattn.linear.delta_rule(q, k, v, jax.numpy.ones((2, 100, 4)), qk_l2norm=True).shape
        (2, 100, 4, 32)

    Source: Yang et al., "Parallelizing Linear Transformers with the Delta Rule over Sequence Length" (2024).
    """
    call = prepare_delta_rule(
        query, key, value, beta, scale=scale, initial_state=initial_state,
        cu_seqlens=cu_seqlens, segment_ids=segment_ids, checkpoints=checkpoints, qk_l2norm=qk_l2norm,
        beta_activation=beta_activation, state_layout=state_layout, state_dtype=state_dtype, mode=mode,
        residuals=residuals,
    )  # fmt: skip
    return results(call, return_final_state, implementation=implementation, config=config)


# Each checks a call of its op and describes it.

prepare_kda = functools.partial(describe, RULES["kda"])
prepare_gated_delta_rule = functools.partial(describe, RULES["gated_delta_rule"])


def prepare_delta_rule(query, key, value, beta, **options) -> Call:
    return describe(RULES["delta_rule"], query, key, value, None, beta, **options)
