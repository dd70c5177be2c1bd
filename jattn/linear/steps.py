"""Decoding: the next 1 to 32 tokens of many sequences, on a pool of states."""

import functools
from typing import Any

from jattn import _check
from jattn._linear import RULES
from jattn.linear._call import Call, describe_step
from jattn.linear._run import run_step
from jattn.linear.decay import divided, widened

__all__ = [
    "delta_rule_step",
    "gated_delta_rule_step",
    "gla_step",
    "kda_step",
    "linear_attention_step",
    "simple_gla_step",
]


def kda_step(
    query,
    key,
    value,
    g,
    beta,
    state,
    *,
    state_indices=None,
    query_seq_lengths=None,
    scale=None,
    qk_l2norm: bool = False,
    gate: str | None = None,
    A_log=None,
    dt_bias=None,
    lower_bound: float = -5.0,
    beta_activation: str | None = None,
    state_layout: str = "kv",
    implementation: str | None = None,
    config: Any = None,
):
    """The next tokens of `kda`, in float32 whatever the inputs are, one token after the other.

    The state is read once and written once. Donate it (`jax.jit(..., donate_argnames="state")`) and it is updated in
    place; places that are not named are not touched. A sequence's bits do not depend on the others, nor on its place.

    Args:
        query, key: `[B, T, K, H]`, T from 1 to 32.
        value: `[B, T, N, D]`.
        g: `[B, T, N, H]`. beta: `[B, T, N]`.
        state: `[P, N, H, D]` ("vk": `[P, N, D, H]`), float32, bfloat16 or float64: the pool, of which each sequence has
            a place.
        state_indices: int `[B]`, that place, no two alike; None is P = B, row by row. A sequence whose index is
            negative or past the pool is left out: its output is 0.
        query_seq_lengths: int `[B]`, how many of the T tokens there are: the others may hold anything, give output 0
            and leave the state alone.
        scale, qk_l2norm, gate, A_log, dt_bias, lower_bound, beta_activation, state_layout, config: as in `kda`.
        implementation: as in `kda`; here "mosaic" takes bfloat16, float16 and float32, and head dims that are multiples
            of 32 to 256.

    Returns:
        `(out [B, T, N, D], state)`, out in the query's dtype, the state as it was given.

    Raises:
        ValueError, TypeError: an argument is wrong (the message names it and its value).
        NotImplementedError: the named implementation cannot run this call, and why; derivatives.

    Example:
        >>> import jax, jax.numpy as jnp, jattn
        >>> q, k, v, g = jax.random.normal(jax.random.key(0), (4, 3, 1, 4, 32))
        >>> beta, pool = jnp.ones((3, 1, 4)), jnp.zeros((10, 4, 32, 32))
        >>> out, pool = jattn.linear.kda_step(q, k, v, -abs(g), beta, pool, state_indices=jnp.array([7, 2, -1]))
        >>> out.shape, pool.shape
        ((3, 1, 4, 32), (10, 4, 32, 32))

    Source: Kimi Team, "Kimi Linear: An Expressive, Efficient Attention Architecture" (2025).
    """
    call = prepare_kda_step(
        query, key, value, g, beta, state, state_indices=state_indices,
        query_seq_lengths=query_seq_lengths, scale=scale, qk_l2norm=qk_l2norm, gate=gate, A_log=A_log, dt_bias=dt_bias,
        lower_bound=lower_bound, beta_activation=beta_activation, state_layout=state_layout,
    )  # fmt: skip
    return run_step(call, implementation=implementation, config=config)


def gated_delta_rule_step(
    query,
    key,
    value,
    g,
    beta,
    state,
    *,
    state_indices=None,
    query_seq_lengths=None,
    scale=None,
    qk_l2norm: bool = False,
    gate: str | None = None,
    A_log=None,
    dt_bias=None,
    lower_bound: float = -5.0,
    beta_activation: str | None = None,
    state_layout: str = "kv",
    implementation: str | None = None,
    config: Any = None,
):
    """The next tokens of `gated_delta_rule`: g is `[B, T, N]` or `[N]`, dt_bias `[N]`, all else as in `kda_step`.

    Returns:
        `(out [B, T, N, D], state)`.

    Raises:
        ValueError, TypeError, NotImplementedError: as `kda_step`.

    Example:
        >>> import jax, jax.numpy as jnp, jattn
        >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 1, 4, 32))
        >>> g, beta = -jnp.ones((2, 1, 4)), jnp.ones((2, 1, 4))
        >>> out, state = jattn.linear.gated_delta_rule_step(q, k, v, g, beta, jnp.zeros((2, 4, 32, 32)))

    Source: Yang, Kautz, Hatamizadeh, "Gated Delta Networks: Improving Mamba2 with Delta Rule" (2024).
    """
    call = prepare_gated_delta_rule_step(
        query, key, value, g, beta, state, state_indices=state_indices,
        query_seq_lengths=query_seq_lengths, scale=scale, qk_l2norm=qk_l2norm, gate=gate, A_log=A_log, dt_bias=dt_bias,
        lower_bound=lower_bound, beta_activation=beta_activation, state_layout=state_layout,
    )  # fmt: skip
    return run_step(call, implementation=implementation, config=config)


