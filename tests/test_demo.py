"""notebooks/demo.py, at a size that takes seconds."""

import dataclasses
import functools
import importlib.util
import sys
from pathlib import Path

import baseline_linear
import compare
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from linear_cases import quick_compiles  # noqa: F401 -- for every test here

import jattn.nnx

SCRIPT = Path(__file__).parents[1] / "notebooks" / "demo.py"


@pytest.fixture(scope="module")
def demo():
    spec = importlib.util.spec_from_file_location("demo", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["demo"] = module  # where dataclasses look up their annotations
    spec.loader.exec_module(module)
    yield module
    del sys.modules["demo"]


@pytest.fixture(scope="module")
def tiny(demo):
    return demo.Config(
        steps=12, sequence_length=64, batch=2, width=32, heads=4, kv_heads=2, window=8, memory_lengths=(64, 512),
        sample_length=40,
    )


@pytest.fixture
def promotion():
    """optax mixes dtypes; everything else runs under the strict setting of the suite."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture(scope="module")
def tiny_hybrid(tiny):
    return dataclasses.replace(tiny, layers=4, hybrid=True)


class DenseLatentLayer(jattn.nnx.MultiHeadLatentAttention):
    """The gated latent layer with keys and values of every head and the mask written out, of one document."""

    def __call__(self, x, segment_ids):
        rows, T = self.latent_down(x), x.shape[1]
        latent, shared = self.latent_norm(rows[..., : self.latent_features]), rows[..., None, self.latent_features :]
        key, value = self.key_up(latent), self.value_up(latent)
        key = jnp.concatenate([key, jnp.broadcast_to(shared, (*key.shape[:-1], self.rope_features))], axis=-1)
        scores = jnp.einsum("btnh,bsnh->bnts", self.query_up(x), key) * self.scale
        weights = jax.nn.softmax(jnp.where(jnp.tri(T, dtype=bool), scores, -jnp.inf))
        return self.out(jnp.einsum("bnts,bsnd->btnd", weights, value) * jax.nn.sigmoid(self.gate(x)))


class ChunkwiseLayer(jattn.nnx.KimiDeltaAttention):
    """The linear layer on the yardstick of linear attention."""

    @staticmethod
    def op(query, key, value, g, beta, *, A_log, dt_bias, segment_ids, **options):
        q, k, g = jattn.linear.l2_norm(query), jattn.linear.l2_norm(key), jattn.linear.kda_gate(g, A_log, dt_bias)
        beta, (B, T, N, H) = jax.nn.sigmoid(beta), query.shape
        state, resets = jnp.zeros((B, N, H, value.shape[-1]), g.dtype), jnp.zeros((B, T), bool)
        return baseline_linear._linear(query.dtype.name, resets, q * H**-0.5, k, value, g, beta, beta, state)[0]


by_token = functools.partial(jattn.nnx.KimiDeltaAttention, mode="recurrent")


def plain_hybrid_layer(config, i, rngs, linear=by_token):
    """The recurrence token by token, or in plain chunks, and dense attention."""
    if i % 4 == 3:
        return DenseLatentLayer(config.heads, config.width, gated=True, rope=False, rngs=rngs)
    return linear(config.heads, config.width, rngs=rngs)


def learnt(printed):
    """The loss on held-out documents before less that after."""
    before, after = (float(printed.partition("held-out loss ")[2].split()[i]) for i in (0, 2))
    return before - after


@pytest.mark.usefixtures("promotion")
def test_runs_agrees_and_learns(demo, tiny, tmp_path, capsys):
    assert demo.run(tiny, tmp_path / "out") == 0
    printed = capsys.readouterr().out
    assert printed.count("relative difference") == 12 and "step   12/12" in printed
    assert learnt(printed) > 0.5
    assert (tmp_path / "out" / "demo.png").stat().st_size > 1000
    short, long = (line.split() for line in printed.splitlines() if line.split()[:1] in (["64"], ["512"]))
    assert float(long[1]) < 0.5 * float(long[2]), "jattn's memory is not below the dense layer's"
    assert printed.partition("through the caches:")[2].strip().startswith('The "for" statement')


@pytest.mark.usefixtures("promotion")
def test_the_hybrid_learns_too(demo, tiny_hybrid, tmp_path, capsys):
    assert demo.run(tiny_hybrid, tmp_path / "out") == 0
    printed = capsys.readouterr().out
    assert printed.count("relative difference") == 1 and "lockstep" not in printed
    assert learnt(printed) > 0.5
    assert (tmp_path / "out" / "demo.png").stat().st_size > 1000


@pytest.mark.parametrize("kind", ["local and global", "hybrid"])
def test_decoding_is_the_model_over_the_whole_row(demo, tiny, tiny_hybrid, kind):
    """Greedy bytes and their logits through the caches, and without any, held against dense layers in float64."""
    config = tiny_hybrid if kind == "hybrid" else tiny
    chunked = functools.partial(plain_hybrid_layer, linear=ChunkwiseLayer)
    hybrid, local = (demo.hybrid_layer, plain_hybrid_layer, chunked), (demo.jattn_layer, demo.DenseLayer)
    ours, *dense = hybrid if config.hybrid else local
    graphdef, params = demo.build(ours, config)
    prompt = np.random.default_rng(0).integers(1, 256, 17).astype(np.uint8)  # longer than the window
    tokens, logits = demo.generate(graphdef, params, jax.random.key(0), prompt, 40, temperature=0.0)
    whole = demo.without_caches(graphdef, params, tokens)
    np.testing.assert_array_equal(tokens[:17], prompt)
    np.testing.assert_array_equal(tokens[17:], whole[16:-1].argmax(-1))
    dense = [demo.graph_of(layer, config) for layer in dense]
    baselines = [np.asarray(demo.without_caches(one, params, tokens)) for one in dense]
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):  # embeddings keep their dtype
        wide = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
        truth = np.asarray(demo.without_caches(dense[0], wide, tokens))
    assert truth.dtype == np.float64 and whole.dtype == logits.dtype == np.float32
    compare.check("without caches", whole, truth, baselines, np.float32)
    compare.check("through caches", logits, truth[16:-1], [x[16:-1] for x in baselines], np.float32)


@pytest.mark.parametrize(("off", "passed"), [(0.0, True), (2e-5, False), (np.nan, False)])
def test_reports_caches_that_are_wrong(demo, tiny, off, passed, monkeypatch, capsys):
    logits = np.ones((24, 256), np.float32)
    monkeypatch.setattr(demo, "generate", lambda *args: (np.full(40, 65, np.uint8), logits[:20]))
    monkeypatch.setattr(demo, "without_caches", lambda *args: np.r_[np.zeros((19, 256)), logits[:20] + off, logits[:1]])
    assert demo.sample(None, None, b'The "for" statement', tiny) == passed
    assert "A" * 39 in capsys.readouterr().out


@pytest.mark.usefixtures("promotion")
def test_a_sequence_over_eight_devices_trains_the_same(demo, tiny, capsys):
    config = dataclasses.replace(tiny, devices=8)
    rows = demo.pack(demo.split_documents()[0][:20], config.sequence_length)
    mesh = jax.make_mesh((8,), ("sequence",), axis_types=(jax.sharding.AxisType.Auto,))
    with jax.set_mesh(mesh):
        ours, params = demo.build(demo.ring_layer, config)
        dense, _ = demo.build(demo.DenseLayer, config)
        optimizer = demo.optimizer_of(config)
        assert demo.compare(demo.step_of(ours, optimizer), dense, params, rows, optimizer, config)
    assert capsys.readouterr().out.count("relative difference") == 11


@pytest.mark.parametrize("worst", [(0.0, 2e-5), (2e-5, 0.0), (0.0, np.nan)])
def test_reports_a_difference(demo, tiny, worst, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(demo, "run_lockstep", lambda *args: np.array(worst))
    assert demo.run(tiny, tmp_path) == 1
    assert "FAILED: more than 1e-05" in capsys.readouterr().out


def test_relative_difference_is_that_of_the_worst_array(demo):
    x, y = {"a": np.array([1.0, 4.0]), "b": np.array([10.0])}, {"a": np.array([1.0, 4.2]), "b": np.array([10.0])}
    assert demo.relative_difference(y, x) == pytest.approx(0.05)
    assert np.isnan(demo.relative_difference(x | {"b": np.array([np.nan])}, x))


def test_options(demo):
    config = demo.config_of(["--steps", "3", "--sequence-length", "128", "--seed", "7", "--devices", "8"])
    assert config == dataclasses.replace(demo.Config(), steps=3, sequence_length=128, seed=7, devices=8)
    assert demo.config_of([]) == demo.Config()
    assert demo.config_of(["--hybrid", "--steps", "3"]) == dataclasses.replace(demo.HYBRID, steps=3)
    with pytest.raises(SystemExit):
        demo.config_of(["--hybrid", "--devices", "8"])


def test_packing_keeps_every_byte_and_cuts_long_documents_only(demo):
    documents = [bytes([65 + i]) * n for i, n in enumerate((3, 20, 5, 8, 1))]
    rows = demo.pack(documents, 8)
    used = rows.segments != demo.PADDING
    assert used.sum() == sum(map(len, documents))
    pieces = []
    for tokens, targets, segments in zip(*rows, strict=True):
        for i in set(segments[segments != demo.PADDING].tolist()):
            here = segments == i
            piece = bytes(targets[here])
            assert bytes(tokens[here]) == b"\0" + piece[:-1]
            pieces.append(piece)
    assert sorted(pieces) == sorted([b"AAA", b"B" * 8, b"B" * 8, b"B" * 4, b"C" * 5, b"D" * 8, b"E"])


def test_padding_is_out_of_the_loss(demo, tiny):
    graphdef, params = demo.build(demo.jattn_layer, tiny)
    rows = demo.pack([b"some text"], 16)
    changed = rows._replace(targets=np.where(rows.segments == demo.PADDING, np.uint8(7), rows.targets))
    loss = jax.jit(lambda batch: demo.loss_of(graphdef, params, batch))
    losses = [float(loss(demo.take(r, np.arange(1)))) for r in (rows, changed)]
    assert losses[0] == losses[1]


def test_progress_bar_on_a_terminal(demo, monkeypatch, capsys):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    for step in (5, 10):
        demo.show_progress(step, 10, 1.5, 0.0)
    first, second = capsys.readouterr().out.split("\r")[1:]
    assert "[###############...............] step    5/10  loss 1.500" in first and not first.endswith("\n")
    assert "[" + "#" * 30 + "]" in second and second.endswith("\n")
