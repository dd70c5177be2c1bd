"""`compress` against the oracle; no chunking of a sequence shows in a bit of what comes out or of what is kept."""

import functools

import baseline_compressed as baseline
import jax
import jax.numpy as jnp
import numpy as np
import oracle_compressed as oracle
import pytest
from compare import check

from jattn.compressed_tokens import CompressState, Rotary, YarnScaling, compress, visible_entries

ROTARY = Rotary(4, base=100.0)
ANGLES = 100.0 ** (-np.arange(0, 4, 2) / 4)
KINDS = {"CSA": (4, True, 5), "HCA": (8, False, 6)}  # m, overlap, c


def draw(kind, B=2, T=33, dtype="float32", seed=0):
    m, overlap, c = KINDS[kind]
    rng, C = np.random.default_rng(seed), c * (2 if overlap else 1)
    u = rng.standard_t(3, (B, T, C)).astype(dtype)
    z = (2 * rng.standard_normal((B, T, C))).astype(dtype)
    z[:, 13:14] += 40  # one token takes a block
    weights = rng.standard_normal((m, C)), 1 + 0.3 * rng.standard_normal(c)
    return u, z, *(w.astype("float64" if dtype == "float64" else "float32") for w in weights)


@functools.cache
def compiled(kind, **options):
    return jax.jit(functools.partial(compress, overlap=KINDS[kind][1], **options))


def run(kind, u, z, ape, norm, state=None, **more):
    """NumPy arrays: slicing those compiles nothing."""
    return jax.tree.map(np.asarray, compiled(kind, rotary=ROTARY)(u, z, ape, state, norm=norm, **more))


def truth(kind, u, z, ape, norm=None, angles=ANGLES):
    wide = [np.asarray(x, np.float64) for x in (u, z, ape)] + [None if norm is None else np.asarray(norm, np.float64)]
    return oracle.entries(oracle.EntrySource(*wide, KINDS[kind][1]), angles)


def dense(kind, u, z, ape, norm, rotary=ROTARY):
    return jax.jit(lambda *x: baseline.entries(*x, KINDS[kind][1], rotary))(u, z, ape, norm)


