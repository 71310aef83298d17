"""Measuring this machine: what is counted, how scatter is split, and what a job makes of it."""

import json
import pathlib
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from prism_jax.cli import main
from prism_jax.cluster import compute_latency
from prism_jax.data import load_job
from prism_jax.measure import (
    Call,
    LayerSizes,
    Timed,
    calls_for,
    kinds_of,
    layer_calls,
    rates_of,
    save_machine,
    sizes_of_job,
    split_scatter,
    time_calls,
)
from prism_jax.trace import read_kernels

from .helpers import kernels_of, lower_job


_JOB = str(pathlib.Path(__file__).parents[1] / "examples/one_device.toml")
_TINY = ("model.hidden_size=32", "model.ffn_size=64", "model.vocab_size=128", "model.num_heads=2")
_TINY += ("training.microbatch_size=1", "training.sequence_length=16", "model.num_layers=2")


@pytest.fixture(scope="module")
def tiny():
    """A tiny job, and the calls of its layers."""
    job = load_job(_JOB, _TINY)
    return job, layer_calls(sizes_of_job(job))


def _synthetic(rng, *, step, correlation, residual, rank, devices=3, rounds=4000):
    """Latencies of calls with known deviations, for kinds in turn."""
    kinds = [*residual] * 4
    moments = np.empty((devices, rounds))
    moments[:, 0] = rng.normal(size=devices)
    for r in range(1, rounds):
        new = rng.normal(size=devices)
        moments[:, r] = correlation * moments[:, r - 1] + np.sqrt(1 - correlation**2) * new
    own = np.array([residual[kind] for kind in kinds])[:, None]
    logs = step * moments[:, None] + own * rng.normal(size=(devices, len(kinds), rounds))
    means = np.linspace(1e-3, 2e-3, len(kinds))[:, None]
    return np.exp(logs + rank[:, None, None]) * means, kinds


def test_scatter_is_split_into_what_it_was_made_of():
    residual = {"gemm": 0.02, "attention": 0.05, "norm": 0.0}
    rank = 0.1 * np.array([-1.0, 0.0, 1.0])
    made = _synthetic(
        np.random.default_rng(0), step=0.03, correlation=0.6, residual=residual, rank=rank
    )
    found = split_scatter(*made)
    assert found.step == pytest.approx(0.03, rel=0.05)
    assert found.autocorrelation == pytest.approx(0.6, abs=0.05)
    assert found.autocorrelation_time == pytest.approx(4.0, rel=0.2)
    assert found.rank == pytest.approx(0.1, rel=0.02)
    for kind, sigma in residual.items():
        assert found.residual[kind] == pytest.approx(sigma, rel=0.05, abs=0.005), kind


def test_what_is_not_there_is_not_found():
    rng = np.random.default_rng(1)
    made = _synthetic(
        rng, step=0.0, correlation=0.0, residual={"gemm": 0.02}, rank=np.zeros(2), devices=2
    )
    found = split_scatter(*made)
    assert found.step < 0.003
    assert found.rank is not None
    assert found.rank < 0.001
    alone = split_scatter(made[0][:1], made[1])
    assert alone.rank is None


def test_the_measured_sizes_are_those_that_a_job_counts(tiny):
    """So that no kernel of the job lies between or beyond the rows of its table."""
    job, calls = tiny
    load = lower_job(job)
    kinds = ("gemm", "attention", "norm", "elementwise", "embedding", "loss", "optimizer")
    sizes = {(call.kernel.removesuffix("_backward"), call.size) for call in calls}
    blocks = (*load.forward, *load.backward, load.tail)
    kernels = {kernel for block in blocks for kernel in kernels_of(block)}
    seen = {
        (one.kind, one.flop or float(one.size.removesuffix("B")))
        for one in kernels
        if one.kind in kinds
    }
    assert {kind for kind, _ in seen} == {*kinds}
    assert seen <= sizes


@pytest.mark.parametrize("activation", ["squared_relu", "swiglu"])
def test_every_call_runs_and_is_finite(activation):
    sizes = LayerSizes(1, 8, 16, 32, 4, 2, 4, 64, 500, activation, rotary=True)
    for call in layer_calls(sizes):
        for made in jax.tree.leaves(call.run()):
            assert np.isfinite(np.asarray(made, np.float32)).all(), call.kernel


