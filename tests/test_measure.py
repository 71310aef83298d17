"""Measuring this machine: what is counted, how scatter is split, and what a job makes of it."""

import errno
import os
import pathlib
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest

from prism_jax import measure
from prism_jax.cluster import compute_latency
from prism_jax.data import load_cluster, load_job, load_operators, save_job
from prism_jax.measure._calls import _product
from prism_jax.trace import read_kernels

from .helpers import refusal


_JOB = str(pathlib.Path(__file__).parents[1] / "examples/one_device.toml")
_TINY = ("model.hidden_size=32", "model.ffn_size=64", "model.vocab_size=128", "model.num_heads=2")
_TINY += ("training.microbatch_size=1", "training.sequence_length=16")


@pytest.fixture(scope="module", autouse=True)
def _drawn_by_numpy():
    """The arguments of kernels, for which XLA would compile as much as for the kernels."""
    rng = np.random.default_rng(0)
    with pytest.MonkeyPatch.context() as patch:
        drawn = lambda key, shape, dtype: jnp.asarray(rng.normal(size=shape), dtype)  # noqa: E731
        patch.setattr(jax.random, "normal", drawn)
        yield


@pytest.fixture(scope="module")
def tiny():
    """A tiny job, and its calls."""
    job = load_job(_JOB, _TINY)
    return job, measure.calls_of(job)


def _latencies(rng, step, correlation, kinds, rank, rounds=4000):
    """Latencies with known deviations: of all calls of a round, of each kind, and of devices."""
    moments = rng.normal(size=(len(rank), rounds))
    for r in range(1, rounds):
        moments[:, r] *= np.sqrt(1 - correlation**2)
        moments[:, r] += correlation * moments[:, r - 1]
    own = rng.normal(size=(len(rank), 4 * len(kinds), rounds))
    own *= np.array([*kinds.values()] * 4)[:, None]
    return np.exp(step * moments[:, None] + own + np.array(rank)[:, None, None])


def test_scatter_splits_into_its_planted_components():
    kinds = {"gemm": 0.02, "attention": 0.05, "norm": 0.0}
    made = _latencies(np.random.default_rng(0), 0.03, 0.6, kinds, [-0.1, 0.0, 0.1])
    found = measure.split_scatter(made, [*kinds] * 4)
    assert found.step == pytest.approx(0.03, rel=0.05)
    assert found.autocorrelation == pytest.approx(0.6, abs=0.05)
    assert found.rank == pytest.approx(0.1, rel=0.02)
    for kind, sigma in kinds.items():
        assert found.residual[kind] == pytest.approx(sigma, rel=0.05, abs=0.005), kind


def test_absent_components_of_scatter_are_near_zero():
    made = _latencies(np.random.default_rng(1), 0.0, 0.0, {"gemm": 0.02}, [0.0, 0.0])
    found = measure.split_scatter(made, ["gemm"] * 4)
    assert found.step < 0.003
    assert found.rank < 0.001
    assert measure.split_scatter(made[:1], ["gemm"] * 4).rank is None


def _check_calls(job, calls):
    """Every kernel of a job that computes is called, with the work that is counted."""
    sizes = {(call.kernel.removesuffix("_backward"), call.size) for call in calls}
    kernels = [kernel for kernel in measure.compute_kernels(job) if kernel.kind != "host"]
    assert sizes == {(one.kind, one.flop or float(one.size.removesuffix("B"))) for one in kernels}
    for call in calls:
        if call.kernel == "gemm" and call.shape:
            assert call.size == 2 * np.prod([*call.shape.values()])
        for made in jax.tree.leaves(call.run()):
            assert np.isfinite(np.asarray(made, np.float32)).all(), call.kernel


def test_each_kernel_of_a_job_is_called_with_its_work(tiny):
    _check_calls(*tiny)


def test_products_of_recommenders_have_two_factors():
    job = load_job("dlrm-dcnv2-gb300-64", ["training.microbatch_size=8"])
    products = [kernel for kernel in measure.compute_kernels(job) if kernel.kind == "gemm"]
    for added in (False, True):
        kernel = next(one for one in products if ("added" in one.size) == added)
        call = _product(kernel, jnp.zeros)
        m, k = call.shape["m"], call.shape["k"]
        assert len(call.run.args) == 2 + added
        assert call.run.args[-2].shape == ((k, m) if added else (m, k))


def test_experts_and_windows_are_called_too():
    words = ("num_kv_heads=1", "head_size=16", "modules.local.window=4", "modules.moe.top_k=2")
    words += ("modules.moe.num_experts=4", "modules.moe.expert_ffn_size=16")
    job = load_job(_JOB, ("model=gpt-oss-120b", *(f"model.{word}" for word in words), *_TINY))
    calls = measure.calls_of(job)
    _check_calls(job, calls)
    assert {call.shape["window"] for call in calls if call.kernel == "attention"} == {0, 4}


