"""Flax layers beside those of Kimi Linear, Qwen3-Next and DeepSeek-V4, as transformers computes them.

One tiny random layer of each in PyTorch on a CPU, the same weights and tokens here, float32: every position at once,
and a prompt followed by single tokens through the cache. Needs torch and transformers, which nothing else does.
"""

import importlib.util
import unittest
import warnings

import jax
import numpy as np
import pytest
from flax import nnx

import jattn
import jattn.nnx

MISSING = [name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None]
if MISSING:
    raise unittest.SkipTest(f"not installed: {', '.join(MISSING)}; pip install --group transformers")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of other libraries
    import torch
    from transformers.models.deepseek_v4 import configuration_deepseek_v4, modeling_deepseek_v4
    from transformers.models.kimi_linear import configuration_kimi_linear, modeling_kimi_linear
    from transformers.models.qwen3_next import configuration_qwen3_next, modeling_qwen3_next

pytestmark = pytest.mark.filterwarnings("ignore")

B, T, PROMPT, M = 2, 40, 27, 24
TOLERANCE = 1e-5  # relative, float32
WINDOW, TOP, J, C = 6, 3, 16, 8  # with few index heads scores tie at 0


def randomised(module):
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, p in module.named_parameters():
            noise = torch.randn(p.shape, generator=generator)
            spread = p.shape[-1] ** -0.5 if name.endswith("proj.weight") else 0.3
            p.copy_(spread * noise + ("norm" in name))
    return module.eval()


def weights(module):
    return {name: p.detach().numpy() for name, p in module.named_parameters()}


def load(layer, arrays):
    """Sets every parameter of the layer; names are as in "query.kernel"."""
    state = nnx.state(layer, nnx.Param)
    flat = dict(nnx.to_flat_state(state))
    assert {".".join(map(str, path)) for path in flat} == set(arrays)
    for path, variable in flat.items():
        variable[...] = np.ascontiguousarray(arrays[".".join(map(str, path))].reshape(variable.shape))
    nnx.update(layer, state)


def kimi_delta():
    N, H = 3, 8
    config = configuration_kimi_linear.KimiLinearConfig(
        hidden_size=M, linear_head_dim=H, linear_num_heads=N, linear_conv_kernel_dim=4, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, vocab_size=8, layer_types=["linear_attention"],
    )  # fmt: skip
    module = randomised(modeling_kimi_linear.KimiLinearDeltaAttention(config, 0))
    w = weights(module)
    taps = np.split(w["conv1d.weight"][:, 0], 3)
    layer = jattn.nnx.KimiDeltaAttention(N, M, N * H, epsilon=config.rms_norm_eps, rngs=nnx.Rngs(0))
    arrays = {f"{name}_conv.kernel": x for name, x in zip(("query", "key", "value"), taps, strict=True)}
    for ours, theirs in {
        "query": "q_proj", "key": "k_proj", "value": "v_proj", "beta": "b_proj", "decay_down": "forget_gate.f_a_proj",
        "decay_up": "forget_gate.f_b_proj", "gate_down": "g_a_proj", "gate_up": "g_b_proj", "out": "o_proj",
    }.items():  # fmt: skip
        arrays[ours + ".kernel"] = w[theirs + ".weight"].T
    arrays |= {"A_log": w["forget_gate.A_log"], "dt_bias": w["forget_gate.dt_bias"], "norm.scale": w["o_norm.weight"]}
    load(layer, arrays)
    return layer, lambda x: module(x)


def qwen_delta():
    K, N, H, D = 2, 4, 8, 6
    config = configuration_qwen3_next.Qwen3NextConfig(
        hidden_size=M, linear_num_value_heads=N, linear_num_key_heads=K, linear_key_head_dim=H,
        linear_value_head_dim=D, linear_conv_kernel_dim=4, num_hidden_layers=1, vocab_size=8,
        layer_types=["linear_attention"],
    )  # fmt: skip
    module = randomised(modeling_qwen3_next.Qwen3NextGatedDeltaNet(config, 0))
    w, G = weights(module), N // K
    both = w["in_proj_qkvz.weight"].reshape(K, 2 * H + 2 * G * D, M)
    query, key, value, gate = np.split(both, np.cumsum([H, H, G * D]), axis=1)
    beta, decay = np.split(w["in_proj_ba.weight"].reshape(K, 2 * G, M), 2, axis=1)
    taps = np.split(w["conv1d.weight"][:, 0], np.cumsum([K * H, K * H]))
    layer = jattn.nnx.GatedDeltaNet(
        N, M, N * H, num_qk_heads=K, value_head_dim=D, epsilon=config.rms_norm_eps, rngs=nnx.Rngs(0)
    )
    arrays = dict(query=query, key=key, value=value, output_gate=gate, beta=beta, decay=decay)
    arrays = {name + ".kernel": x.reshape(-1, M).T for name, x in arrays.items()}
    arrays |= {f"{name}_conv.kernel": x for name, x in zip(("query", "key", "value"), taps, strict=True)}
    arrays |= {"A_log": w["A_log"], "dt_bias": w["dt_bias"], "norm.scale": w["norm.weight"]}
    load(layer, arrays | {"out.kernel": w["out_proj.weight"].T})
    return layer, lambda x: module(x)


