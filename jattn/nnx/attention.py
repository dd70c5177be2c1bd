"""An `attention_fn` for `flax.nnx` modules, and `MultiHeadAttention`, on `jattn.attention`."""

import functools

import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn import dtypes

from jattn import _check, _flax, _flax_cache
from jattn.nnx._layer import cache_dtype, dropout_key, init_absent_cache

__all__ = ["MultiHeadAttention", "attention_fn", "make_attention_fn"]


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
    promote_dtype=dtypes.promote_dtype,
    is_causal=False,
    input_positions=None,
    *,
    options=None,
):
    """Attention with the signature of `flax.nnx.dot_product_attention`.

    Same function of its arguments as Flax's, with three differences:

    * A query that sees no key gives 0, not the mean of the values.
    * Dropout is jattn's counter-based Philox: other bits than Flax's for the same key, the same bits forward and
      backward, eager or jitted, under any sharding. Every batch element and head draws its own bits **whatever
      `broadcast_dropout` says**. Flax's default True shares one T x S draw among them to save memory; jattn stores no
      draw, and refusing the default would refuse every dropout call. A weight is dropped with the same probability
      either way; only the correlation between batch elements and heads differs. The rate is rounded to a multiple of
      2^-16.
    * Scores, softmax and sums are float32 (float64 for float64 inputs) also where Flax would round them to bfloat16.

    Args:
        query, key, value: `[*B, T, N, H]`, `[*B, S, K, H]`, `[*B, S, K, D]`, K divides N.
        bias: float, broadcasts to `[*B, N, T, S]`.
        mask: bool, numbers (nonzero is visible) or a `jattn.masks` rule; arrays broadcast to `[*B, N, T, S]`.
        broadcast_dropout: see above.
        dropout_rng: a jax.random key, required when dropout is on.
        dropout_rate: float in [0, 1).
        deterministic: True turns dropout off.
        dtype: dtype of the computation and of the output; None infers it from query, key and value.
        precision: None or a `jax.lax.Precision` level, met as a lower bound.
        module: None. Flax's layers give themselves where `sow_weights=True` asks for weights, which are never formed.
        promote_dtype: called as `promote_dtype((query, key, value), dtype=dtype)`.
        is_causal: query t sees keys up to t.
        input_positions: positions for rope, `[*B, T]` or a (query, key) pair; only with `options={"rope": ...}`.
        options: keywords of `jattn.attention` that Flax has no name for; `make_attention_fn` checks and fixes them.

    Returns:
        `[*B, T, N, D]` in the promoted dtype.

    Raises:
        ValueError: shapes that do not fit, a dropout rate outside [0, 1), dropout without `dropout_rng`.
        NotImplementedError: a module, a dot algorithm, or positions without rope, which cannot be honoured.

    Example:
        >>> from flax import nnx
        >>> layer = nnx.MultiHeadAttention(
        ...     num_heads=8, in_features=512, attention_fn=jattn.nnx.attention_fn, decode=False, rngs=nnx.Rngs(0))

    Source: `flax/nnx/nn/attention.py` of Flax 0.12.
    """
    query, key, value = promote_dtype((query, key, value), dtype=dtype)
    return _flax.attend(
        query,
        key,
        value,
        bias=bias,
        mask=mask,
        is_causal=is_causal,
        input_positions=input_positions,
        dropout_rng=dropout_rng,
        dropout_rate=dropout_rate,
        deterministic=deterministic,
        precision=precision,
        module=module,
        options=options,
    )


def make_attention_fn(**options):
    """An `attention_fn` with options of `jattn.attention` fixed.

    Args:
        **options: `is_causal`, `local_window_size`, `logits_soft_cap`, `mask` (a `jattn.masks` rule or an array,
            `&`-ed with Flax's), `rope` (True, a base, or a mapping of `jattn.rope`'s keywords), `implementation` and
            the other keywords of `jattn.attention`; `deterministic` here is jattn's, which makes gradients
            reproducible bit for bit.

    Returns:
        A function like `attention_fn`. Modules compare it by identity: make it once, not once a layer or call.

    Raises:
        TypeError: an unknown option.

    Example:
        >>> local = jattn.nnx.make_attention_fn(is_causal=True, local_window_size=(255, 0))
        >>> layer = nnx.MultiHeadAttention(8, 512, attention_fn=local, decode=False, rngs=nnx.Rngs(0))

    Source: this library.
    """
    return functools.partial(attention_fn, options=_flax.checked_options(options))