def test_compilation_counts_as_time_and_what_was_measured_in_it_is_kept(monkeypatch):
    """With a clock that only calls move: by ten seconds where they are compiled, then by one."""
    now, ready = [0.0], jnp.zeros(())
    monkeypatch.setattr("prism_jax.measure._time.time.perf_counter", lambda: now[0])

    def slow(kernel, dtype):
        compiled = []

        def run():
            now[0] += 1.0 if compiled else 10.0
            compiled.append(True)
            return ready

        return measure.KernelCall(kernel, dtype, 1.0, run)

    calls = [slow("norm", ""), *(slow("gemm", "bf16") for _ in range(40))]
    timed = measure.time_calls([calls], 100.0)
    # In half of the time six are compiled; then rounds of these until the end.
    assert (len(timed.calls), timed.left_out) == (6, 35)
    assert 100 <= now[0] <= 100 + 7
    # However little time there is, a product and another call run three times.
    now[0] = 0.0
    timed = measure.time_calls(
        [[slow("norm", ""), *(slow("gemm", "bf16") for _ in range(40))]], 0.0
    )
    assert timed.seconds.shape == (1, 2, 3)


def test_a_call_is_timed_and_dispatch_is_subtracted(monkeypatch):
    ready = jnp.zeros(())

    def pause(kernel, dtype, seconds):
        def run():
            time.sleep(seconds)
            return ready

        return measure.KernelCall(kernel, dtype, 1.0, run)

    short = measure.KernelCall("norm", "", 1.0, lambda: ready)
    monkeypatch.setattr("prism_jax.measure._time._MOST_ROUNDS", 10)
    timed = measure.time_calls(
        [[pause("gemm", "bf16", 0.02), short, pause("norm", "", 0.01)]], 600.0
    )
    assert (len(timed.calls), timed.left_out) == (2, 1)
    product, norm = timed.seconds.min(axis=(0, 2))
    assert 0.019 < product < 0.04
    assert 0.009 < norm < 0.03
    with pytest.raises(ValueError, match="with larger layers"):
        measure.time_calls([[short, pause("norm", "", 0.01)]], 600.0)