def test_a_call_is_timed_and_dispatch_is_subtracted():
    ready = jnp.zeros(())

    def pause(kernel, dtype, seconds):
        def run():
            time.sleep(seconds)
            return ready

        return Call(kernel, dtype, 1.0, run)

    short = Call("norm", "", 1.0, lambda: ready)
    timed = time_calls([[pause("gemm", "bf16", 0.02), short, pause("norm", "", 0.01)]], 0.0)
    assert len(timed.calls) == 2
    assert timed.left_out == 1
    assert timed.seconds.shape == (1, 2, 10)
    product, norm = np.median(timed.seconds[0], axis=1)
    assert 0.019 < product < 0.04
    assert 0.009 < norm < 0.03
    with pytest.raises(ValueError, match="with larger layers"):
        time_calls([[short, pause("norm", "", 0.01)]], 0.0)


def test_a_job_on_the_measured_machine_has_the_measured_means(tiny, tmp_path):
    """A kernel that only moves bytes takes what it took, and a product as long as the mean of those
    of its size; the rest are the law's parameters.
    """
    _, calls = tiny
    rng = np.random.default_rng(2)
    seconds = np.exp(0.05 * rng.normal(size=(2, len(calls), 40))) * rng.uniform(
        1e-3, 2e-3, (1, len(calls), 1)
    )
    timed = Timed(tuple(calls), seconds, 1e-5)
    scatter = split_scatter(seconds, kinds_of(timed))
    save_machine(tmp_path, timed, scatter, "prism-jax measure")
    words = (f"cluster={tmp_path / 'cluster.toml'}", "num_nodes=1", "allow_implausible=true")
    own = load_job(_JOB, (*_TINY, *words))
    assert own.cluster is not None
    assert own.kernels is not None
    device = own.cluster.device
    for rate in rates_of(timed):
        flop, moved = (rate.size, 0.0) if rate.dtype else (0.0, rate.size)
        latency = compute_latency(
            rate.kernel, rate.dtype or "bf16", flop, moved, device, own.kernels
        )
        assert latency == pytest.approx(rate.seconds, rel=1e-3), rate
    for component, kernel, sigma in [
        ("step", "", scatter.step),
        ("rank", "", scatter.rank),
        *(("residual", kind, each) for kind, each in scatter.residual.items()),
    ]:
        law = own.kernels.find_variation(component, kernel)
        assert law is not None
        assert law.parameters["sigma"] == pytest.approx(sigma, rel=1e-3)
    assert own.cluster.num_devices == 2
    assert not own.notes
    shaped = {one.kernel: len(one.seconds) for one in read_kernels(tmp_path / "calls.csv")}
    assert shaped == {"gemm": 15, "attention_causal": 1}


def test_measure_writes_a_machine_that_a_job_runs_on(tmp_path, capsys, monkeypatch):
    """From the command to a predicted step, on two devices of this machine."""
    monkeypatch.setattr("prism_jax.measure._calls._STREAMED", 2**20)
    monkeypatch.setattr("prism_jax.measure._time.FEWEST_ROUNDS", 4)
    small = tmp_path / "job.toml"
    text = pathlib.Path(_JOB).read_text()
    small.write_text(
        text.replace("vocab_size = 4096", "vocab_size = 512").replace("size = 4\n", "size = 1\n")
    )
    out = tmp_path / "machine"
    words = ["measure", "--job", str(small), "--seconds", "0", "--out", str(out)]
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["devices"] == len(jax.local_devices())
    assert found["rounds"] == 4
    assert {row["kernel"] for row in found["kernels"]} >= {"gemm", "attention", "copies"}
    assert main(words) == 2
    assert "`--force` to overwrite it" in capsys.readouterr().err
    on = [f"cluster={out / 'cluster.toml'}", "num_nodes=1", "allow_implausible=true"]
    assert main(["predict", str(small), "--json", *(w for o in on for w in ("--set", o))]) == 0
    assert 0 < json.loads(capsys.readouterr().out)["step_time_s"]["mean"] < 60


def test_what_cannot_be_measured_or_read_is_refused_in_a_sentence(tmp_path):
    cluster = tmp_path / "cluster.toml"
    shipped = pathlib.Path(__file__).parents[1] / "hardware/clusters/dgx-h100.toml"
    cluster.write_text(f'kernels = "./none"\n{shipped.read_text()}')
    with pytest.raises(ValueError, match="not a folder of kernels with"):
        load_job(_JOB, [f"cluster={cluster}"])
    with pytest.raises(ValueError, match="give a job of a dense transformer"):
        calls_for(load_job(_JOB, ["model=nemotron-3-nano"]), jax.devices(), 1.0)
