"""`jattn.attention` as the `attention_fn` of `flax.linen` modules."""

import functools

from flax.linen.dtypes import promote_dtype

from jattn import _flax

__all__ = ["attention_fn", "make_attention_fn"]


def attention_fn(
    query,
    key,
    value,
    bias=None,
    mask=None,
    broadcast_dropout=True,
    dropout_rng=None,
    dropout_rate=0.0,
    deterministic=False,
    dtype=None,
    precision=None,
    module=None,
    force_fp32_for_softmax=False,
    einsum_dot_general=None,
    qk_attn_weights_einsum=None,
    attn_weights_value_einsum=None,
    *,
    options=None,
):
    """Attention with the signature of `flax.linen.dot_product_attention`.

    Linen passes an `attention_fn` only the keywords that its signature names and drops the others in silence, so this
    one names them all and raises on those it cannot honour. What differs from Flax is listed at
    `jattn.nnx.attention_fn`; besides, heads may be grouped (K divides N), and the softmax is in float32 whatever
    `force_fp32_for_softmax` says.

    Args:
        query, key, value: `[*B, T, N, H]`, `[*B, S, K, H]`, `[*B, S, K, D]`; promoted to one dtype, or to `dtype`.
        bias: float, broadcasts to `[*B, N, T, S]`.
        mask: bool, numbers (nonzero is visible) or a `jattn.masks` rule; arrays broadcast to `[*B, N, T, S]`.
        broadcast_dropout: either value draws per batch element and head.
        dropout_rng: a jax.random key, required when dropout is on.
        dropout_rate: float in [0, 1).
        deterministic: True turns dropout off.
        dtype: dtype of the computation and of the output.
        precision: None or a `jax.lax.Precision` level, met as a lower bound.
        module: None. A module asks for its weights to be sown.
        force_fp32_for_softmax: either value.
        einsum_dot_general, qk_attn_weights_einsum, attn_weights_value_einsum: None.
        options: keywords of `jattn.attention` that Flax has no name for; `make_attention_fn` checks and fixes them.

    Returns:
        `[*B, T, N, D]` in the promoted dtype.

    Raises:
        ValueError: shapes that do not fit, a dropout rate outside [0, 1), dropout without `dropout_rng`.
        NotImplementedError: a module, an einsum or a dot algorithm, which jattn cannot honour.

    Example:
        >>> import flax.linen as nn
        >>> layer = nn.MultiHeadAttention(num_heads=8, attention_fn=jattn.linen.attention_fn)

    Source: `flax/linen/attention.py` of Flax 0.12.
    """
    for name, given in (
        ("einsum_dot_general", einsum_dot_general),
        ("qk_attn_weights_einsum", qk_attn_weights_einsum),
        ("attn_weights_value_einsum", attn_weights_value_einsum),
    ):
        _flax.refuse(name, given, "the products run inside the kernel")
    query, key, value = promote_dtype(query, key, value, dtype=dtype)
    return _flax.attend(
        query, key, value, bias=bias, mask=mask, is_causal=False, input_positions=None, dropout_rng=dropout_rng,
        dropout_rate=dropout_rate, deterministic=deterministic, precision=precision, module=module, options=options,
    )


def make_attention_fn(**options):
    """An `attention_fn` with options of `jattn.attention` fixed.

    Args:
        **options: `is_causal`, `local_window_size`, `logits_soft_cap`, `mask` (a `jattn.masks` rule or an array,
            `&`-ed with Flax's), `rope` (True, a base, or a mapping of `jattn.rope`'s keywords), `implementation` and
            the other keywords of `jattn.attention`; `deterministic` here is jattn's, which makes gradients
            reproducible bit for bit.

    Returns:
        A function like `attention_fn`. Modules compare it by identity: make it once, not once a call.

    Raises:
        TypeError: an unknown option.

    Example:
        >>> local = jattn.linen.make_attention_fn(is_causal=True, local_window_size=(255, 0))
        >>> layer = nn.MultiHeadAttention(num_heads=8, attention_fn=local)

    Source: this library.
    """
    return functools.partial(attention_fn, options=_flax.checked_options(options))
