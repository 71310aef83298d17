"""What a performance engineer reads first: throughput, breakdowns, CSV, and why an interval is not
known."""

import csv
import io
import math
from typing import Any

import jax
import pytest

import prism_jax as prism
from prism_jax.cli import main
from prism_jax.cli._load import other_sizes
from prism_jax.law import QUANTILES, law_table
from prism_jax.prediction import throughput

from .helpers import lognormal


@pytest.mark.parametrize("name", ["megatron-175b-a100-64", "gpt3-175b-h100-4096"])
@pytest.mark.parametrize("slower", [1.0, 1.25])
def test_throughput_is_the_work_of_a_step_over_its_time(name, slower):
    job = prism.load_job(name)
    constant = prism.predict(job)
    mean = slower * constant.mean
    found = throughput(job, mean)
    layout, training = job.layout, job.training
    sequences = layout.dp * job.schedule.num_microbatches * training.microbatch_size
    tokens = sequences * training.sequence_length
    assert found.tokens_per_s_per_gpu == pytest.approx(tokens / mean / layout.world_size)
    peak = job.cluster.device.peak_flop_per_s[training.dtype]
    assert found.mfu == pytest.approx(found.flop_per_s_per_gpu / peak)
    parts = found.breakdown
    assert sum(parts.values()) == pytest.approx(mean)
    assert parts.get("variability", 0.0) == pytest.approx(mean - constant.mean, abs=1e-9)
    for name in ("bubble", "exposed pp"):  # One split, whichever command prints it.
        assert parts[name] == pytest.approx(constant.breakdown[name])
    assert all(x >= -1e-12 for x in parts.values())


@pytest.mark.parametrize(
    "name", ["dit-xl-2-a100-8", "dlrm-dcnv2-gb300-64", "wan2.1-t2v-14b-h100-256"]
)
def test_a_model_without_words_has_samples_and_no_tokens(name, answered, capsys):
    """Its patches, pixels and rows are no tokens, whoever prints what a GPU does in a second."""
    text = answered(["predict", name])
    job = prism.load_job(name)
    found, constant = throughput(job), prism.predict(job)
    assert math.isnan(constant.tokens_per_s)
    assert math.isnan(found.tokens_per_s_per_gpu)
    assert constant.samples_per_s * constant.mean == pytest.approx(job.batch_size)
    assert f"per GPU: {found.rate()}, " in text
    rate, unit = found.rate().split()
    each = job.batch_size / constant.mean / job.layout.world_size
    assert unit == "samples/s"
    assert float(rate.replace(",", "")) == pytest.approx(each, rel=0.005)
    for printed in (
        text,
        repr(job),
        main(["run", name, "--tokens", "1e9"]) and capsys.readouterr(),
    ):
        assert "tokens/" not in str(printed)
        assert "tokens a" not in str(printed)


def test_models_without_words_are_ranked_by_samples(refused):
    jobs = [prism.load_job(name) for name in ("dit-xl-2-a100-8", "latte-xl-2-a100-8")]
    found = prism.rank_layouts(jobs, num_samples=None)
    assert "without words; leave it out" in refused(
        ["compare", *(job.name for job in jobs), "--tokens", "1e9"]
    )
    assert found.rate == "samples"
    assert "32 to 256 samples" in found.notes[-1]
    frame = found.table()
    assert "tokens/s" not in frame.columns
    best = found.best
    assert frame["samples/s"][0] == best.samples_per_s
    assert best.samples_per_s * best.mean.value == pytest.approx(best.job.batch_size)


def _read(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


def test_simulate_tells_throughput_further_quantiles_and_why_they_are_unknown(tmp_path, answered):
    path = tmp_path / "law.npz"
    words = ["simulate", "megatron-22b-a100-8", "--samples", "1000", "--quantiles", "0.9,0.999"]
    found = answered([*words, "--out", str(path), "--json"])
    law = prism.load_law(path)
    assert found["step_time_s"]["mean"] == law.mean
    assert found["step_time_s"]["p99.9"] == law.quantile(0.999)
    assert found["step_time_s"]["p99.9_interval"] is None
    assert found["unknown_because"]["p99.9"] == law.why_unknown(0.999)
    assert "are needed" in found["unknown_because"]["p99.9"]
    assert law.why_unknown(0.9) is None is law.why_unknown()
    assert sum(found["throughput"]["breakdown"].values()) == pytest.approx(law.mean)
    table = law_table(law, {**QUANTILES, "p90": 0.9, "p99.9": 0.999}, {"mean": 1.1})
    rows = {row["figure"]: row for row in _read(table.csv())}
    assert float(rows["p90"]["predicted_s"]) == law.quantile(0.9)
    assert rows["p99.9"]["interval_s.low"] == ""
    assert float(rows["mean"]["measured_s"]) == 1.1
    text = answered(words)
    assert "* p99.9: only 1 independent" in text
    assert "tokens/s" in text
    assert "MFU" in text
    assert "1 microbatch of 4" in text


def test_a_law_says_why_its_moments_have_no_interval():
    program = prism.compile_graph(
        [prism.Op(1.0, kind="gemm")],
        variability=prism.Variability(residual={"gemm": lognormal(0.1)}),
    )
    law = prism.simulate(program, num_samples=10, key=jax.random.key(0))
    assert math.isnan(law.mean_interval()[0])
    why: Any = law.why_unknown()
    assert "about 2 times as many steps" in why
    assert "* mean: only 10" in repr(law)


@pytest.mark.slow
def test_comparisons_carry_gpus_and_throughput(answered):
    job, small = "megatron-22b-a100-8", ["--samples", "400"]
    change = ["--set", "num_nodes=2", "--allow-oom", "--set", "layout.dp=2"]
    words = ["sweep", job, *small, "--over", "layout.dp=1,2", "--set", "num_nodes=2"]
    found = _read(answered([*words, "--csv"]))
    assert [row["world_size"] for row in found] == ["8", "16"]
    tokens = 4 * 2048
    for row in found:
        each = float(row["tokens_per_s_per_gpu"])
        assert each == pytest.approx(tokens / 8 / float(row["mean_s"]), rel=1e-9)
    words = ["whatif", job, *small, *change, "--kernel", "gemm:0.9", "--change", "layout.dp=1"]
    speed = answered([*words, "--json"])["throughput"]
    assert {name: one["world_size"] for name, one in speed.items()} == {
        "as it is": 16,
        "kernel gemm:0.9": 16,
        "layout.dp=1": 8,
    }
    assert speed["kernel gemm:0.9"]["mfu"] > speed["as it is"]["mfu"]


def test_comparisons_of_other_sizes_say_so():
    assert "(8, 16)" in other_sizes({"row 0": 8, "row 1": 16}, 8)[0]
    assert other_sizes({"a": 4, "b": 4}, 4) == []


@pytest.mark.parametrize(
    "words", [["memory", "megatron-175b-a100-64"], ["predict", "megatron-175b-a100-64"], ["jobs"]]
)
def test_tables_are_csv_too(words, answered, refused):
    rows = _read(answered([*words, "--csv"]))
    assert len(rows) >= 5
    assert len({len(row) for row in rows}) == 1
    assert "not allowed with" in refused([*words, "--csv", "--json"])
