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


import dataclasses, collections, concurrent.futures
import oracle_linear, baseline_linear
import test_hopper_linear_channels as tests
from linear_cases import cotangents
from jattn._linear import Context
from jattn.pallas.hopper import linear_channel_backward as back
mosaic._BACKWARDS = (None, back)

def both(options, arrays, dout, dfinal):
    out, rest = mosaic.forward(arrays, Context(), options, rest=True)
    return out[:2], mosaic.backward(arrays, Context(), options, rest, (dout, dfinal, None))

def case(name):
    p, options = tests.CASES[name]
    layout = options.get("state_layout", "kv")
    call = tests.described(tests.turned(p, layout), **options)
    dout, dfinal = cotangents(p)
    args = call.arrays, jnp.asarray(dout), jnp.asarray(dfinal.swapaxes(-1, -2) if layout == "vk" else dfinal)
    return (name, p, layout), jax.jit(functools.partial(both, call.options)), args

def judge(key, found):
    name, p, layout = key
    (out, state), got = found
    dout, dfinal = cotangents(p)
    truth, yards = oracle_linear.backward(p, dout, dfinal), list(baseline_linear.gradients(p, dout, dfinal))
    line = []
    for n in ("query", "key", "value", "g", "beta", "initial_state", "A_log", "dt_bias"):
        x = getattr(got, n, None)
        if x is None or n not in truth: continue
        x = np.asarray(x).astype(np.float64)
        if n == "initial_state" and layout == "vk": x = x.swapaxes(-1, -2)
        t = np.reshape(truth[n], x.shape); size = max(np.abs(t).max(), truth["terms"].get(n, 0.0), 1e-30)
        y = max(np.abs(np.reshape(b[n], x.shape) - t).max() for b in yards); e = np.abs(x - t).max()
        line.append(f"{n} {e / size:.1e}/{y / size:.1e}" + ("" if e <= 2 * y + 2 * 2**-7 * size else " FAIL"))
    print(name, "|", "; ".join(line), flush=True)

def timed(op, *shape):
    plan, inp, do, df, S = make(op, *shape)
    call_arrays = mosaic.dataclasses.replace(tests.empty_call(op, 1, 64, 1, N=1).arrays, query=inp.query, key=inp.key, value=inp.value, g=inp.g, beta=inp.beta, initial_state=None)
    return ("time", op, shape), jax.jit(functools.partial(both, plan.options)), (call_arrays, do, df)

def attempt(fn, *args):
    try: return fn(*args)
    except Exception: traceback.print_exc(); print(args, "failed", flush=True)

t0 = time.time()
jobs = [attempt(case, n) for n in ("mixed gates", "keys alike, beta 1.99", "softplus, groups, narrow", "bounded gate, layout vk", "without the delta rule")]
jobs += [attempt(timed, "kda", *s) for s in ((1, 8192, 32, 32, 128, 128), (4, 4096, 32, 32, 128, 128), (1, 65536, 16, 16, 128, 128))]
jobs = [j for j in jobs if j]
lowered = [attempt(lambda j=j: j[1].lower(*j[2])) for j in jobs]
print("lowered", time.time() - t0, flush=True)
with concurrent.futures.ThreadPoolExecutor(8) as pool:
    compiled = list(pool.map(lambda l: None if l is None else attempt(l.compile), lowered))
print("compiled", time.time() - t0, flush=True)
attempt(correct, "kda", 2, 200, 2, 4, 128, 128)
for (key, _, args), f in zip(jobs, compiled):
    if f is None: continue
    if key[0] != "time": attempt(lambda: judge(key, jax.block_until_ready(f(*args)))); continue
    def times():
        first = jax.block_until_ready(f(*args))
        print(key, "repeats", all(all(bool(jnp.array_equal(a, b)) for a, b in zip(jax.tree.leaves(f(*args)), jax.tree.leaves(first))) for _ in range(3)), "finite", all(bool(jnp.isfinite(x.astype(jnp.float32)).all()) for x in jax.tree.leaves(first)))
        runs = bench.named_launches(f, args, 4)
        total = collections.defaultdict(list)
        for r in runs:
            for k, ms in r: total[k[:60]].append(ms)
            total["ALL"].append(sum(ms for _, ms in r))
        for k, v in sorted(total.items(), key=lambda x: -max(x[1])): print("   ", k, [round(x, 4) for x in v][:8], flush=True)
    attempt(times)
print("took", time.time() - t0, flush=True)
