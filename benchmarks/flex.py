"""Compiled PyTorch FlexAttention: `python -m benchmarks.flex fwd|fwd+bwd [CASE...]` prints JSON, case -> ms.

A process of its own: two frameworks in one would share a profiler and a memory pool.
"""

import functools
import json
import statistics
import sys

try:
    import torch
except ImportError:  # only this peer needs it
    torch = None

B, S, N, H = 4, 4096, 16, 128
PREFIX = f"B{B} S{S} N{N} H{H} causal"


def causal(b, h, t, s):
    return s <= t


def window(b, h, t, s):
    return (s <= t) & (t - s <= 511)


def documents(b, h, t, s):
    return (s <= t) & (t // 1024 == s // 1024)


def alibi(score, b, h, t, s):
    return score - torch.exp2(-8.0 * (h + 1) / N) * (t - s)


def soft_cap(score, b, h, t, s):
    return 20.0 * torch.tanh(score / 20.0)


CASES = {
    PREFIX: (causal, None),
    f"{PREFIX} window(511,0)": (window, None),
    f"{PREFIX} documents 1024": (documents, None),
    f"{PREFIX} soft cap 20": (causal, soft_cap),
    f"{PREFIX} ALiBi": (causal, alibi),
}


def milliseconds(call, rounds=9):
    """The median time between two events on the card."""
    taken = []
    for _ in range(rounds):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        for _ in range(4):
            call()
        end.record()
        torch.cuda.synchronize()
        taken.append(start.elapsed_time(end) / 4)
    return statistics.median(taken)


def dense(query, key, value, mask, mod):
    """The last rows of the first head, in float32."""
    t, s = torch.arange(S - 64, S, device="cuda")[:, None], torch.arange(S, device="cuda")[None]
    score = query[0, 0, -64:].float() @ key[0, 0].float().T * H**-0.5
    first = torch.zeros((), device="cuda", dtype=torch.int32)
    score = mod(score, first, first, t, s) if mod else score
    weights = torch.where(mask(first, first, t, s), score, -torch.inf).softmax(-1)
    return weights @ value[0, 0].float()


def measure(of, mask, mod):
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch.manual_seed(0)
    query, key, value = (torch.randn(B, N, S, H, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    blocks = create_block_mask(mask, None, None, S, S, device="cuda")
    call = functools.partial(torch.compile(flex_attention), query, key, value, score_mod=mod, block_mask=blocks)
    with torch.no_grad():
        wanted = dense(query, key, value, mask, mod)
        apart = (call()[0, 0, -64:].float() - wanted).abs().max() / wanted.abs().max()
        if not apart <= 3e-2:
            raise RuntimeError(f"differs from the dense computation by {apart:.1e}")
        if of == "fwd":
            return milliseconds(call)
    operands, dout = (query, key, value), torch.randn_like(query)
    for x in operands:
        x.requires_grad_()
    return milliseconds(lambda: torch.autograd.grad(call(), operands, dout))


def main(of, *names):
    found = {}
    for name, (mask, mod) in CASES.items():
        if names and name not in names:
            continue
        try:
            found[name] = round(measure(of, mask, mod), 4)
        except Exception as error:
            print(f"flex {name} failed: {type(error).__name__}: {str(error)[:300]}", file=sys.stderr, flush=True)
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
