"""One layer of DeepSeek-V4 with random weights, here and in PyTorch as the `transformers` package has it, in float32.

The layer's projections and norms are NumPy here; from there on it is the library. Whole prompts, then prompts in chunks
and tokens one at a time through the caches of both.
"""

import functools
import warnings

import jax
import numpy as np
import pytest
import transformers_floor

from jattn.compressed import EntryIndex, EntrySource, csa_attention, grouped_output, hca_attention
from jattn.compressed_cache import CompressedCache
from jattn.compressed_tokens import Rotary, YarnScaling

transformers_floor.skip_below()
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # theirs
    import torch
    from transformers import DynamicCache
    from transformers.models.deepseek_v4.configuration_deepseek_v4 import DeepseekV4Config
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4Attention, DeepseekV4RotaryEmbedding

B, T, WIDTH, N, D, C, WINDOW, TOP = 2, 57, 24, 4, 16, 8, 6, 3
J = 16  # with few index heads scores tie at 0, and which of equals PyTorch takes is not defined
RATIO = {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8}
KINDS = {"CSA": 0, "HCA": 1}
ROPE = {  # their parameters, and ours
    "plain": (dict(rope_type="default"), None),
    "yarn": (
        dict(rope_type="yarn", factor=16, original_max_position_embeddings=4096, beta_fast=32, beta_slow=1),
        YarnScaling(16, 4096),
    ),
}
CHUNKS = [13, *[1] * 5, 13, *[1] * 13, 13]  # 57 tokens


def layer(kind, rope):
    torch.manual_seed(0)
    config = DeepseekV4Config(
        vocab_size=8, hidden_size=WIDTH, moe_intermediate_size=8, num_hidden_layers=2, num_attention_heads=N,
        head_dim=D, q_lora_rank=12, n_routed_experts=2, num_experts_per_tok=1, layer_types=list(RATIO),
        compress_rates=dict(RATIO), sliding_window=WINDOW, o_groups=2, o_lora_rank=5, index_n_heads=J,
        index_head_dim=C, index_topk=TOP, partial_rotary_factor=0.5, rope_parameters=dict(ROPE[rope][0]),
        compress_rope_theta=300.0, max_position_embeddings=65536,
    )  # fmt: skip
    config._attn_implementation = "eager"
    module = DeepseekV4Attention(config, KINDS[kind]).eval()
    with torch.no_grad():
        for name, p in module.named_parameters():
            spread = p.shape[-1] ** -0.5 if name.endswith("proj.weight") else 1.0
            p.copy_((1.0 if "norm" in name else 0.0) + spread * (0.3 if "norm" in name else 1.5) * torch.randn(p.shape))
    return config, module


def theirs(config, module, x, chunks):
    """The layer's output, `[B, T, WIDTH]`, of tokens that come in chunks; one chunk is a prompt without a cache."""
    rotary, cache = DeepseekV4RotaryEmbedding(config), DynamicCache(config=config) if len(chunks) > 1 else None
    outs, start = [], 0
    with torch.no_grad():
        for n in chunks:
            part = torch.from_numpy(x[:, start : start + n])
            query = torch.arange(start, start + n)
            key = torch.arange(start - min(start, WINDOW - 1), start + n)
            seen = (key <= query[:, None]) & (key > query[:, None] - WINDOW)
            mask = torch.zeros(seen.shape).masked_fill(~seen, float("-inf"))[None, None].expand(B, -1, -1, -1)
            positions = query[None].expand(B, -1)
            embedded = {name: rotary(part, positions, layer_type=name) for name in ("main", "compress")}
            outs.append(module(part, embedded, positions, mask, cache=cache)[0].numpy())
            start += n
    return np.concatenate(outs, 1)


def ours(kind, module, x, chunks, rotary):
    w = {name: p.detach().numpy() for name, p in module.named_parameters()}

    def norm(x, weight=1.0):
        return x / np.sqrt((x * x).mean(-1, keepdims=True, dtype=np.float32) + np.float32(1e-6)) * weight

    def source(x, at):
        u, z = x @ w[at + "kv_proj.weight"].T, x @ w[at + "gate_proj.weight"].T
        return EntrySource(u, z, w[at + "position_bias"], w[at + "kv_norm.weight"])

    def inputs(x):
        latent = norm(x @ w["q_a_proj.weight"].T, w["q_a_norm.weight"])
        query = norm((latent @ w["q_b_proj.weight"].T).reshape(B, -1, N, D))
        kv = norm(x @ w["kv_proj.weight"].T, w["kv_norm.weight"])
        found = [query, kv, source(x, "compressor.")]
        if kind == "CSA":
            at = "compressor.indexer."
            q = (latent @ w[at + "q_b_proj.weight"].T).reshape(B, -1, J, C)
            weights = x @ w[at + "scorer.weights_proj.weight"].T * np.float32((J * C) ** -0.5)
            found.append(EntryIndex(q, weights, source(x, at)))
        return found

    options = dict(scale=D**-0.5, window=WINDOW, sinks=w["sinks"], rotary=rotary)
    options |= dict(top_k=TOP) if kind == "CSA" else {}
    call = jax.jit(functools.partial(csa_attention if kind == "CSA" else hca_attention, **options))
    outs, start, cache = [], 0, None
    if len(chunks) > 1:
        cache = CompressedCache.zeros(
            B, T, D, ratio=w["compressor.position_bias"].shape[0], overlap=kind == "CSA", window=WINDOW,
            index_dim=C if kind == "CSA" else None,
        )  # fmt: skip
    for n in chunks:
        found = call(*inputs(x[:, start : start + n]), cache)
        out, cache = (found, None) if cache is None else found
        w_a = w["o_a_proj.weight"].reshape(2, 5, N // 2 * D).transpose(0, 2, 1)
        outs.append(np.asarray(grouped_output(out, w_a, w["o_b_proj.weight"].T.copy())))
        start += n
    return np.concatenate(outs, 1)


@pytest.mark.parametrize("rope", ROPE)
@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_of_deepseek_v4(kind, rope):
    config, module = layer(kind, rope)
    rotary = Rotary(8, base=300.0, scaling=ROPE[rope][1])
    x = np.random.default_rng(1).standard_normal((B, T, WIDTH)).astype(np.float32)
    want = theirs(config, module, x, [T]), theirs(config, module, x, CHUNKS)
    for chunks in ([T], CHUNKS):
        got = ours(kind, module, x, chunks, rotary)
        for name, reference in zip(("a prompt", "chunks"), want, strict=True):
            error = np.abs(got - reference).max() / np.abs(reference).max()
            assert error <= 1e-5, f"in {len(chunks)} chunks: {error:.3g} of theirs in {name}"


def test_the_comparison_has_power():
    """Pairs of halves in the place of interleaved ones, which is another model, are far off."""
    config, module = layer("CSA", "plain")
    x = np.random.default_rng(1).standard_normal((B, T, WIDTH)).astype(np.float32)
    want = theirs(config, module, x, [T])
    wrong = ours("CSA", module, x, [T], Rotary(8, base=300.0, interleaved=False))
    assert np.abs(wrong - want).max() > 1e-2 * np.abs(want).max()