def delta_rule_step(
    query,
    key,
    value,
    beta,
    state,
    *,
    state_indices=None,
    query_seq_lengths=None,
    scale=None,
    qk_l2norm: bool = False,
    beta_activation: str | None = None,
    state_layout: str = "kv",
    implementation: str | None = None,
    config: Any = None,
):
    """The next tokens of `delta_rule`; query, key `[B, T, K, H]`, value `[B, T, N, D]`, all as in `kda_step`.

    Returns:
        `(out [B, T, N, D], state)`.

    Raises:
        ValueError, TypeError, NotImplementedError: as `kda_step`.

    Example:
        >>> import jax, jax.numpy as jnp, jattn
        >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 1, 4, 32))
        >>> out, state = jattn.linear.delta_rule_step(q, k, v, jnp.ones((2, 1, 4)), jnp.zeros((2, 4, 32, 32)))

    Source: Yang et al., "Parallelizing Linear Transformers with the Delta Rule over Sequence Length" (2024).
    """
    call = prepare_delta_rule_step(
        query, key, value, beta, state, state_indices=state_indices,
        query_seq_lengths=query_seq_lengths, scale=scale, qk_l2norm=qk_l2norm, beta_activation=beta_activation,
        state_layout=state_layout,
    )  # fmt: skip
    return run_step(call, implementation=implementation, config=config)


def gla_step(
    query,
    key,
    value,
    g,
    state,
    *,
    state_indices=None,
    query_seq_lengths=None,
    scale=None,
    state_layout: str = "kv",
    implementation: str | None = None,
    config: Any = None,
):
    """The next tokens of `gla`; query, key `[B, T, K, H]`, value `[B, T, N, D]`, g `[B, T, N, H]`, as in `kda_step`.

    Returns:
        `(out [B, T, N, D], state)`.

    Raises:
        ValueError, TypeError, NotImplementedError: as `kda_step`.

    Example:
        >>> import jax, jax.numpy as jnp, jattn
        >>> q, k, v, g = jax.random.normal(jax.random.key(0), (4, 2, 1, 4, 32))
        >>> out, state = jattn.linear.gla_step(q, k, v, -abs(g), jnp.zeros((2, 4, 32, 32)))

    Source: Yang et al., "Gated Linear Attention Transformers with Hardware-Efficient Training" (2023).
    """
    call = prepare_gla_step(
        query, key, value, g, state, state_indices=state_indices,
        query_seq_lengths=query_seq_lengths, scale=scale, state_layout=state_layout,
    )  # fmt: skip
    return run_step(call, implementation=implementation, config=config)


def simple_gla_step(
    query,
    key,
    value,
    g,
    state,
    *,
    state_indices=None,
    query_seq_lengths=None,
    scale=None,
    state_layout: str = "kv",
    implementation: str | None = None,
    config: Any = None,
):
    """The next tokens of `simple_gla`; query, key `[B, T, K, H]`, value `[B, T, N, D]`, g `[B, T, N]` or `[N]`.

    Returns:
        `(out [B, T, N, D], state)`.

    Raises:
        ValueError, TypeError, NotImplementedError: as `kda_step`.

    Example:
        >>> import jax, jax.numpy as jnp, jattn
        >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 1, 4, 32))
        >>> out, state = jattn.linear.simple_gla_step(q, k, v, -jnp.ones(4), jnp.zeros((2, 4, 32, 32)))

    Sources: Sun et al., "Retentive Network" (2023); Dao, Gu, "Transformers are SSMs" (2024).
    """
    call = prepare_simple_gla_step(
        query, key, value, g, state, state_indices=state_indices,
        query_seq_lengths=query_seq_lengths, scale=scale, state_layout=state_layout,
    )  # fmt: skip
    return run_step(call, implementation=implementation, config=config)


def linear_attention_step(
    query,
    key,
    value,
    state,
    *,
    normalize: bool = False,
    state_indices=None,
    query_seq_lengths=None,
    scale=None,
    state_layout: str = "kv",
    implementation: str | None = None,
    config: Any = None,
):
    """The next tokens of `linear_attention`; query, key `[B, T, K, H]`, value `[B, T, N, D]`, as in `kda_step`.

    With `normalize` the state is `[P, N, H, D + 1]`.

    Returns:
        `(out [B, T, N, D], state)`.

    Raises:
        ValueError, TypeError, NotImplementedError: as `kda_step`.

    Example:
        >>> import jax, jax.numpy as jnp, jattn
        >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 1, 4, 32))
        >>> out, state = jattn.linear.linear_attention_step(q, k, v, jnp.zeros((2, 4, 32, 32)))

    Source: Katharopoulos et al., "Transformers are RNNs" (2020).
    """
    call = prepare_linear_attention_step(
        query, key, value, state, normalize=normalize, state_indices=state_indices, query_seq_lengths=query_seq_lengths,
        scale=scale, state_layout=state_layout,
    )  # fmt: skip
    out, state = run_step(call, implementation=implementation, config=config)
    return divided(out, call.arrays.arrays.value.dtype) if normalize else out, state


# Each checks a call of its op and describes it.

prepare_kda_step = functools.partial(describe_step, RULES["kda"])
prepare_gated_delta_rule_step = functools.partial(describe_step, RULES["gated_delta_rule"])


def prepare_delta_rule_step(query, key, value, beta, state, **options) -> Call:
    return describe_step(RULES["delta_rule"], query, key, value, None, beta, state, **options)


def prepare_gla_step(query, key, value, g, state, **options) -> Call:
    return describe_step(RULES["gla"], query, key, value, g, None, state, **options)


def prepare_simple_gla_step(query, key, value, g, state, **options) -> Call:
    return describe_step(RULES["simple_gla"], query, key, value, g, None, state, **options)


def prepare_linear_attention_step(query, key, value, state, *, normalize=False, **options) -> Call:
    if _check.flag(normalize, "normalize"):
        value = widened(value)
    rule = RULES["linear_attention"]
    return describe_step(rule, query, key, value, None, None, state, unrounded=normalize, **options)
