"""DSA layers of DeepSeek-V3.2 and GLM-5, and latent attention of Kimi Linear, as transformers computes them.

One tiny random layer of each in PyTorch on a CPU, the same weights and tokens here, float32: every position at once,
and a prefix followed by single tokens through both libraries' caches. Needs torch and transformers, which nothing else
does.
"""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import transformers_floor

from jattn import rope
from jattn.indexer import IndexerWeights, indexer_logits, indexer_project, indexer_select
from jattn.mla import MLAWeights, mla_decode, mla_output, mla_prefill, mla_preprocess, mla_values
from jattn.sparse import sparse_attention

transformers_floor.skip_below()

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of other libraries
    import torch
    from transformers import DynamicCache
    from transformers.models.deepseek_v32 import configuration_deepseek_v32, modeling_deepseek_v32
    from transformers.models.glm_moe_dsa import configuration_glm_moe_dsa, modeling_glm_moe_dsa
    from transformers.models.kimi_linear import configuration_kimi_linear, modeling_kimi_linear

pytestmark = pytest.mark.filterwarnings("ignore")

B, T, PREFIX, TOPK = 2, 24, 13, 6
N, H, R, D, C, Q, M = 4, 16, 8, 12, 24, 20, 32
TOLERANCE = 1e-5  # relative, float32
SIZES = dict(
    hidden_size=M, num_attention_heads=N, num_key_value_heads=N, q_lora_rank=Q, kv_lora_rank=C, qk_nope_head_dim=H,
    qk_rope_head_dim=R, v_head_dim=D, num_hidden_layers=1, vocab_size=8, attn_implementation="eager",
)  # fmt: skip
INDEXER = dict(index_n_heads=8, index_head_dim=16, index_topk=TOPK)
MODELS = {  # name -> layer, its config, whether the indexer's rotary pairs are interleaved
    "deepseek v3.2": (
        lambda c: modeling_deepseek_v32.DeepseekV32Attention(c, 0), configuration_deepseek_v32.DeepseekV32Config,
        modeling_deepseek_v32.DeepseekV32RotaryEmbedding, False,
    ),
    "glm 5": (
        lambda c: modeling_glm_moe_dsa.GlmMoeDsaAttention(c, 0), configuration_glm_moe_dsa.GlmMoeDsaConfig,
        modeling_glm_moe_dsa.GlmMoeDsaRotaryEmbedding, True,
    ),
}  # fmt: skip


def randomised(layer):
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, p in layer.named_parameters():
            noise = torch.randn(p.shape, generator=generator)
            p.copy_(noise / p.shape[-1] ** 0.5 if p.ndim == 2 else noise / 10 + (0 if name.endswith("bias") else 1))
    return layer.eval()


def array(linear):
    return linear.weight.detach().numpy().T


def weights_of(layer) -> MLAWeights:
    up = array(layer.kv_b_proj).reshape(C, N, H + D)
    latent_queries = layer.q_lora_rank is not None
    query_up = array(layer.q_b_proj if latent_queries else layer.q_proj)
    return MLAWeights(
        query_up=query_up.reshape(-1, N, H + R), latent_down=array(layer.kv_a_proj_with_mqa),
        latent_norm=layer.kv_a_layernorm.weight.detach().numpy(), key_up=up[..., :H], value_up=up[..., H:],
        out=array(layer.o_proj).reshape(N, D, M), query_down=array(layer.q_a_proj) if latent_queries else None,
        query_norm=layer.q_a_layernorm.weight.detach().numpy() if latent_queries else None,
    )  # fmt: skip


def indexer_of(layer) -> IndexerWeights:
    of = layer.indexer
    return IndexerWeights(
        query_up=array(of.wq_b).reshape(Q, of.n_heads, of.head_dim), key_down=array(of.wk),
        key_norm=of.k_norm.weight.detach().numpy(), key_bias=of.k_norm.bias.detach().numpy(),
        head_weights=array(of.weights_proj),
    )  # fmt: skip


def causal(rows, columns):
    """An additive mask of the last `rows` of `columns` tokens."""
    hidden = torch.full((rows, columns), torch.finfo(torch.float32).min).triu(columns - rows + 1)
    return hidden.expand(B, 1, rows, columns)


def tokens():
    return torch.randn(B, T, M, generator=torch.Generator().manual_seed(1))


def theirs(layer, x, cache=None, start=0, rotary=None):
    """The outputs of x, whose first token is at `start`."""
    positions = torch.arange(start, start + x.shape[1]).expand(B, -1)
    with torch.no_grad():
        embeddings = dict(position_embeddings=rotary(x, positions)) if rotary else {}
        return layer(x, **embeddings, attention_mask=causal(x.shape[1], start + x.shape[1]), cache=cache)[0].numpy()


