"""An `attention_fn` for `flax.linen` modules, and `MultiHeadAttention`, on `jattn.attention`."""

import functools
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from flax.linen.dtypes import promote_dtype

from jattn import _flax, _flax_cache

__all__ = ["MultiHeadAttention", "MultiHeadDotProductAttention", "attention_fn", "make_attention_fn"]


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
        module: None. Flax's layers give themselves where `sow_weights=True` asks for weights, which are never formed.
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
    )  # fmt: skip


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


class MultiHeadAttention(nn.MultiHeadAttention):
    """Flax's multi-head attention on `jattn.attention`, with windows, rope, soft cap, sinks and packed documents.

    The parameters are those of `flax.linen.MultiHeadAttention` under the same names and shapes, made by Flax's own
    layers: its checkpoints load, and boxes of `nn.with_partitioning` are kept. `sinks` adds one more, of shape
    `[num_heads]`. Differences in the attention itself are listed at `jattn.nnx.attention_fn`.

    With `decode=True` the tokens of a call follow those in the collection `cache`, and are put into it: a prompt, a
    part of it, or one token at a time. As in Flax, a call that finds no cache, such as `init`, makes an empty one, with
    as much room as its inputs are long, and does not put its tokens in. The cache is Flax's too: `cached_key` and
    `cached_value`, `[*B, max_length, num_kv_heads, head_dim]`, and a scalar `cache_index`; that is `[*B]` if the call
    that makes it has `seq_lengths`, or the cache is in pages.

    Args:
        num_heads, dtype, param_dtype, qkv_features, out_features, dropout_rate, deterministic, precision, kernel_init,
            out_kernel_init, bias_init, out_bias_init, use_bias, normalize_qk, qkv_dot_general, out_dot_general,
            qkv_dot_general_cls, out_dot_general_cls: as in Flax.
        broadcast_dropout, force_fp32_for_softmax: either value, as at `attention_fn`.
        attention_fn, qk_attn_weights_einsum_cls, attn_weights_value_einsum_cls: must be absent.
        decode: see above. A layer that decodes has no dropout.
        num_kv_heads: K, a divisor of num_heads; None is num_heads. Query head n reads key/value head
            `n // (num_heads // num_kv_heads)`.
        is_causal: default of the call's argument.
        local_window_size: (left, right) keys around a query's position, inclusive, None for unbounded; an int w means
            (w, w).
        logits_soft_cap: c in c * tanh(score / c).
        rope: True, a base, or a mapping of `jattn.rope`'s keywords; rotates queries and keys.
        sinks: True adds a learnt logit per head, initially 0, to each softmax denominator.
        implementation: as in `jattn.attention`.
        page_size, num_pages: for a cache in pages, `[num_pages, page_size, ..]`, which `block_tables` of the call give
            to the sequences. Which page is whose, `jattn.PageAllocator` decides.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> import jattn.linen
        >>> layer = jattn.linen.MultiHeadAttention(num_heads=4, num_kv_heads=2, rope=True, decode=True)
        >>> x = jnp.ones((2, 40, 64))
        >>> variables = layer.init(jax.random.key(0), jnp.ones((2, 1024, 64)))
        >>> prompt, cache = layer.apply(variables, x[:, :39], mutable=["cache"])
        >>> token, cache = layer.apply(variables | cache, x[:, 39:], mutable=["cache"])
        >>> prompt.shape, token.shape
        ((2, 39, 64), (2, 1, 64))

    Source: `flax/linen/attention.py` of Flax 0.12.
    """

    attention_fn: Any = None
    num_kv_heads: int | None = None
    is_causal: bool = False
    local_window_size: Any = None
    logits_soft_cap: float | None = None
    rope: Any = False
    sinks: bool = False
    implementation: str | None = None
    page_size: int | None = None
    num_pages: int | None = None

    def __post_init__(self):
        self.rope = _flax.rope_options(self.rope)  # hashable, as modules must be for nn.jit
        if isinstance(self.local_window_size, list):
            self.local_window_size = tuple(self.local_window_size)
        super().__post_init__()

    @nn.compact
    def __call__(
        self,
        inputs_q,
        inputs_k=None,
        inputs_v=None,
        *,
        inputs_kv=None,
        mask=None,
        segment_ids=None,
        is_causal=None,
        input_positions=None,
        deterministic=None,
        dropout_rng=None,
        sow_weights=False,
        seq_lengths=None,
        block_tables=None,
    ):
        """Project, attend, project back.

        Args:
            inputs_q: `[*B, T, features]`.
            inputs_k, inputs_v: `[*B, S, features]`; keys default to `inputs_q`, values to `inputs_k`.
            inputs_kv: both of them.
            mask: bool, numbers (nonzero is visible) or a `jattn.masks` rule; arrays broadcast to `[*B, N, T, S]`. With
                `decode` S is the room in the cache, and over pages it must be a rule made of positions.
            segment_ids: int `[*B, T]`, or a (query, key) pair `[*B, T]`, `[*B, S]`; a query sees keys of its own
                segment. Not with `decode`.
            is_causal: query t sees keys up to t; None takes the field. With `decode` that always holds.
            input_positions: positions for rope, int `[*B, T]` or a (query, key) pair; None counts from 0, or from the
                tokens that are in the cache.
            deterministic: True turns dropout off; None takes the field.
            dropout_rng: a jax.random key for dropout; None takes the stream `dropout`.
            sow_weights: must be false.
            seq_lengths: int `[*B]`, with `decode`: how many of the T tokens of each sequence there are; the others may
                hold anything, and are not remembered.
            block_tables: int `[B, W]`, for a cache in pages: entry w of row b is the page of tokens w · page_size and
                following of sequence b.

        Returns:
            `[*B, T, out_features]`. With `decode` there are no derivatives for few tokens, and what is behind the room
            in the cache is not kept and has no meaning: `jattn.debug.check_lengths` finds it in `cache_index`.

        Raises:
            ValueError, TypeError: shapes and dtypes that do not fit, head counts or feature counts that do not divide,
                values without keys, dropout without `deterministic`.
            NotImplementedError: an argument of Flax's that cannot be honoured, dropout with `decode`, positions without
                rope.
        """
        self._refuse(sow_weights)
        if not self.decode and (seq_lengths is not None or block_tables is not None):
            raise ValueError("seq_lengths and block_tables are for decode=True")
        query, key, value = self._project(inputs_q, *_sources(inputs_q, inputs_k, inputs_v, inputs_kv))
        dropout = self._dropout_key(deterministic, dropout_rng)
        options = dict(
            local_window_size=self.local_window_size, logits_soft_cap=self.logits_soft_cap, segment_ids=segment_ids,
            rope=self.rope, sinks=self._sinks(), implementation=self.implementation,
        )  # fmt: skip
        if self.decode:
            _flax.refuse("dropout_rate", dropout if dropout is None else self.dropout_rate, "decoding has no dropout")
            x = self._over_cache(
                query, key, value, mask=mask, input_positions=input_positions, seq_lengths=seq_lengths,
                block_tables=block_tables, **options,
            )  # fmt: skip
        else:
            x = _flax.attend(
                query, key, value, bias=None, mask=mask, is_causal=self.is_causal if is_causal is None else is_causal,
                input_positions=input_positions, dropout_rng=dropout, dropout_rate=self.dropout_rate,
                deterministic=dropout is None, precision=self.precision, module=None, options=options,
            )  # fmt: skip
        return self._dense(
            "out", self.out_features or inputs_q.shape[-1], self.out_kernel_init or self.kernel_init,
            self.out_bias_init or self.bias_init, axis=(-2, -1), dot_general=self.out_dot_general,
            dot_general_cls=self.out_dot_general_cls,
        )(x)  # fmt: skip

    def _refuse(self, sow_weights):
        _flax.refuse("sow_weights", sow_weights or None, "no T x S weights exist that could be sown")
        _flax.refuse("attention_fn", self.attention_fn, "this module is jattn.attention's own")
        for name in ("qk_attn_weights_einsum_cls", "attn_weights_value_einsum_cls"):
            _flax.refuse(name, getattr(self, name), "the products run inside the kernel")

    def _dense(self, name, features, kernel_init, bias_init, **options):
        return nn.DenseGeneral(
            features, dtype=self.dtype, param_dtype=self.param_dtype, kernel_init=kernel_init, bias_init=bias_init,
            use_bias=self.use_bias, precision=self.precision, name=name, **options,
        )  # fmt: skip

    def _project(self, inputs_q, inputs_k, inputs_v):
        features, N = self.qkv_features or inputs_q.shape[-1], self.num_heads
        K = N if self.num_kv_heads is None else self.num_kv_heads
        if features % N:
            raise ValueError(f"qkv_features={features} must be a multiple of num_heads={N}")
        if N % K:
            raise ValueError(f"num_heads={N} must be a multiple of num_kv_heads={K}")
        query, key, value = (
            self._dense(
                name, (heads, features // N), self.kernel_init, self.bias_init, dot_general=self.qkv_dot_general,
                dot_general_cls=self.qkv_dot_general_cls,
            )(x)
            for name, heads, x in (("query", N, inputs_q), ("key", K, inputs_k), ("value", K, inputs_v))
        )  # fmt: skip
        if self.normalize_qk:
            norm = functools.partial(nn.LayerNorm, use_bias=False, dtype=self.dtype, param_dtype=self.param_dtype)
            query, key = norm(name="query_ln")(query), norm(name="key_ln")(key)
        return promote_dtype(query, key, value, dtype=self.dtype)

    def _sinks(self):
        if not self.sinks:
            return None
        return self.param("sinks", nn.initializers.zeros_init(), (self.num_heads,), self.param_dtype)

    def _dropout_key(self, deterministic, dropout_rng):
        """The key of this call's dropout, by Flax's rules; None if it is off."""
        if self.dropout_rate == 0.0 or nn.merge_param("deterministic", self.deterministic, deterministic):
            return None
        return self.make_rng("dropout") if dropout_rng is None else dropout_rng

    def _over_cache(self, query, key, value, *, seq_lengths, **call):
        def empty():
            *batch, T, K, H = key.shape
            keys, values, index = _flax_cache.empty(batch, T, K, H, key.dtype, self.page_size, self.num_pages)
            one = self.page_size is None and seq_lengths is None
            return dict(cached_key=keys, cached_value=values, cache_index=jnp.zeros((), jnp.int32) if one else index)

        fresh = self.is_initializing() or not self.has_variable("cache", "cached_key")
        names = "cached_key", "cached_value", "cache_index"
        cache = [self.variable("cache", name, lambda name=name: empty()[name]) for name in names]
        out, after = _flax_cache.attend(
            query, key, value, [x.value for x in cache], paged=self.page_size is not None, precision=self.precision,
            seq_lengths=seq_lengths, **call,
        )  # fmt: skip
        for variable, x in zip(cache, after, strict=True):
            if not fresh:
                variable.value = x
        return out


class MultiHeadDotProductAttention(MultiHeadAttention):
    """`MultiHeadAttention` under the name by which Flax's other class numbers its parameters."""


def _sources(inputs_q, inputs_k, inputs_v, inputs_kv):
    """Where keys and values come from."""
    if inputs_kv is not None:
        if inputs_k is not None or inputs_v is not None:
            raise ValueError("inputs_kv was given with inputs_k or inputs_v: it is both of them")
        return inputs_kv, inputs_kv
    if inputs_k is None and inputs_v is not None:
        raise ValueError("inputs_v was given without inputs_k; for one array as both, pass it as inputs_k")
    inputs_k = inputs_q if inputs_k is None else inputs_k
    return inputs_k, inputs_k if inputs_v is None else inputs_v
