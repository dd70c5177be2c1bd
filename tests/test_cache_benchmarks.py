"""The benchmarks of decoding and of paged caches: what they count, who is timed, what a row says."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import caches, decode, gpu, providers, record, run
from benchmarks.caches import Case
from jattn import _dispatch

TINY = Case(3, 64, 4, 2, 16)
BOTH = Case(3, 64, 4, 2, 16, None, "tail").varied(stored=("int8",))
SUITES = ("decode", "paged")


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setitem(caches._TABLES, "small", [TINY, *BOTH])
    monkeypatch.setattr(caches, "PAGES", (16,))
    monkeypatch.setattr(decode, "read_rate", lambda on_gpu: 1e9)


def test_bytes_are_those_of_tokens_that_exist():
    shape = Case(64, 8192, 32, 8, 128)
    assert shape.bytes("bfloat16") == 64 * 8192 * 8 * 128 * 2 * 2
    assert Case(64, 8192, 32, 8, 128, 16).bytes("bfloat16") == shape.bytes("bfloat16")
    (quantised,) = shape.varied(stored=("int8",))
    assert quantised.bytes("bfloat16") == 64 * 8192 * 8 * (128 + 4) * 2
    assert quantised.bytes("bfloat16") < 0.52 * shape.bytes("bfloat16")
    for case in shape.varied(tokens=("uniform", "tail")):
        assert case.bytes("float32") == int(case.lengths.sum()) * 8 * 128 * 2 * 4


def test_lengths():
    equal, uniform, tail = (case.lengths for case in Case(256, 8192, 32, 8, 128).varied(tokens=caches.TOKENS))
    assert (equal == 8192).all()
    for lengths in (uniform, tail):
        assert lengths.min() >= 1 and lengths[-1] == lengths.max() == 8192 and lengths.dtype == np.int32
    assert abs(uniform.mean() / 4096 - 1) < 0.01 and abs(tail.mean() / 1638 - 1) < 0.03 and np.median(tail) < 1000
    assert Case(1, 128, 32, 8, 128, tokens="tail").lengths == [128]


@pytest.mark.parametrize("suite", SUITES)
def test_names_are_distinct_and_fit_their_column(suite):
    for name in ("targets", "sweep", "small"):
        names = [str(case) for case in caches.table(suite, name)]
        assert len(set(names)) == len(names) and max(map(len, names)) <= record.WIDTHS["shape"]


def test_the_tables_hold_every_goal():
    goals = ["B64 S8192 N32/8", "B8 S8192 N32/8", "B1 S131072 N32/8", "B128 S1024 N64/8"]
    for suite, pages in (("decode", [""]), ("paged", [" p16", " p64", " p128"])):
        names = {str(case) for case in caches.table(suite, "targets")}
        assert names >= {f"{goal} H128{page}" for goal in goals for page in pages}
        page = "" if suite == "decode" else " p64"
        quantised = {f"{goal} H128{page} {kind}" for goal in goals for kind in ("int8", "fp8")}
        assert names >= {name for name in quantised if suite == "decode" or "B64" in name}
        assert names >= {f"B64 S8192 N32/8 H128{page} uniform", f"B1 S8192 N32/8 H128{page}"}
        assert f"B1 S128 N32/8 H128{page}" in names, "the latency of one page"
        swept = {str(case) for case in caches.table(suite, "sweep")}
        grid = [f"B{B} S8192 N32/8" for B in (1, 4, 16, 64, 256)]
        kinds = [f"{tokens}{kind}" for tokens in ("", " uniform", " tail") for kind in ("", " int8", " fp8")]
        assert swept >= {f"{base} H128{page}{kind}" for base in grid for page in pages for kind in kinds}
        assert swept >= names


@pytest.mark.parametrize("suite", SUITES)
def test_targets_are_few_programs(suite):
    """jattn's and cuDNN's: a program is that of arrays, and to a peer lengths are no array."""
    targets = caches.table(suite, "targets")
    ours = {(case.B, case.S, case.K, case.page, case.stored) for case in targets}
    cudnn = {(case.B, case.S, case.K, case.tokens) for case in targets if not case.stored}
    assert len(ours) + len(cudnn) <= 25


def test_parts_of_a_name():
    (case,) = Case(64, 8192, 32, 8, 128, 16, "uniform").varied(stored=("int8",))
    assert caches.parts(str(case)) == ("B64 S8192 N32/8 H128", 16)
    assert caches.parts("B64 S8192 N32/8 H128 fp8") == ("B64 S8192 N32/8 H128", None)


@pytest.mark.parametrize("case", [TINY, Case(20, 32, 4, 2, 16, 16, "tail", "fp8")], ids=str)
def test_the_dense_computation_is_what_jattn_computes(case):
    found = decode.agreeing(case, "float32", ["jattn xla"], on_gpu=False)
    assert list(found) == ["jattn xla"]
    data = caches.data(case, "float32")
    assert data.key.shape == (case.B, case.S, case.K, case.H)
    if case.page:
        assert sorted(np.asarray(data.cache.block_tables).ravel()) == list(range(case.B * case.S // case.page))


def test_a_program_is_compiled_once(monkeypatch):
    """Lengths of jattn's are an input; a peer has them as constants."""
    built, real = [], gpu.compiled
    monkeypatch.setattr(gpu, "compiled", lambda functions, inputs: built.extend(functions) or real(functions, inputs))
    programs = {}
    for tokens in ("equal", "uniform", "tail", "equal"):
        (case,) = TINY.varied(tokens=(tokens,))
        with jax.numpy_dtype_promotion("standard"):  # jax.nn mixes integers of its own
            assert list(decode.agreeing(case, "float32", None, False, programs)) == ["jattn xla", "jax.nn"]
    assert built == ["jattn xla", "jax.nn", "jax.nn", "jax.nn"] and len(programs) == 4


