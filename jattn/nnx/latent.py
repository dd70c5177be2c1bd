"""Multi-head latent attention: one latent row a token in the cache, of which keys and values of all heads are made."""

import functools

import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn import dtypes

from jattn import _flax
from jattn.mla import MLAWeights, mla_absorbed, mla_decode, mla_output, mla_prefill, mla_preprocess, mla_values
from jattn.nnx._layer import (
    CachedLayer,
    checked_lengths,
    default_kernel_init,
    dropout_key,
    flat_segments,
    heads,
    no_metadata,
)
from jattn.partials import merge
from jattn.rope import rope as rotate
from jattn.sparse import page_rows

__all__ = ["MultiHeadLatentAttention"]

_LARGEST_DECODE = 64  # queries that `mla_decode` takes over contiguous rows


class MultiHeadLatentAttention(CachedLayer):
    """Multi-head latent attention (MLA), with an output gate if asked for.

    Without a cache keys and values are expanded; over the cache, which has `latent_features + rope_features` numbers a
    token for all heads together, queries are absorbed into the latent space. Both are one function.

    Args:
        num_heads: N.
        in_features: of the inputs.
        qkv_features: N times H, the channels of a query and a key that are not rotated; None is `in_features`.
        latent_features: C of the latent of keys and values; None is 4 H.
        rope_features: R, channels of a query and a key with positions, which one key shares among the heads; None is
            H / 2.
        query_latent_features: of a latent of the queries; None is none, queries come of the inputs.
        value_head_dim: channels of a value; None is H.
        gated: True multiplies the values of every head by sigmoid(inputs W), before the output projection.
        rope: True, a base, or a mapping of `jattn.rope`'s keywords; pairs are interleaved unless the mapping says
            otherwise. False leaves the R channels as they are (Kimi: its other layers know positions).
        scale: of the scores; None is (H + R) ** -0.5.
        epsilon: of the norms of the latents.
        is_causal: query t sees keys up to t; must be true for `decode`.
        dropout_rate: of attention weights, as in `jattn.attention`; off in `decode`.
        deterministic: True turns dropout off; default of the call's argument.
        implementation: of `jattn.attention`, in the expanded form.
        dtype: of the computation, inferred from inputs and parameters if None.
        param_dtype, kernel_init, out_kernel_init, kernel_metadata, out_kernel_metadata, keep_rngs: as in
            `flax.nnx.MultiHeadAttention`.
        precision: None or a `jax.lax.Precision` level, met as a lower bound.
        use_bias: must be false.
        decode: default of the call's argument; `init_cache` makes the cache.
        rngs: `nnx.Rngs`.

    Raises:
        ValueError: feature counts that do not divide, `decode` without `is_causal`.
        NotImplementedError: `use_bias`, a dot algorithm as precision.

    Example:
        >>> import jax.numpy as jnp
        >>> import jattn.nnx
        >>> from flax import nnx
        >>> layer = jattn.nnx.MultiHeadLatentAttention(num_heads=4, in_features=64, gated=True, rngs=nnx.Rngs(0))
        >>> x = jnp.ones((2, 40, 64))
        >>> layer(x).shape
        (2, 40, 64)
        >>> layer.init_cache((2, 1024, 64))
        >>> prompt, token = layer(x[:, :39], decode=True), layer(x[:, 39:], decode=True)
        >>> prompt.shape, token.shape
        ((2, 39, 64), (2, 1, 64))

    Sources: DeepSeek-V2 (2024), section 2.1; Kimi K3 for the gate.
    """

    def __init__(
        self,
        num_heads,
        in_features,
        qkv_features=None,
        *,
        latent_features=None,
        rope_features=None,
        query_latent_features=None,
        value_head_dim=None,
        gated=False,
        rope=True,
        scale=None,
        epsilon=1e-6,
        is_causal=True,
        dropout_rate=0.0,
        deterministic=None,
        implementation=None,
        dtype=None,
        param_dtype=jnp.float32,
        precision=None,
        kernel_init=default_kernel_init,
        out_kernel_init=None,
        use_bias=False,
        decode=None,
        rngs,
        keep_rngs=True,
        kernel_metadata=no_metadata,
        out_kernel_metadata=no_metadata,
    ):
        _flax.refuse("use_bias", use_bias or None, "absorbed queries have no place for biases")
        _flax.check_precision(precision)
        self.num_heads, self.in_features = num_heads, in_features
        self.head_dim = H = heads(num_heads, in_features, qkv_features)
        self.latent_features = 4 * H if latent_features is None else latent_features
        self.rope_features = H // 2 if rope_features is None else rope_features
        self.value_head_dim = H if value_head_dim is None else value_head_dim
        self.query_latent_features, self.gated, self.rope = query_latent_features, gated, _flax.rope_options(rope)
        self.scale = (H + self.rope_features) ** -0.5 if scale is None else scale
        self.epsilon, self.is_causal, self.implementation = epsilon, is_causal, implementation
        self.dropout_rate, self.deterministic = dropout_rate, deterministic
        self.dtype, self.param_dtype, self.decode = dtype, param_dtype, decode
        project = functools.partial(
            nnx.LinearGeneral, use_bias=False, param_dtype=param_dtype, kernel_init=kernel_init,
            kernel_metadata=kernel_metadata, rngs=rngs,
        )  # fmt: skip
        norm = functools.partial(nnx.RMSNorm, epsilon=epsilon, param_dtype=param_dtype, rngs=rngs)
        N, C, D, Q = num_heads, self.latent_features, self.value_head_dim, query_latent_features
        # Parameters in Flax's modules, which mla_preprocess and mla_output apply.
        self.query_down = nnx.data(None if Q is None else project(in_features, Q))
        self.query_norm = nnx.data(None if Q is None else norm(Q))
        self.query_up = project(in_features if Q is None else Q, (N, H + self.rope_features))
        self.latent_down = project(in_features, C + self.rope_features)
        self.latent_norm = norm(C)
        self.key_up, self.value_up = project(C, (N, H)), project(C, (N, D))
        self.gate = nnx.data(project(in_features, (N, D)) if gated else None)
        self.out = project(
            (N, D), in_features, axis=(-2, -1), kernel_init=out_kernel_init or kernel_init,
            kernel_metadata=out_kernel_metadata or kernel_metadata,
        )  # fmt: skip
        self.rngs = rngs.dropout.fork() if keep_rngs and dropout_rate > 0 else None
        self.cached_rows, self.cache_index = nnx.data(None), nnx.data(None)

    def __call__(
        self,
        inputs,
        *,
        mask=None,
        segment_ids=None,
        input_positions=None,
        deterministic=None,
        rngs=None,
        decode=None,
        seq_lengths=None,
        block_tables=None,
    ):
        """The layer's output for every token.

        Args:
            inputs: `[*B, T, in_features]`.
            mask: as in `jattn.nnx.MultiHeadAttention`; with `decode` a `jattn.masks` rule made of positions.
            segment_ids: int `[*B, T]`; a query sees keys of its own segment. Not with `decode`.
            input_positions: int `[*B, T]`, for rope; None counts from 0, or from the tokens that are in the cache.
            deterministic: True turns dropout off; None takes the constructor's.
            rngs: `nnx.Rngs` or stream for dropout; None takes the constructor's.
            decode: the tokens follow those in the cache, and are put into it: a prompt, a part of it, or one token at a
                time. None takes the constructor's.
            seq_lengths: int `[*B]`, with `decode`: how many of the T tokens of each sequence there are; the others may
                hold anything, and are not remembered.
            block_tables: int `[B, W]`, for a cache in pages: entry w of row b is the page of tokens w · page_size and
                following of sequence b.

        Returns:
            `[*B, T, in_features]`. With `decode` there are no derivatives for few tokens, and what is behind the room
            in the cache is not kept and has no meaning: `jattn.debug.check_lengths` finds it in `cache_index`.

        Raises:
            ValueError, TypeError: shapes and dtypes that do not fit; `decode` without a cache; dropout without
                `deterministic` or without `rngs`. NotImplementedError: dropout with `decode`, positions without rope.
        """
        decode = self.decoding(decode)
        x, batch = self.checked(inputs)
        x, weights = self._weights(x)
        key = dropout_key(self, deterministic, rngs)
        if self.rope is None:
            _flax.refuse("input_positions", input_positions, "they only serve rope, which is off")
        positions = input_positions if input_positions is None else jnp.asarray(input_positions)
        if positions is not None and positions.ndim > 1:
            positions = positions.reshape(x.shape[:2])
        if decode:
            if segment_ids is not None:
                raise ValueError("segment_ids and decode=True do not go together: a row of the cache is one sequence")
            _flax.refuse("dropout_rate", key if key is None else self.dropout_rate, "decoding has no dropout")
            values = self._over_cache(
                x, weights, positions, checked_lengths(seq_lengths, batch, x.shape[1]), block_tables, mask
            )
        else:
            if seq_lengths is not None or block_tables is not None:
                raise ValueError("seq_lengths and block_tables are for decode=True")
            dropout = {} if key is None else _flax.dropout_arguments(self.dropout_rate, key)
            values = mla_prefill(
                self._tokens(x, weights, positions), weights, scale=self.scale, is_causal=self.is_causal,
                mask=_flax.as_mask(mask), segment_ids=flat_segments(segment_ids, x.shape),
                implementation=self.implementation, **dropout,
            )  # fmt: skip
        y = mla_output(values, weights, x if self.gated else None)
        return y.reshape(*batch, *y.shape[1:])

    def init_cache(self, input_shape, dtype=None, *, page_size=None, num_pages=None):
        """An empty cache: rows of latents, and how many there are of each sequence, `cache_index` `[B]`.

        Args:
            input_shape: `(*batch, max_length, in_features)`, as in Flax.
            dtype: of the rows, that of the computation; None is the layer's.
            page_size, num_pages: for rows in pages `[num_pages, page_size, ..]`, which `block_tables` of the call give
                to the sequences; max_length means nothing then. Which page is whose, `jattn.PageAllocator` decides.

        Raises:
            ValueError: another number of features, a page size without a number of pages, a layer that is not causal.
        """
        if not self.is_causal:
            raise ValueError("a cache needs is_causal=True: later tokens would change the outputs of earlier ones")
        if (page_size is None) != (num_pages is None):
            raise ValueError(f"page_size={page_size} and num_pages={num_pages} go together")
        B, max_length = self.cache_shape(input_shape)
        lead = (B, max_length) if page_size is None else (num_pages, page_size)
        rows = jnp.zeros((*lead, self.latent_features + self.rope_features), self.cache_dtype(dtype))
        self.cached_rows, self.cache_index = nnx.Cache(rows), nnx.Cache(jnp.zeros(B, jnp.int32))
        self.paged = page_size is not None

    def has_cache(self):
        """Whether `init_cache` was called."""
        return self.cached_rows is not None

    def set_view(self, decode=None, batch_size=None, max_length=None, deterministic=None):
        """What `nnx.view` sets: `deterministic`, `decode`, and an empty cache if there is none."""
        super().set_view(decode, batch_size, max_length)
        if deterministic is not None:
            self.deterministic = deterministic

    def _weights(self, x):
        """x and the weights, in one dtype."""
        kernels = dict(
            query_up=self.query_up, latent_down=self.latent_down, key_up=self.key_up, value_up=self.value_up,
            out=self.out, query_down=self.query_down, gate=self.gate,
        )  # fmt: skip
        arrays = {name: layer.kernel[...] for name, layer in kernels.items() if layer is not None}
        norms = dict(latent_norm=self.latent_norm, query_norm=self.query_norm)
        arrays |= {name: norm.scale[...] for name, norm in norms.items() if norm is not None}
        x, *found = dtypes.promote_dtype((x, *arrays.values()), dtype=self.dtype)
        return x, MLAWeights(**dict(zip(arrays, found, strict=True)))

    def _tokens(self, x, weights, positions):
        turn = None if self.rope is None else functools.partial(rotate, **{"interleaved": True, **dict(self.rope)})
        return mla_preprocess(x, weights, positions, rotate=turn, eps=self.epsilon)

    def _over_cache(self, x, weights, positions, new, tables, mask):
        """Values of tokens behind those in the cache, into which their rows are put first."""
        (B, T), rows, before = x.shape[:2], self.cached_rows[...], self.cache_index[...]
        if B != len(before):
            raise ValueError(f"inputs have B={B} sequences; the cache has {len(before)}")
        if self.paged and tables is None:
            raise ValueError("the cache is in pages: block_tables are needed")
        if tables is not None and not self.paged:
            raise ValueError("block_tables are for a cache in pages: init_cache(..., page_size=, num_pages=)")
        room = rows.shape[1] * (tables.shape[1] if self.paged else 1)
        at = before[:, None] + jnp.arange(T, dtype=jnp.int32)
        inputs = self._tokens(x, weights, at if positions is None else positions)
        exists = at < room if new is None else (at < room) & (at < (before + new)[:, None])
        rows = _written(rows, inputs.rows, jnp.where(exists, at, -1), tables)
        after = jnp.minimum(before + (T if new is None else new), room)
        self.cached_rows[...], self.cache_index[...] = rows, after
        if not self.paged and T > _LARGEST_DECODE:
            return self._prompt(inputs, weights, rows, before, after, new, mask)
        latents = mla_decode(
            inputs.query, rows, after, scale=self.scale, latent_dim=self.latent_features, block_tables=tables,
            mask=_flax.as_mask(mask), query_seq_lengths=new,
        )  # fmt: skip
        return mla_values(latents, weights)

    def _prompt(self, inputs, weights, rows, before, after, new, mask):
        """Values of more tokens than `mla_decode` takes over contiguous rows."""
        absorbed = functools.partial(
            mla_absorbed, inputs.query, rows, scale=self.scale, latent_dim=self.latent_features, query_offset=before,
            query_seq_lengths=new,
        )  # fmt: skip
        if mask is not None:  # of positions, which the tokens by themselves would count from 0
            return mla_values(absorbed(key_value_seq_lengths=after, mask=_flax.as_mask(mask)), weights)
        # Expanding costs least for the tokens themselves; expanding all rows would take the memory of a cache of heads.
        history, lse = absorbed(key_value_seq_lengths=before, return_residual=True)
        own = mla_prefill(
            inputs, weights, scale=self.scale, query_seq_lengths=new, key_value_seq_lengths=new, return_residual=True,
            implementation=self.implementation,
        )  # fmt: skip
        return merge((mla_values(history, weights), lse), own)[0]


def _written(cache, rows, at, tables):
    """The cache with rows `[B, T, ..]` at positions `at [B, T]` of their sequences; negative ones are not written."""
    if tables is None:
        sequence = jnp.arange(len(cache), dtype=jnp.int32)[:, None]
        return cache.at[sequence, jnp.where(at < 0, cache.shape[1], at)].set(rows, mode="drop", unique_indices=True)
    P, page, _ = cache.shape
    found = page_rows(at[..., None], tables, page)[..., 0]
    found = jnp.where((found < 0) | (found >= P * page), P * page, found)
    return cache.reshape(P * page, -1).at[found].set(rows, mode="drop").reshape(cache.shape)