def ours(x, w, indexer, positions, interleaved, caches=None):
    """The same with jattn: (y, caches of T rows). Index keys and latents of the tokens are put in the caches first."""
    inputs = mla_preprocess(x, w, positions, rotate=functools.partial(rope, interleaved=True))
    turn = functools.partial(rope, rotary_dim=R, interleaved=interleaved)
    query, key, heads = indexer_project(x, inputs.residual, indexer, positions, rotate=turn)
    if caches is None:
        caches = jnp.full((B, T, C + R), jnp.nan, x.dtype), jnp.full((B, T, key.shape[-1]), jnp.nan, x.dtype)
    rows, keys = (
        jax.lax.dynamic_update_slice_in_dim(c, new, positions[0], axis=1)
        for c, new in zip(caches, (inputs.rows, key), strict=True)
    )
    end = jnp.broadcast_to(positions + 1, x.shape[:2])
    lists, _ = indexer_select(query, keys, heads, TOPK, k_end=end)
    latents = sparse_attention(inputs.query, rows, lists, scale=(H + R) ** -0.5, value_dim=C)
    scores = indexer_logits(query, keys, heads, k_end=end)
    return mla_output(mla_values(latents, w), w), (rows, keys), scores


def gap(scores):
    """How far the last score taken is from the first left, relatively: within rounding, choices would differ."""
    best = np.sort(np.asarray(scores), axis=-1)[..., ::-1][:, TOPK:, TOPK - 1 : TOPK + 1]
    return ((best[..., 0] - best[..., 1]) / np.abs(best).max()).min()


@pytest.mark.parametrize("name", MODELS)
def test_sparse_layers(name):
    make, config, rotary, interleaved = MODELS[name]
    config = config(**SIZES, **INDEXER)
    layer, rotary, x = randomised(make(config)), rotary(config), tokens()
    w, indexer = weights_of(layer), indexer_of(layer)
    step = jax.jit(functools.partial(ours, interleaved=interleaved))
    want = theirs(layer, x, rotary=rotary)
    got, _, scores = step(x.numpy(), w, indexer, np.arange(T, dtype=np.int32))
    assert gap(scores) > 1e-5
    assert np.abs(got - want).max() <= TOLERANCE * np.abs(want).max()
    # The other layout of the indexer's rotary pairs is another model.
    other, _, _ = ours(x.numpy(), w, indexer, np.arange(T, dtype=np.int32), not interleaved)
    assert np.abs(other - want).max() > 100 * TOLERANCE * np.abs(want).max()

    cache = DynamicCache(config=config)
    prefix = theirs(layer, x[:, :PREFIX], cache, rotary=rotary)
    got, caches, _ = step(x[:, :PREFIX].numpy(), w, indexer, np.arange(PREFIX, dtype=np.int32))
    assert np.abs(got - prefix).max() <= TOLERANCE * np.abs(want).max()
    for t in range(PREFIX, T):
        row = theirs(layer, x[:, t : t + 1], cache, t, rotary)
        got, caches, _ = step(x[:, t : t + 1].numpy(), w, indexer, np.array([t], np.int32), caches=caches)
        assert np.abs(got - row).max() <= TOLERANCE * np.abs(want).max()
        assert np.abs(got[:, 0] - want[:, t]).max() <= TOLERANCE * np.abs(want).max()


def test_kimi_linear():
    """Latent attention without positions, expanded at once and absorbed through a cache."""
    config = configuration_kimi_linear.KimiLinearConfig(**SIZES | dict(q_lora_rank=None))
    layer, x = randomised(modeling_kimi_linear.KimiLinearAttention(config, 0)), tokens()
    w, want = weights_of(layer), theirs(layer, x)
    inputs = jax.jit(functools.partial(mla_preprocess, rotate=None))(x.numpy(), w)
    assert inputs.residual is None
    got = mla_output(mla_prefill(inputs, w, scale=(H + R) ** -0.5), w)
    assert np.abs(got - want).max() <= TOLERANCE * np.abs(want).max()
    for t in (0, 5, T - 1):
        latents = mla_decode(
            inputs.query[:, t : t + 1], inputs.rows, np.full(B, t + 1, np.int32), scale=(H + R) ** -0.5, latent_dim=C
        )
        got = mla_output(mla_values(latents, w), w)
        assert np.abs(got[:, 0] - want[:, t]).max() <= TOLERANCE * np.abs(want).max()