@pytest.mark.parametrize("b", [0, 2])
def test_the_gate_leaves_out_a_peer_and_stops_jattn(b, monkeypatch, capsys):
    """One sequence is wrong in one head."""

    def wrong(case, data):
        function, inputs = decode.jax_nn(case, data)
        return lambda *x: function(*x).at[b, 0, 3].multiply(1.01), inputs

    monkeypatch.setattr(decode, "builders", lambda *x: {"a peer": lambda: wrong(*x[:2])})
    assert decode.agreeing(TINY, "float32", None, on_gpu=False) == {}
    assert "a peer differs from the dense computation by" in capsys.readouterr().out
    monkeypatch.setattr(decode, "builders", lambda *x: {"jattn fast": lambda: wrong(*x[:2])})
    with pytest.raises(SystemExit, match="B3 S64 N4/2 H16: jattn fast differs from the dense .*nothing was timed"):
        decode.agreeing(TINY, "float32", None, on_gpu=False)
    monkeypatch.setattr(decode, "builders", lambda *x: {"jattn nan": lambda: (lambda q: q * jnp.nan, x[1].inputs[:1])})
    with pytest.raises(SystemExit, match="by nan"):
        decode.agreeing(TINY, "float32", None, on_gpu=False)


@pytest.mark.parametrize("suite", SUITES)
def test_rows_on_a_cpu(suite, tiny, monkeypatch, tmp_path, capsys):
    """Aligned and recorded: jattn's implementation by name, beside jax.nn, with ratios of the same run."""
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    run.main([suite, "--repeats", "1"])
    rows = record.load(tmp_path / f"{suite}.csv")
    page = "" if suite == "decode" else " p16"
    assert [(row["shape"], row["implementation"]) for row in rows] == [
        (f"B3 S64 N4/2 H16{page}", "jattn xla"),
        (f"B3 S64 N4/2 H16{page}", "jax.nn"),
        (f"B3 S64 N4/2 H16{page} tail int8", "jattn xla"),
    ]
    plain, peer, both = rows
    assert (plain["tokens"], plain["cache"], both["tokens"], both["cache"]) == ("equal", "float32", "tail", "int8")
    assert peer["times_jax_nn"] == "1.0" and float(plain["times_jax_nn"]) > 0 and both["times_jax_nn"] == ""
    assert float(both["times_unquantised"]) > 0 and float(both["percent_of_equal"]) > 0
    assert {plain[name] for name in ("times_unquantised", "percent_of_equal", "percent_of_peak", "launches")} == {""}
    size = 3 * 64 * 2 * 16 * 2 * 4
    assert float(plain["gbytes_per_s"]) == pytest.approx(size / float(plain["us"]) / 1e3, abs=0.006)
    assert float(plain["percent_of_read"]) == pytest.approx(100 * float(plain["gbytes_per_s"]), abs=1)
    printed = capsys.readouterr().out.splitlines()
    assert "  jax.nn has no int8 cache" in printed
    assert len({len(line) for line in printed if "B3 S64" in line}) == 1