def test_kernels_on_the_measured_machine_have_their_measured_means(tiny, tmp_path, monkeypatch):
    """A kernel takes the mean of the calls of its size, and has the laws that were found. What a
    full disk cut is no machine.
    """
    _, calls = tiny
    rng = np.random.default_rng(2)
    seconds = rng.uniform(1e-3, 2e-3, (len(calls), 1)) * np.exp(
        0.05 * rng.normal(size=(2, len(calls), 40))
    )
    timed = measure.Timed(tuple(calls), seconds, 1e-5)
    scatter = measure.split_scatter(seconds, timed.kinds)
    measure.save_machine(tmp_path, timed, scatter, "prism-jax measure")
    words = (f"cluster={tmp_path / 'cluster.toml'}", "num_nodes=1", "allow_implausible=true")
    own: Any = load_job(_JOB, (*_TINY, *words))
    assert own.cluster.num_devices == 2
    assert not own.notes
    save_job(own, tmp_path / "own.toml")
    assert load_job(tmp_path / "own.toml").kernels == own.kernels
    for rate in measure.rates_of(timed):
        work = (rate.size, 0.0) if rate.dtype else (0.0, rate.size)
        on = own.cluster.device, own.kernels
        latency = compute_latency(rate.kernel, "bf16", *work, *on)
        assert latency == pytest.approx(rate.seconds, rel=1e-3), rate
    laws = {("residual", kind): sigma for kind, sigma in scatter.residual.items()}
    for (component, kind), sigma in {
        **laws,
        ("step", ""): scatter.step,
        ("rank", ""): scatter.rank,
    }.items():
        law = own.kernels.find_variation(component, kind)
        assert law.parameters["sigma"] == pytest.approx(sigma, rel=1e-3)
    shaped = {one.kernel: len(one.seconds) for one in read_kernels(tmp_path / "calls.csv")}
    gemms = sum(call.kernel == "gemm" for call in calls)
    assert shaped == {"gemm": gemms, "attention_causal": 1}

    def fill(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("prism_jax.measure._machine.write_variations", fill)
    with pytest.raises(OSError, match="No space"):
        measure.save_machine(tmp_path, timed, scatter, "prism-jax measure")
    refusal(lambda: load_job(_JOB, (*_TINY, *words)), "no such file")


def test_measure_writes_a_machine_that_a_job_runs_on(tmp_path, answered, refused, monkeypatch):
    """From the command to a predicted step."""
    monkeypatch.setattr(jax, "local_devices", lambda: jax.devices()[:1])
    monkeypatch.setattr("prism_jax.measure._calls.MOST_BYTES", 2**22)
    monkeypatch.setattr("prism_jax.measure._time._MOST_ROUNDS", 4)
    monkeypatch.setenv("XLA_FLAGS", os.environ.get("XLA_FLAGS", ""))  # The command changes it.
    small, out = tmp_path / "job.toml", tmp_path / "machine"
    text = pathlib.Path(_JOB).read_text()
    small.write_text(text.replace("size = 4096", "size = 512").replace("size = 4\n", "size = 1\n"))
    words = ["measure", "--job", str(small), "--seconds", "600", "--out", str(out)]
    found = answered([*words, "--json"])
    assert (found["devices"], found["rounds"]) == (1, 4)
    assert {row["kernel"] for row in found["kernels"]} >= {"gemm", "attention", "copies"}
    assert "`--force` to overwrite it" in refused(words)
    on = ["--set", f"cluster={out / 'cluster.toml'}", "--set", "num_nodes=1"]
    assert (
        0
        < answered(["predict", str(small), "--json", "--allow-implausible", *on])["step_time_s"][
            "mean"
        ]
        < 60
    )


def test_a_folder_without_kernels_is_refused_in_a_sentence(tmp_path):
    cluster = tmp_path / "cluster.toml"
    shipped = pathlib.Path(__file__).parents[1] / "hardware/clusters/dgx-h100.toml"
    cluster.write_text(f'kernels = "./none"\n{shipped.read_text()}')
    refusal(lambda: load_job(_JOB, [f"cluster={cluster}"]), "not a folder of kernels with")


def _nccl(kernel, gpus, ratio, operation, bandwidth, latency):
    """What nccl-tests print for a ring over a link."""
    lines = ["#       size         count      type   redop    root     time   algbw   busbw #wrong"]
    passes = 2 if ratio > 1 else 1
    for size in 4.0 ** np.arange(6, 17):
        seconds = ratio * size / bandwidth + passes * (gpus - 1) * latency
        bus = ratio * size / seconds / 1e9
        lines.append(
            f"{size:12.0f} {size / 4:12.0f} float {operation} -1 {1e6 * seconds:9.2f} "
            f"{bus / ratio:8.3f} {bus:8.3f} 0 1.0 1.0 1.0 0"
        )
    return "\n".join([*lines, "# Avg bus bandwidth    : 197.3"])


@pytest.mark.parametrize(
    ("kernel", "operation", "name"),
    [
        ("all_reduce", "sum", "nccl.txt"),
        ("reduce_scatter", "sum", "nccl.txt"),
        ("all_gather", "none", "all_gather_perf.log"),
        ("all_to_all", "none", "alltoall_perf.log"),
    ],
)
def test_nccl_tests_give_the_link_that_they_ran_over(kernel, operation, name):
    ratio = 15 / 16 * (2 if kernel == "all_reduce" else 1)
    test = measure.nccl_test_of(_nccl(kernel, 16, ratio, operation, 45e9, 5e-6), name)
    assert (test.kernel, test.gpus) == (kernel, 16)
    assert test.bandwidth_bytes_per_s == pytest.approx(45e9, rel=0.01)
    assert test.latency_s == pytest.approx(5e-6, rel=0.02)
    np.testing.assert_allclose(test.efficiency, 1, rtol=0.02)


@pytest.mark.parametrize("row", ["1.2.3 39 74", "210.0 39.95 0.00"])
def test_rows_of_nccl_tests_without_positive_numbers_are_not_read(row):
    good = "16 4 float sum -1 210.0 39.95 74.90 0\n"
    refusal(lambda: measure.nccl_test_of(f"32 8 float sum -1 {row} 0\n"), "rows")
    assert len(measure.nccl_test_of(f"{good}32 8 float sum -1 {row} 0\n").bytes) == 1


def _topology(kinds):
    """What `nvidia-smi topo -m` prints of GPUs that are joined so, and of a network adapter."""
    number = len(kinds)
    head = (
        "\t" + "\t".join(f"GPU{i}" for i in range(number)) + "\tNIC0\tCPU Affinity\tNUMA Affinity"
    )
    rows = [f"GPU{i}\t" + "\t".join(row) + "\tPXB\t0-47,96-143\t0" for i, row in enumerate(kinds)]
    nic = "NIC0\t" + "PXB\t" * number + " X"
    return "\n".join([f"\x1b[4m{head}\x1b[0m", *rows, nic, "", "Legend:", "  X    = Self"])


def _all(number, kind):
    return [[" X " if i == j else kind for j in range(number)] for i in range(number)]


_CUBE = [
    "X1122NNN",
    "1X21N2NN",
    "12X2NN1N",
    "212XNNN1",
    "2NNNX112",
    "N2NN1X21",
    "NN1N12X2",
    "NNN1212X",
]
_CUBE_MESH = [[{"X": "X", "N": "SYS"}.get(cell, f"NV{cell}") for cell in row] for row in _CUBE]
_PAIRS = [
    [" X " if i == j else "NV12" if i // 2 == j // 2 else "SYS" for j in range(8)] for i in range(8)
]


@pytest.mark.parametrize(
    ("device", "kinds", "links"),
    [
        ("h100-sxm", _all(8, "NV18"), [("nvlink", 8, 450e9)]),
        ("a800", _all(8, "NV8"), [("nvlink", 8, 200e9)]),
        ("b200", _all(8, "NV18"), [("nvlink", 8, 900e9)]),
        ("gh200-96g", _all(4, "NV6"), [("nvlink", 4, 450e9)]),  # Without switches.
        ("v100-32g", _CUBE_MESH, [("nvlink", 8, 150e9)]),  # DGX-1.
        ("a100-80g-pcie", _PAIRS, [("nvlink", 2, 300e9), ("pcie", 8, 32e9)]),
        ("h100-pcie", _all(4, "NODE"), [("pcie", 4, 64e9)]),
    ],
)
def test_a_topology_gives_the_links_of_a_node(device, kinds, links):
    found = measure.links_of_topology(_topology(kinds), device)
    assert [(link.name, link.group, link.bandwidth_bytes_per_s) for link in found] == links


def test_topologies_on_the_command_line(answered, refused, written):
    path = written("topo.txt", _topology(_all(8, "NV18")))
    device = ["--device", "h100-sxm"]
    (link,) = answered(["fit-kernels", "--topo", str(path), *device, "--json"])["links"]
    shipped = load_cluster("dgx-h100", 1).links[0]
    assert link == msgspec.to_builtins(shipped)
    assert 'name = "nvlink"\ngroup = 8\n' in answered(["fit-kernels", "--topo", str(path), *device])
    uneven = _all(3, "NV4")
    uneven[0][2] = uneven[2][0] = uneven[1][2] = uneven[2][1] = "PHB"
    for text, words in ((_topology(uneven), "several sizes"), ("nothing", "no matrix of 2 to")):
        path.write_text(text)
        assert words in refused(["fit-kernels", "--topo", str(path), *device])
    assert "Give --device" in refused(["fit-kernels", "--topo", str(path)])


def test_nccl_tests_on_the_command_line(answered, refused, written):
    path = written("all_reduce_perf.txt", _nccl("all_reduce", 8, 1.75, "sum", 300e9, 2e-6))
    found = answered(["fit-kernels", "--nccl", str(path), "--json"])
    assert (found["kernel"], found["gpus"], len(found["rows"])) == ("all_reduce", 8, 11)
    assert "[[links]]\nbandwidth_bytes_per_s = " in answered(["fit-kernels", "--nccl", str(path)])
    path.write_text("nothing")
    assert "no rows of nccl-tests" in refused(["fit-kernels", "--nccl", str(path)])
    assert "Give TABLE" in refused(["fit-kernels"])


def test_without_pytorch_its_kernels_are_refused_in_a_sentence(tmp_path, refused, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setenv("XLA_FLAGS", os.environ.get("XLA_FLAGS", ""))  # The command changes it.
    assert "`--with torch` needs PyTorch, which is not installed here" in refused(
        ["measure", "--with", "torch", "--out", str(tmp_path / "machine")]
    )
    assert not (tmp_path / "machine").exists()


def test_classes_of_kernels_have_the_variability_of_their_kind():
    kinds = {"attention_backward-64": "attention", "softmax-backward": "loss", "halves": ""}
    kinds |= {"optimizer-adam-16": "optimizer", "reduce": "norm", "gather": "embedding"}
    kinds |= {"attention_backward": "attention", "gemm": "gemm", "copies": "copies"}
    assert {name: measure.variability_kind(name) for name in kinds} == {
        name: kind or "elementwise" for name, kind in kinds.items()
    }


def test_pytorch_measures_each_class_that_lists_of_operators_name():
    pytest.importorskip("torch")
    calls = measure.Torch().calls(None)
    measured = {call.kernel for call in calls if not call.dtype}
    operators = load_operators("pytorch-2026")
    lists = [*operators.fp32.values(), *operators.bf16.values()]
    named = [one.get(name, ()) for one in lists for name in ("forward", "backward")]
    assert {entry.split()[0] for entries in named for entry in entries} <= measured
    for call in calls:
        assert call.run() == ()
