"""python3 gpu.py: pieces of the scans of linear attention. Correctness, then times by kernel for several piece lengths."""
import os, sys, time
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
os.environ.setdefault("XLA_FLAGS", "--xla_gpu_autotune_level=0")
sys.path[:0] = [".", "tests"]
T0 = time.time()
import collections, concurrent.futures, dataclasses, statistics
import jax, jax.numpy as jnp, numpy as np
jax.config.update("jax_numpy_dtype_promotion", "strict")
import test_hopper_linear_chunk as G, test_hopper_linear_channels as C
from linear_cases import problem
from benchmarks import gpu
from jattn.pallas import linear_chunk as mosaic

say = lambda *a: print(f"{time.time()-T0:5.1f}", *a, flush=True)
pool = concurrent.futures.ThreadPoolExecutor(14)

def forward(call, piece, rest=False):
    options = dataclasses.replace(call.options, config=mosaic.ChunkConfig(piece))
    return jax.jit(lambda x: mosaic.forward(x, None, options, rest=rest))

# correctness against the oracle
small = {}
for T, piece in ((700, 2), (300, 1)):
    for gates in ("mixed", "slow", "bound", "forgetting"):
        small[f"gdn {gates} T{T} piece {piece}"] = G, G.described(G.GATED, p := G.make(G.GATED, T=T, N=2, gates=gates)), p, piece
        small[f"kda {gates} T{T} piece {piece}"] = C, C.described(p := C.make(T=T, N=2, D=128, gates=gates)), p, piece
p = G.make(G.GATED, T=520, N=2, gate="bounded", beta_activation="sigmoid2")
small["gdn vk"] = G, G.described(G.GATED, G.turned(p, "vk"), state_layout="vk"), p, 3
p = C.make(T=520, N=2, state=False)
small["kda no state"] = C, C.described(p), p, 3
p = problem("gla", B=1, T=530, K=1, N=2, H=128, D=64, dtype=C.BF16)
small["gla"] = C, C.described(p), p, 3
p = G.make(G.GATED, T=1000, N=2, H=64, D=64)
small["gdn narrow"] = G, G.described(G.GATED, p), p, 5

def one(name):
    M, call, p, piece = small[name]
    try:
        (out, state, _), _ = forward(call, piece)(call.arrays)
        if call.options.state_layout == "vk": state = jnp.swapaxes(state, -1, -2)
        M.hold(p, out, state)
        return f"PASS {name}"
    except Exception as e:
        return f"FAIL {name} {type(e).__name__} {' '.join(str(e).split())[:300]}"

# times
def gdn(T, N):
    return G.empty_call(G.GATED, B=1, T=T, K=N, N=N, qk_l2norm=True)
def kda(T, N):
    return C.empty_call(C.KDA, B=1, T=T, K=N, N=N, qk_l2norm=True)
def filled(call, op):
    a, key = call.arrays, jax.random.key(0)
    n = lambda i, x, s=1.0: (s * jax.random.normal(jax.random.fold_in(key, i), x.shape)).astype(x.dtype)
    return dataclasses.replace(a, query=n(0, a.query), key=n(1, a.key), value=n(2, a.value),
        g=-0.1 * abs(n(3, a.g)), beta=jax.nn.sigmoid(n(4, a.beta)))
cells = {
    ("gdn", 8192, 8): (None, 4, 8, 16, 32), ("gdn", 32768, 16): (None, 16, 32, 64), ("kda", 65536, 16): (None, 16, 32, 64),
    ("gdn", 8192, 16): (None, 16, 32), ("kda", 8192, 8): (None, 8, 16, 32), ("gdn", 8192, 32): (None, 32), ("gdn", 32768, 1): (None, 8, 16),
}
built = {}
for (op, T, N), pieces in cells.items():
    call = (gdn if op == "gdn" else kda)(T, N)
    for piece in pieces:
        f = forward(call, piece)
        built[op, T, N, piece] = call, pool.submit(lambda f=f, x=call.arrays: f.lower(x).compile())
jobs = {name: pool.submit(one, name) for name in small}
for name, j in jobs.items(): say(j.result())

def named(f, x, iterations):
    found = gpu.named_launches(f, (x,), iterations)
    sums = collections.defaultdict(list)
    for call in found:
        each = collections.Counter()
        for name, ms in call: each[name.replace("jattn_linear_", "").replace("channel_", "").replace("_mosaic_gpu_kernel", "")[:24]] += ms
        for k, v in each.items(): sums[k].append(v)
    return {k: statistics.median(v) for k, v in sums.items()}

for (op, T, N), pieces in cells.items():
    want, x = None, None
    for piece in pieces:
        call, f = built[op, T, N, piece]
        try:
            f = f.result()
            x = filled(call, op) if x is None else x
            (out, state, _), _ = jax.block_until_ready(f(x))
            want = (out, state) if piece is None else want
            apart = [float(jnp.max(abs(a.astype(jnp.float32) - b.astype(jnp.float32))) / jnp.max(abs(b.astype(jnp.float32)))) for a, b in zip((out, state), want)]
            same = all(bool(jnp.array_equal(a, b)) for a, b in zip(f(x)[0][:2], (out, state)))
            t = named(f, x, 4)
            t = {k: min(v, n) for (k, v), n in zip(t.items(), named(f, x, 4).values())}
            say(op, f"1x{T}x{N} piece {piece}: {sum(t.values()):.4f} ms |", " ; ".join(f"{k} {v:.4f}" for k, v in t.items()), f"| to unsplit {apart[0]:.1e} {apart[1]:.1e} repeat {same}")
        except Exception as e:
            say("ERR", op, T, N, piece, type(e).__name__, " ".join(str(e).split())[:300])
        if time.time() - T0 > 75: say("time is up"); sys.exit()