class MultiHeadAttention(nnx.MultiHeadAttention):
    """Flax's multi-head attention on `jattn.attention`, with windows, rope, soft cap, sinks and packed documents.

    The parameters are those of `flax.nnx.MultiHeadAttention` under the same names and shapes, so its checkpoints load;
    `sinks` adds one more, of shape `[num_heads]`. Differences in the attention itself are listed at `attention_fn`.

    Args:
        num_heads, in_features, qkv_features, out_features, num_kv_heads, in_kv_features: as in Flax. Query head n reads
            key/value head `n // (num_heads // num_kv_heads)`.
        is_causal: default of the call's argument.
        local_window_size: (left, right) keys around a query's position, inclusive, None for unbounded; an int w means
            (w, w).
        logits_soft_cap: c in c * tanh(score / c).
        rope: True, a base, or a mapping of `jattn.rope`'s keywords; rotates queries and keys.
        sinks: True adds a learnt logit per head, initially 0, to each softmax denominator.
        implementation: as in `jattn.attention`.
        decode: default of the call's argument; `init_cache` makes the cache.
        **flax_options: Flax's other arguments: dtype, param_dtype, dropout_rate, broadcast_dropout, deterministic,
            precision, kernel_init, bias_init, use_bias, normalize_qk, rngs, keep_rngs, the out_ and metadata variants.

    Raises:
        ValueError: head counts or feature counts that do not divide.
        NotImplementedError: an `attention_fn`.

    Example:
        >>> layer = jattn.nnx.MultiHeadAttention(
        ...     num_heads=8, in_features=512, num_kv_heads=2, is_causal=True, local_window_size=(255, 0), rope=True,
        ...     rngs=nnx.Rngs(0))
        >>> y = layer(x, segment_ids=ids)  # x [B, T, 512], ids [B, T]
        >>> layer.init_cache((B, 4096, 512))
        >>> y = layer(x, decode=True)  # a prompt, then single tokens

    Source: `flax/nnx/nn/attention.py` of Flax 0.12.
    """

    def __init__(
        self,
        num_heads,
        in_features,
        qkv_features=None,
        out_features=None,
        num_kv_heads=None,
        in_kv_features=None,
        *,
        is_causal=False,
        local_window_size=None,
        logits_soft_cap=None,
        rope=False,
        sinks=False,
        implementation=None,
        decode=None,
        **flax_options,
    ):
        _flax.refuse("attention_fn", flax_options.pop("attention_fn", None), "this module is jattn.attention's own")
        super().__init__(
            num_heads,
            in_features,
            qkv_features,
            out_features,
            num_kv_heads,
            in_kv_features,
            attention_fn=attention_fn,
            decode=decode,
            **flax_options,
        )
        self.is_causal = is_causal
        self.local_window_size = tuple(local_window_size) if isinstance(local_window_size, list) else local_window_size
        self.logits_soft_cap = logits_soft_cap
        self.rope = _flax.rope_options(rope)
        self.sinks = nnx.Param(jnp.zeros(num_heads, self.param_dtype)) if sinks else None
        self.implementation = implementation
        self.paged = False

    def __call__(
        self,
        inputs_q,
        inputs_k=None,
        inputs_v=None,
        *,
        mask=None,
        segment_ids=None,
        is_causal=None,
        input_positions=None,
        deterministic=None,
        rngs=None,
        sow_weights=False,
        decode=None,
        seq_lengths=None,
        block_tables=None,
        out_sharding=None,
        qkv_sharding=None,
    ):
        """Project, attend, project back.

        Args:
            inputs_q: `[*B, T, in_features]`.
            inputs_k, inputs_v: `[*B, S, in_kv_features]`; keys default to `inputs_q`, values to `inputs_k`.
            mask: bool, numbers (nonzero is visible) or a `jattn.masks` rule; arrays broadcast to `[*B, N, T, S]`. With
                `decode` S is the room in the cache, and over pages it must be a rule made of positions.
            segment_ids: int `[*B, T]`, or a (query, key) pair `[*B, T]`, `[*B, S]`; a query sees keys of its own
                segment. Not with `decode`.
            is_causal: query t sees keys up to t; None takes the constructor's. With `decode` that always holds.
            input_positions: positions for rope, int `[*B, T]` or a (query, key) pair; None counts from 0, or from the
                tokens that are in the cache.
            deterministic: True turns dropout off; None takes the constructor's.
            rngs: `nnx.Rngs` or stream for dropout; None takes the constructor's.
            sow_weights: must be false.
            decode: the tokens follow those in the cache, and are put into it: a prompt, a part of it, or one token at a
                time, as in Flax. None takes the constructor's.
            seq_lengths: int `[*B]`, with `decode`: how many of the T tokens of each sequence there are; the others may
                hold anything, and are not remembered.
            block_tables: int `[B, W]`, for a cache in pages: entry w of row b is the page of tokens w · page_size and
                following of sequence b.
            out_sharding, qkv_sharding: for the linear layers.

        Returns:
            `[*B, T, out_features]`. With `decode` there are no derivatives for few tokens, and what is behind the room
            in the cache is not kept and has no meaning: `jattn.debug.check_lengths` finds it in `cache_index`.

        Raises:
            ValueError, TypeError: shapes and dtypes that do not fit, values without keys, `decode` without a cache,
                dropout without `deterministic` or without `rngs`.
            NotImplementedError: `sow_weights`, dropout with `decode`, or positions without rope.
        """
        decode = _check.flag(bool(self.decode if decode is None else decode), "decode")
        if not decode and (seq_lengths is not None or block_tables is not None):
            raise ValueError("seq_lengths and block_tables are for decode=True")
        _flax.refuse("sow_weights", sow_weights or None, "no T x S weights exist that could be sown")
        query, key, value = self._project(inputs_q, inputs_k, inputs_v, qkv_sharding)
        dropout = dropout_key(self, deterministic, rngs)
        if decode:
            _flax.refuse("dropout_rate", dropout if dropout is None else self.dropout_rate, "decoding has no dropout")
            x = self._over_cache(
                query, key, value, mask=mask, segment_ids=segment_ids, input_positions=input_positions,
                seq_lengths=seq_lengths, block_tables=block_tables,
            )  # fmt: skip
            return self.out(x, out_sharding=out_sharding)
        x = self.attention_fn(
            query,
            key,
            value,
            mask=mask,
            is_causal=self.is_causal if is_causal is None else is_causal,
            broadcast_dropout=self.broadcast_dropout,
            dropout_rng=dropout,
            dropout_rate=self.dropout_rate,
            deterministic=dropout is None,
            dtype=self.dtype,
            precision=self.precision,
            input_positions=input_positions,
            options=self._options(segment_ids),
        )
        return self.out(x, out_sharding=out_sharding)

    def init_cache(self, input_shape, dtype=None, *, page_size=None, num_pages=None):
        """An empty cache: `cached_key`, `cached_value`, and how many tokens there are of each sequence, `cache_index`.

        Args:
            input_shape: `(*batch, max_length, features)`, as in Flax.
            dtype: of the rows, that of the computation; None is the layer's (Flax's default is float32).
            page_size, num_pages: for rows in pages `[num_pages, page_size, ..]`, which `block_tables` of the call give
                to the sequences; max_length means nothing then. Which page is whose, `jattn.PageAllocator` decides.

        `cache_index` is `[*batch]`, so that sequences have lengths of their own; where a state of Flax's module is
        loaded, it is Flax's scalar.

        Raises:
            ValueError: a page size that is none, or without a number of pages.
        """
        *batch, max_length, _ = input_shape
        dtype = cache_dtype(dtype, self)
        made = _flax_cache.empty(batch, max_length, self.num_kv_heads, self.head_dim, dtype, page_size, num_pages)
        self.cached_key, self.cached_value, self.cache_index = map(nnx.Cache, made)
        self.paged = page_size is not None

    def has_cache(self):
        """Whether `init_cache` was called."""
        return self.cached_key is not None

    def set_view(self, deterministic=None, decode=None, batch_size=None, max_length=None):
        """What `nnx.view` sets: `deterministic`, `decode`, and an empty cache if there is none."""
        if deterministic is not None:
            self.deterministic = deterministic
        if decode is not None:
            self.decode = decode
            init_absent_cache(self, batch_size, max_length)

    def _project(self, inputs_q, inputs_k, inputs_v, sharding):
        if inputs_k is None and inputs_v is not None:
            raise ValueError("inputs_v was given without inputs_k; for one array as both, pass it as inputs_k")
        inputs_k = inputs_q if inputs_k is None else inputs_k
        inputs_v = inputs_k if inputs_v is None else inputs_v
        if inputs_q.shape[-1] != self.in_features:
            raise ValueError(f"inputs_q has {inputs_q.shape[-1]} features, but in_features={self.in_features}")
        query = self.query(inputs_q, out_sharding=sharding)
        key = self.key(inputs_k, out_sharding=sharding)
        if self.normalize_qk:
            query, key = self.query_ln(query), self.key_ln(key)
        return query, key, self.value(inputs_v, out_sharding=sharding)

    def _over_cache(self, query, key, value, *, segment_ids, **call):
        if not self.has_cache():
            raise ValueError("decode=True needs a cache: call init_cache((batch, max_length, in_features)) before")
        query, key, value = dtypes.promote_dtype((query, key, value), dtype=self.dtype)
        cache = self.cached_key, self.cached_value, self.cache_index
        out, after = _flax_cache.attend(
            query, key, value, [x[...] for x in cache], paged=self.paged, precision=self.precision,
            **self._options(segment_ids), **call,
        )  # fmt: skip
        for variable, x in zip(cache, after, strict=True):
            variable[...] = x
        return out

    def _options(self, segment_ids):
        return dict(
            local_window_size=self.local_window_size,
            logits_soft_cap=self.logits_soft_cap,
            segment_ids=segment_ids,
            rope=self.rope,
            sinks=None if self.sinks is None else self.sinks[...],
            implementation=self.implementation,
        )