def test_rows_of_a_gpu(monkeypatch):
    monkeypatch.setattr(decode.jax, "devices", lambda: [types.SimpleNamespace(device_kind="NVIDIA H200")])
    case = Case(64, 8192, 32, 8, 128, 64, "uniform", "int8")
    ms = {"jattn mosaic": 0.25, "cudnn": 0.5, "jattn mosaic, plain": 0.4, "jattn mosaic, equal": 0.5}
    times = {name: gpu.Time(t, t, 2 * t) for name, t in ms.items()}
    first, other = decode.rows(case, "bfloat16", times, {"jattn mosaic": 2, "cudnn": 1}, ceiling=4.5e12)
    rate = case.bytes("bfloat16") / 0.25e-3
    assert (first["us"], first["wall_us"], first["launches"]) == (250.0, 500.0, 2)
    assert (first["times_cudnn"], first["times_unquantised"], first["times_fa3"]) == (0.5, 0.625, "")
    assert first["percent_of_peak"] == pytest.approx(100 * rate / 4.8e12, abs=0.06)
    assert first["percent_of_read"] == pytest.approx(100 * rate / 4.5e12, abs=0.06)
    wide = 64 * 8192 * 8 * (128 + 4) * 2 / 0.5e-3
    assert first["percent_of_equal"] == pytest.approx(100 * rate / wide, abs=0.06)
    assert other["implementation"] == "cudnn" and other["percent_of_equal"] == ""


@pytest.mark.parametrize("suite", SUITES)
def test_a_kernel_is_there_by_its_name_and_says_why_it_does_not_run(suite, tiny, monkeypatch, capsys):
    real, page = _dispatch.module, 64 if suite == "decode" else 16
    kernel = types.SimpleNamespace(PLATFORM="cuda", why_not=lambda p: f"no page of {p.page}", why_not_here=lambda: None)
    for op in ("decode_attention", "paged_attention"):
        monkeypatch.setitem(_dispatch._TABLE, op, {"kernel": "somewhere", "xla": "jattn.reference.paged"})
    monkeypatch.setattr(_dispatch, "module", lambda op, name: kernel if name == "kernel" else real(op, name))
    run.main([suite, "--no-record", "--repeats", "1", "--only", "tail", "--providers", "jattn kernel"])
    assert f"  jattn kernel no page of {page}\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("peer", "change", "reason"),
    [
        ("fa3", dict(tokens="uniform"), "takes equal lengths"),
        *((name, dict(stored="fp8"), "has no fp8 cache") for name in decode.PEERS if name != "tokamax"),
    ],
)
def test_a_peer_refuses_what_it_cannot_do(peer, change, reason):
    (case,) = TINY.varied(**{name: (value,) for name, value in change.items()})
    with pytest.raises(providers.Refused, match=reason):
        decode.PEERS[peer](case, caches.data(case, "float32"))


def test_lengths_reach_the_peers_and_the_budget_ends_a_run(tiny, capsys):
    data = caches.data(TINY, "float32")
    assert decode.cudnn(TINY, data)[0].keywords == {"implementation": "cudnn"}
    (tail,) = TINY.varied(tokens=("tail",))
    assert set(decode.cudnn(tail, data)[0].keywords) == {"implementation", "key_value_seq_lengths"}
    run.main(["decode", "--no-record", "--budget", "-1"])
    assert "not measured: B3 S64 N4/2 H16; B3 S64 N4/2 H16 tail int8" in capsys.readouterr().out


def test_an_unknown_name_is_refused(tiny):
    with pytest.raises(SystemExit, match="--providers: nobody is called 'jattn mosaics'; there are jattn mosaic, "):
        run.main(["decode", "--no-record", "--providers", "jattn mosaics,cudnn"])


def test_options():
    found = run.parser().parse_args(["paged", "--table", "sweep", "--providers", "jattn mosaic,cudnn,triton"])
    assert (found.table, found.providers, found.repeats) == ("sweep", ["jattn mosaic", "cudnn", "triton"], 9)
    assert run.parser().parse_args(["decode"]).providers is None
    assert jax.default_backend() == "cpu" and decode.read_rate(False) > 0
