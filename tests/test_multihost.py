"""Two processes with one device each, joined over loopback sockets by jax.distributed, are a ring like any other."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import cases
import jax
import numpy as np

import jattn

ROOT = Path(__file__).parents[1]
PROCESS = """
import sys
import numpy as np
import jax

port, rank, source, target = sys.argv[1:]
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 1)
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"127.0.0.1:{port}", 2, int(rank), initialization_timeout=45)

import jattn
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

assert (jax.process_count(), jax.local_device_count(), jax.device_count()) == (2, 1, 2)
layout = jattn.SequenceLayout("zigzag", 2)
mesh = Mesh(np.array(jax.devices()), ("sp",))
sharding = NamedSharding(mesh, P(None, "sp"))


def spread(x):
    x = np.asarray(layout.shard(x))
    return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])


def loss(q, k, v):
    out = jattn.ring_attention(q, k, v, is_causal=True, axis="sp", layout=layout)
    return (out**2).sum(), out


given = np.load(source)
step = jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))
(_, out), gradients = step(*(spread(given[n]) for n in "qkv"))
for name, x in zip(("out", "dq", "dk", "dv"), (out, *gradients)):
    (part,) = x.addressable_shards
    np.save(f"{target}/{name}{rank}.npy", np.asarray(part.data))
"""


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def test_two_processes_are_one_ring(tmp_path):
    q, k, v = cases.qkv(1, 64, 64)
    np.savez(tmp_path / "given.npz", q=q, k=k, v=v)
    environment = {n: x for n, x in os.environ.items() if n not in ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES")}
    environment |= {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        environment.pop(name, None)  # gRPC would ask a proxy for 127.0.0.1
    run = [sys.executable, "-c", PROCESS, str(free_port())]
    rest = [str(tmp_path / "given.npz"), str(tmp_path)]
    processes = [
        subprocess.Popen([*run, str(rank), *rest], cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    try:
        errors = [p.communicate(timeout=120)[1] for p in processes]
    finally:
        for p in processes:
            p.kill()
    assert [p.returncode for p in processes] == [0, 0], "\n".join(errors)[-4000:]

    def loss(q, k, v):
        out = jattn.attention(q, k, v, is_causal=True)
        return (out**2).sum(), out

    (_, out), gradients = jax.value_and_grad(loss, (0, 1, 2), has_aux=True)(q, k, v)
    layout = jattn.SequenceLayout("zigzag", 2)
    for name, want in zip(("out", "dq", "dk", "dv"), (out, *gradients), strict=True):
        parts = [np.load(tmp_path / f"{name}{rank}.npy") for rank in range(2)]
        np.testing.assert_allclose(layout.unshard(np.concatenate(parts, 1)), want, atol=1e-5, err_msg=name)