def equal(a, b):
    """Bit for bit, and in structure."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        x, y = np.asarray(x), np.asarray(y)
        assert x.dtype == y.dtype and x.shape == y.shape and x.tobytes() == y.tobytes()


@pytest.mark.quick
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
def test_entries_are_those_of_the_definition(kind, dtype):
    inputs = draw(kind, dtype=dtype)
    entries, counts, _ = run(kind, *inputs)
    assert entries.dtype == dtype and entries.shape == (2, 33 // KINDS[kind][0], KINDS[kind][2])
    np.testing.assert_array_equal(counts, entries.shape[1])
    check("entries", entries, truth(kind, *inputs), [dense(kind, *map(jnp.asarray, inputs))], dtype)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_the_definition(kind):
    inputs = dict(zip(("u", "z", "ape", "norm"), draw(kind, B=1, T=18), strict=True))
    rng = np.random.default_rng(1)
    cotangent = rng.standard_normal((1, 18 // KINDS[kind][0], KINDS[kind][2])).astype(np.float32)

    def loss(d):
        lead = [d[n][:, 0] if d[n].ndim > 3 else d[n][0] for n in ("u", "z")]
        found = oracle.entries(oracle.EntrySource(*lead, d["ape"], d["norm"][..., :], KINDS[kind][1]), ANGLES)
        return (found * cotangent[0]).sum((-1, -2))

    want = oracle.gradients(loss, {n: np.asarray(x, np.float64) for n, x in inputs.items()})
    pull = lambda f: jax.jit(jax.grad(lambda d: jnp.sum(f(**d) * cotangent)))(inputs)  # noqa: E731
    got = pull(lambda **d: compiled(kind, rotary=ROTARY)(d["u"], d["z"], d["ape"], norm=d["norm"])[0])
    yard = pull(lambda **d: dense(kind, **d))
    for name in inputs:
        check("d" + name, got[name], want[name], [yard[name]], "float32")


@pytest.mark.parametrize("kind", KINDS)
def test_any_chunking_gives_the_bits_of_the_whole(kind):
    *tokens, ape, norm = draw(kind)
    entries, _, state = run(kind, *tokens, ape, norm)
    rng, m = np.random.default_rng(2), KINDS[kind][0]
    cuts = [range(1, 33), [m], [m - 1, m, m + 1], [2 * m], sorted(rng.choice(np.arange(1, 33), 6, replace=False))]
    for cut in cuts:
        now, found = CompressState.zeros(2, m, tokens[0].shape[-1], overlap=KINDS[kind][1]), []
        for a, b in zip([0, *cut], [*cut, 33], strict=True):
            new, counts, now = run(
                kind, *(padded(x[:, a:b], 33) for x in tokens), ape, norm, now, seq_lengths=np.array([b - a] * 2)
            )
            found.append(new[:, : int(counts[0])])
            assert not np.any(new[:, int(counts[0]) :])
        equal(np.concatenate(found, 1), entries)
        equal(now, state)


def padded(x, T):
    """x with NaN behind it, `[B, T, ..]`."""
    return np.concatenate([x, np.full((x.shape[0], T - x.shape[1], *x.shape[2:]), np.nan, x.dtype)], 1)


@pytest.mark.parametrize("kind", KINDS)
def test_the_state_after_every_length(kind):
    """One token at a time: the state of prompts as long, in programs of their own, and the rows that it should hold."""
    m, overlap, _ = KINDS[kind]
    u, z, ape, norm = draw(kind, T=2 * m + 3)
    now, rows = CompressState.zeros(2, m, u.shape[-1], overlap=overlap), m * (2 if overlap else 1)
    for t in range(u.shape[1]):
        _, counts, now = run(kind, u[:, t : t + 1], z[:, t : t + 1], ape, norm, now)
        np.testing.assert_array_equal(counts, int((t + 1) % m == 0))
        if t + 1 in (m - 1, m, 2 * m + 3):
            entries, _, state = run(kind, u[:, : t + 1], z[:, : t + 1], ape, norm)
            assert entries.shape[1] == (t + 1) // m
            equal(now, state)
        first = (t + 1) // m * m - (m if overlap else 0)
        for r in range(rows):
            p = first + r
            held = (now.u[:, r], now.z[:, r])
            want = (u[:, p], z[:, p] + ape[p % m]) if 0 <= p <= t else (0 * u[:, 0], 0 * z[:, 0] - np.inf)
            np.testing.assert_array_equal(held, want)


def test_the_first_entry_has_no_block_before():
    """A softmax over m candidates: what the A channels of block 0 hold changes no bit of it, but one of entry 1."""
    u, z, ape, norm = draw("CSA")
    entries = run("CSA", u, z, ape, norm)[0]
    u2, z2 = u.copy(), z.copy()
    u2[:, :4, :5], z2[:, :4, :5] = 7, -3
    other = run("CSA", u2, z2, ape, norm)[0]
    equal(other[:, 0], entries[:, 0])
    assert np.any(other[:, 1] != entries[:, 1])
    equal(other[:, 2:], entries[:, 2:])
    equal_scores = np.zeros_like(z), np.zeros_like(ape)
    plain = np.asarray(compiled("CSA")(u, *equal_scores)[0])
    np.testing.assert_allclose(plain[:, 0], u[:, :4, 5:].mean(1), rtol=1e-6, atol=1e-6)
    both = np.concatenate([u[:, :4, :5], u[:, 4:8, 5:]], 1)
    np.testing.assert_allclose(plain[:, 1], both.mean(1), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_ragged_lengths_read_nothing_behind_them(kind):
    """Three tokens make no entry of four: a batch of lengths 3, 9, 0 and more, with NaN behind each."""
    u, z, ape, norm = draw(kind, B=5, T=19)
    lengths = np.array([3, 9, 0, 19, 8], np.int32)
    u, z = (np.where(np.arange(19)[:, None] < lengths[:, None, None], x, np.float32(np.nan)) for x in (u, z))
    entries, counts, state = run(kind, u, z, ape, norm, seq_lengths=lengths)
    np.testing.assert_array_equal(counts, lengths // KINDS[kind][0])
    for b, n in enumerate(lengths):
        one = (padded(x[b : b + 1, :n], 9 if n < 10 else 19) for x in (u, z))
        alone, _, kept = run(kind, *one, ape, norm, seq_lengths=lengths[b : b + 1])
        equal(entries[b : b + 1, : alone.shape[1]], alone)
        assert not np.any(entries[b, alone.shape[1] :])
        equal(jax.tree.map(lambda x, b=b: x[b : b + 1], state), kept)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_ragged_lengths_are_finite(kind):
    u, z, ape, norm = draw(kind, T=19)
    lengths = np.array([3, 9], np.int32)
    u, z = (np.where(np.arange(19)[:, None] < lengths[:, None, None], x, np.float32(np.nan)) for x in (u, z))
    call = functools.partial(compiled(kind, rotary=ROTARY), seq_lengths=lengths)
    grads = jax.jit(jax.grad(lambda *x: jnp.sum(call(*x[:3], norm=x[3])[0]), (0, 1, 2, 3)))(u, z, ape, norm)
    grads = list(map(np.asarray, grads))
    assert all(np.isfinite(g).all() for g in grads)
    for g in grads[:2]:
        assert not np.any(g[0, 3:]) and not np.any(g[1, 9:])
        assert KINDS[kind][0] > 3 and not np.any(g[0])


@pytest.mark.parametrize("kind", KINDS)
def test_packed_sequences_are_compressed_alone(kind):
    lengths = [3, 9, 0, 17, 4]
    u, z, ape, norm = draw(kind, B=1, T=36)  # 3 rows behind the last sequence
    cu = np.cumsum([0, *lengths]).astype(np.int32)
    u[:, cu[-1] :] = z[:, cu[-1] :] = np.nan
    entries, counts, state = run(kind, u[0], z[0], ape, norm, cu_seqlens=cu)
    assert state is None and entries.shape[0] == 36 // KINDS[kind][0]
    np.testing.assert_array_equal(counts, np.array(lengths) // KINDS[kind][0])
    at = 0
    for a, b in zip(cu, cu[1:], strict=False):
        n = (b - a) // KINDS[kind][0]
        alone = run(kind, *(padded(x[:, a:b], 19) for x in (u, z)), ape, norm, seq_lengths=np.array([b - a]))[0][0]
        equal(entries[at : at + n], alone[:n])
        at += n
    assert not np.any(entries[at:])


def test_wild_numbers_read_nothing_outside():
    u, z, ape, norm = draw("CSA")
    for cu in ([0, 90, 5, 33], [-7, 3, 2, 40]):
        assert np.isfinite(run("CSA", u[0], z[0], ape, norm, cu_seqlens=jnp.asarray(cu))[0]).all()
    state = CompressState.zeros(2, 4, 10, overlap=True)
    for lengths in ([-5, 90], [33, 2**31 - 1]):
        got = run("CSA", u, z, ape, norm, state, seq_lengths=jnp.asarray(lengths, jnp.int32))
        equal(got, run("CSA", u, z, ape, norm, state, seq_lengths=np.clip(lengths, 0, 33).astype(np.int32)))


def test_float64_and_int64_lengths():
    with jax.enable_x64(True):
        u, z, ape, norm = draw("CSA", dtype="float64")
        entries, _, state = run("CSA", u, z, ape, norm, seq_lengths=np.array([33, 33]))
        assert entries.dtype == state.u.dtype == np.float64 and state.length.dtype == np.int32
        check(
            "entries",
            entries,
            truth("CSA", u, z, ape, norm),
            [dense("CSA", *map(jnp.asarray, (u, z, ape, norm)))],
            "float64",
        )


def test_visible_entries_are_complete_ones():
    np.testing.assert_array_equal(visible_entries(np.arange(9), 4), [0, 0, 0, 1, 1, 1, 1, 2, 2])


def test_rotary_turns_the_last_channels_and_back():
    rng = np.random.default_rng(3)
    x, positions = rng.standard_normal((3, 7, 10)).astype(np.float32), rng.integers(0, 10**6, (3, 7)).astype(np.int32)
    for rotary in (Rotary(4), Rotary(4, interleaved=False), Rotary(10, base=160000.0, scaling=YarnScaling(16, 65536))):
        y = np.asarray(jax.jit(rotary)(x, positions))
        np.testing.assert_array_equal(y[..., : -rotary.dim], x[..., : -rotary.dim])
        back = jax.jit(functools.partial(rotary, inverse=True))(y, positions)
        np.testing.assert_allclose(back, x, atol=2e-6)
    one, at = np.eye(10, dtype=np.float32)[None, 6], np.array([1], np.int32)
    np.testing.assert_allclose(jax.jit(Rotary(4))(one, at)[0, 6:], [np.cos(1), np.sin(1), 0, 0], atol=1e-6)
    np.testing.assert_allclose(
        Rotary(4, interleaved=False)(one, np.array([1]))[0, 6:], [np.cos(1), 0, np.sin(1), 0], atol=1e-6
    )


def test_yarn_keeps_fast_pairs_and_divides_slow_ones():
    base = 160000.0 ** (-np.arange(32) / 32)
    scaled = YarnScaling(16, 65536)(base)
    turns = 65536 * base / (2 * np.pi)
    np.testing.assert_array_equal(scaled[turns > 64], base[turns > 64])
    np.testing.assert_allclose(scaled[turns < 0.5], base[turns < 0.5] / 16)
    assert (np.diff(scaled) < 0).all() and ((scaled <= base) & (scaled >= base / 16)).all()


ODD = np.zeros((2, 33, 9), np.float32)
REFUSED = {
    "z has shape": dict(z=np.zeros((2, 32, 10), np.float32)),
    "ape has C=9 channels; u has C=10": dict(ape=np.zeros((4, 9), np.float32)),
    "ape has shape": dict(ape=np.zeros((10,), np.float32)),
    "overlap needs two halves": dict(u=ODD, z=ODD, ape=np.zeros((4, 9), np.float32)),
    r"norm has shape \(10,\)": dict(norm=np.ones(10, np.float32)),
    "seq_lengths=": dict(seq_lengths=[34, 1]),
    "cu_seqlens takes packed": dict(cu_seqlens=[0, 33]),
    r"state.u has shape \(2, 8, 12\)": dict(state=CompressState.zeros(2, 4, 12, overlap=True)),
    r"state.u has shape \(2, 4, 10\)": dict(state=CompressState.zeros(2, 4, 10, overlap=False)),
    r"state.u has shape \(3, 8, 10\)": dict(state=CompressState.zeros(3, 4, 10, overlap=True)),
    "expected \\[B, T, C\\]": dict(u=np.zeros((33, 10), np.float32), z=np.zeros((33, 10), np.float32)),
}  # fmt: skip


@pytest.mark.parametrize("message", REFUSED)
def test_refused(message):
    call = dict(zip(("u", "z", "ape", "norm"), draw("CSA"), strict=True)) | REFUSED[message]
    with pytest.raises(ValueError, match=message):
        compress(call.pop("u"), call.pop("z"), call.pop("ape"), call.pop("state", None), overlap=True, **call)


def test_types_refused():
    u, z, ape, _ = draw("CSA")
    with pytest.raises(TypeError, match="u must be floating-point, not int32"):
        compress(u.astype(np.int32), z, ape, overlap=True)
    with pytest.raises(TypeError, match="state must be a CompressState"):
        compress(u, z, ape, (u, z), overlap=True)
    with pytest.raises(TypeError, match="overlap=1"):
        compress(u, z, ape, overlap=1)
    with pytest.raises(ValueError, match="rotary dim=64 must be <= 5"):
        compress(u, z, ape, overlap=True, rotary=Rotary(64))