def kimi_latent():
    N, H, R, D, C = 3, 8, 4, 6, 12
    config = configuration_kimi_linear.KimiLinearConfig(
        hidden_size=M, num_attention_heads=N, num_key_value_heads=N, q_lora_rank=None, kv_lora_rank=C,
        qk_nope_head_dim=H, qk_rope_head_dim=R, v_head_dim=D, num_hidden_layers=1, vocab_size=8,
        attn_implementation="eager",
    )  # fmt: skip
    module = randomised(modeling_kimi_linear.KimiLinearAttention(config, 0))
    w = weights(module)
    up = w["kv_b_proj.weight"].T.reshape(C, N, H + D)
    layer = jattn.nnx.MultiHeadLatentAttention(
        N, M, N * H, latent_features=C, rope_features=R, value_head_dim=D, rope=False, epsilon=config.rms_norm_eps,
        rngs=nnx.Rngs(0),
    )  # fmt: skip
    load(layer, {
        "query_up.kernel": w["q_proj.weight"].T, "latent_down.kernel": w["kv_a_proj_with_mqa.weight"].T,
        "latent_norm.scale": w["kv_a_layernorm.weight"], "key_up.kernel": up[..., :H], "value_up.kernel": up[..., H:],
        "out.kernel": w["o_proj.weight"].T,
    })  # fmt: skip
    hidden = torch.full((T, T), torch.finfo(torch.float32).min).triu(1).expand(B, 1, T, T)
    return layer, lambda x: module(x, attention_mask=hidden)[0]


def deepseek(kind, index):
    N, D, Q, G, R = 4, 16, 12, 2, 5
    ratios = {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8}
    config = configuration_deepseek_v4.DeepseekV4Config(
        vocab_size=8, hidden_size=M, moe_intermediate_size=8, num_hidden_layers=2, num_attention_heads=N,
        head_dim=D, q_lora_rank=Q, n_routed_experts=2, num_experts_per_tok=1, layer_types=list(ratios),
        compress_rates=dict(ratios), sliding_window=WINDOW, o_groups=G, o_lora_rank=R, index_n_heads=J,
        index_head_dim=C, index_topk=TOP, partial_rotary_factor=0.5, rope_parameters=dict(rope_type="default"),
        compress_rope_theta=300.0, max_position_embeddings=65536,
    )  # fmt: skip
    config._attn_implementation = "eager"
    module = randomised(modeling_deepseek_v4.DeepseekV4Attention(config, index))
    w, sparse = weights(module), kind == "csa"
    options = dict(
        query_latent_features=Q, window=WINDOW, num_groups=G, group_features=R, rotary=jattn.Rotary(8, base=300.0),
        epsilon=config.rms_norm_eps, rngs=nnx.Rngs(0),
    )  # fmt: skip
    if sparse:
        layer = jattn.nnx.CompressedSparseAttention(N, M, N * D, top_k=TOP, index_heads=J, index_head_dim=C, **options)
    else:
        layer = jattn.nnx.HeavilyCompressedAttention(N, M, N * D, ratio=8, **options)
    arrays = {
        "query_down.kernel": w["q_a_proj.weight"].T, "query_norm.scale": w["q_a_norm.weight"],
        "query_up.kernel": w["q_b_proj.weight"].T, "kv.kernel": w["kv_proj.weight"].T,
        "kv_norm.scale": w["kv_norm.weight"], "sinks": w["sinks"],
        "out_down.kernel": w["o_a_proj.weight"].reshape(G, R, -1).transpose(2, 0, 1),
        "out_up.kernel": w["o_b_proj.weight"].T,
    }  # fmt: skip
    sources = {"entries": "compressor."} | ({"index_entries": "compressor.indexer."} if sparse else {})
    for ours, at in sources.items():
        arrays |= {f"{ours}.{name}.kernel": w[f"{at}{name}_proj.weight"].T for name in ("kv", "gate")}
        arrays |= {f"{ours}.position_bias": w[at + "position_bias"], f"{ours}.norm.scale": w[at + "kv_norm.weight"]}
    if sparse:
        arrays["index_query.kernel"] = w["compressor.indexer.q_b_proj.weight"].T
        arrays["index_weights.kernel"] = w["compressor.indexer.scorer.weights_proj.weight"].T
    load(layer, arrays)
    rotary = modeling_deepseek_v4.DeepseekV4RotaryEmbedding(config)
    at = torch.arange(T)
    seen = (at <= at[:, None]) & (at > at[:, None] - WINDOW)
    mask = torch.zeros(seen.shape).masked_fill(~seen, float("-inf"))[None, None].expand(B, -1, -1, -1)

    def theirs(x):
        positions = at[None].expand(B, -1)
        embedded = {name: rotary(x, positions, layer_type=name) for name in ("main", "compress")}
        return module(x, embedded, positions, mask)[0]

    return layer, theirs


LAYERS = {
    "Kimi Delta Attention": kimi_delta,
    "Gated DeltaNet of Qwen3-Next": qwen_delta,
    "latent attention of Kimi Linear": kimi_latent,
    "CSA of DeepSeek-V4": lambda: deepseek("csa", 0),
    "HCA of DeepSeek-V4": lambda: deepseek("hca", 1),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers(name):
    layer, theirs = LAYERS[name]()
    x = torch.randn(B, T, M, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        want = theirs(x).numpy()
    call = nnx.jit(lambda layer, x, decode: layer(x, decode=decode), static_argnames="decode")
    x = x.numpy()
    layer.init_cache((B, T, M))
    parts = [call(layer, x[:, a:b], True) for a, b in [(0, PROMPT), *((t, t + 1) for t in range(PROMPT, T))]]
    for got in (call(layer, x, False), np.concatenate(parts, axis=1)):
        assert np.abs(np.asarray(got) - want).max() <= TOLERANCE * np.abs(want).max()
    changed = jax.tree.map(lambda p: p * np.float32(1.01), nnx.state(layer, nnx.Param))  # the comparison has power
    nnx.update(layer, changed)
    assert np.abs(np.asarray(call(layer, x, False)) - want).max() > 100 * TOLERANCE * np.abs(want).max()
