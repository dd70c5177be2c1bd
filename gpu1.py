import sys, time, traceback
sys.path[:0] = [".", "tests"]
import functools, numpy as np, jax, jax.numpy as jnp
from benchmarks import gpu as bench
bench.prepare()
from jattn._linear import RULES
from jattn.linear._call import describe
from jattn.pallas import linear_chunk as mosaic
from jattn.pallas.hopper import linear_channel_prepare as prep, linear_channel_backward_scan as scan, linear_channel_backward_chunk as chunk

def make(op, B, T, K, N, H, D):
    k = iter(jax.random.split(jax.random.key(0), 12))
    n = lambda *s: jax.random.normal(next(k), s, jnp.float32).astype(jnp.bfloat16)
    g = -jax.nn.softplus(jax.random.normal(next(k), (B, T, N, H)))
    beta = jax.nn.sigmoid(jax.random.normal(next(k), (B, T, N))) if op == "kda" else None
    call = describe(RULES[op], n(B, T, K, H), n(B, T, K, H), n(B, T, N, D), g, beta, **(dict(qk_l2norm=True) if op == "kda" else {}))
    plan = mosaic._plan(call.arrays, call.options, 132, stages=2)
    S = n(B, plan.chunks, N, H, D)
    return plan, mosaic._inputs(call.arrays), n(B, T, N, D), jax.random.normal(next(k), (B, N, H, D)), S

def correct(op, *shape):
    plan, inp, do, df, S = make(op, *shape)
    B, n, N, H, D, T_ = plan.B, plan.chunks, plan.N, plan.H, plan.D, plan.T
    pr = jax.jit(lambda i: prep.launch(plan, i, multiprocessors=132))(inp)
    dz, d0, Ds = jax.jit(lambda p, a, b: scan.launch(plan, p, a, b))(pr, do, df)
    parts, dv = jax.jit(lambda *a: chunk.launch(plan, *a))(inp, pr, S, do, dz, Ds)
    f = lambda a: np.asarray(a).astype(np.float64)
    unslab = lambda a: np.concatenate([f(a)[..., i, :, :] for i in range(a.shape[3])], -1)
    tr = lambda a: a.swapaxes(-1, -2)
    ch = lambda a: np.pad(f(a), [(0, 0), (0, n * 64 - T_), (0, 0), (0, 0)]).reshape(B, n, 64, N, D).swapaxes(2, 3)
    q, u = unslab(pr.query), unslab(pr.update); delta = pr.erase is not None
    e, T = (unslab(pr.erase), f(pr.inverse)) if delta else (None, None)
    A, vec, o, G = f(pr.scores), f(pr.vector), ch(do), f(df)
    Z, DD = np.zeros((B, n, N, 64, D)), np.zeros((B, n, N, H, D))
    for c in reversed(range(n)):
        DD[:, c] = G
        du = tr(A[:, c]) @ o[:, c] + u[:, c] @ G
        Z[:, c] = tr(T[:, c]) @ du if delta else du
        G = vec[:, c, :, :H][..., None] * G + tr(q[:, c]) @ o[:, c]
        if delta: G = G + tr(e[:, c]) @ (vec[:, c, :, H:][..., None] * Z[:, c])
    rel = lambda a, b: float(np.abs(f(a) - b).max() / np.abs(b).max())
    print(op, shape, "dz", rel(ch(dz), Z), "D", rel(Ds, DD), "d0", rel(d0, G))
    v, s, d, z = ch(inp.value), f(S), f(Ds), ch(dz)
    P = H // 32; ac = f(parts.across).reshape(B, n, N, -1, P, 2, 128, 8)
    w = np.arange(128); lane, warp = w % 32, w // 32
    tile = np.zeros((B, n, N, ac.shape[3], P, 64, 32))
    for h in range(2):
        for j in range(8):
            reg = 8 * h + j  # register order: group reg//4, row (reg//2)%2, column reg%2
            r, c = 16 * warp + lane // 4 + 8 * (reg // 2 % 2), 8 * (reg // 4) + 2 * (lane % 4) + reg % 2
            tile[..., r, c] = ac[..., h, w, j]
    ac = np.concatenate([tile[..., i, :, :] for i in range(P)], -1)
    uu = v
    if delta:
        beta = vec[..., H:]; rest = v + e @ s; uu = T @ (beta[..., None] * rest)
        print("  dbeta", rel(parts.vector[..., H:], (z * rest).sum(-1)), "dv", rel(ch(dv), beta[..., None] * z),
              "dL", rel(parts.squares[..., 1, :, :], -np.tril(beta[..., None] * (z @ tr(uu)), -1)), "dkE", rel(ac[..., 2, :, :], -beta[..., None] * (z @ tr(s))))
    print("  dA", rel(parts.squares[..., 0, :, :], np.tril(o @ tr(uu))), "dq", rel(ac[..., 0, :, :], o @ tr(s)), "dkR", rel(ac[..., 1, :, :], uu @ tr(d)), "SD", rel(parts.vector[..., :H], (s * d).sum(-1)), flush=True)
    again = jax.jit(lambda p, a, b: scan.launch(plan, p, a, b))(pr, do, df)
    print("  repeats", all(bool(jnp.array_equal(x, y)) for x, y in zip(again, (dz, d0, Ds))))

def times(op, *shape):
    plan, inp, do, df, S = make(op, *shape)
    pr = jax.jit(lambda i: prep.launch(plan, i, multiprocessors=132))(inp)
    f1 = jax.jit(lambda p, a, b: scan.launch(plan, p, a, b)); dz, d0, Ds = jax.block_until_ready(f1(pr, do, df))
    f2 = jax.jit(lambda *a: chunk.launch(plan, *a)); jax.block_until_ready(f2(inp, pr, S, do, dz, Ds))
    for name, fn, args in (("scan", f1, (pr, do, df)), ("chunk", f2, (inp, pr, S, do, dz, Ds))):
        runs = bench.named_launches(fn, args, 5)
        print(op, shape, name, sorted(sum(ms for k, ms in r if "jattn" in k) for r in runs), {k for r in runs for k, _ in r}, flush=True)

for fn, args in [(correct, ("kda", 2, 200, 2, 4, 128, 128)), (correct, ("gla", 1, 130, 2, 2, 128, 128)), (correct, ("kda", 1, 130, 2, 2, 64, 64)), (correct, ("kda", 1, 130, 1, 1, 128, 256)), (correct, ("kda", 8, 100, 32, 32, 128, 128)),
                 (times, ("kda", 1, 8192, 32, 32, 128, 128)), (times, ("kda", 4, 4096, 32, 32, 128, 128)), (times, ("gla", 1, 8192, 32, 32, 128, 128)), (times, ("kda", 1, 65536, 16, 16, 128, 128))]:
    t0 = time.time()
    try: fn(*args)
    except Exception: traceback.print_exc()
    print("  took", round(time.time() - t0, 1), flush=True)
