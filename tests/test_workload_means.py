"""Means of measured steps, from configuration alone."""

import csv
import functools as ft
import math
import re
from typing import Any

import msgspec
import numpy as np
import pytest
from scipy.special import ndtri

from prism_jax.data import Job, Kernels, list_names, load_device, load_job
from prism_jax.prediction import memory, predict
from prism_jax.schedule import evaluate, make_schedule
from prism_jax.workload import Block, Kernel, block_mean, has_experts, rows_of
from validation.means import VARIABILITY, mean_rows, mean_table
from validation.published import published
from validation.published_jobs import of_steps

from .helpers import kernels_of, lower_job


def _normal_maximum(n: float) -> float:
    """The mean of the largest of n standard normals (Blom)."""
    return float(ndtri((n - 0.375) / (n + 0.25))) if n > 1 else 0.0


def _seconds(parts: Block, members: int, kernels: Kernels) -> float:
    """The mean latency of a block whose segments wait for the slowest of some members."""

    def deviation(kernel: Kernel) -> float:
        law = kernels.find_variation("residual", kernel.kind)
        return kernel.mean * (law.parameters.get("sigma", 0.0) if law else 0.0)

    total = 0.0
    for segment, times in parts:
        mean = block_mean(((segment, 1),))
        alone = [one for row, by_member in rows_of(segment) for one in row if by_member]
        variance = sum(deviation(kernel) ** 2 * count for kernel, count in alone)
        if segment.collective is not None or segment.branches:
            mean += _normal_maximum(members) * math.sqrt(variance)
        total += times * mean
    return total


def estimate(job: Job) -> float:
    """The mean step time: the schedule with constant blocks, then the tail, and on what the GPUs
    compute the factor of the slowest of them."""
    workload = lower_job(job)
    assert job.kernels is not None
    kernels, schedule, ranks = job.kernels, job.schedule, job.layout.pp
    order = make_schedule(
        schedule.kind,
        num_ranks=ranks,
        num_microbatches=schedule.num_microbatches,
        virtual_stages=schedule.virtual_stages,
    )
    sends = np.zeros((ranks, ranks))
    for (sender, receiver), kernel in workload.send_recv.items():
        sends[sender, receiver] = kernel.mean

    def costs(blocks: tuple[Block, ...]) -> np.ndarray:
        seconds = [_seconds(block, workload.group_size, kernels) for block in blocks]
        return np.tile(np.array(seconds)[:, None], schedule.num_microbatches)

    makespan = float(
        evaluate(
            order,
            forward=costs(workload.forward),
            backward=costs(workload.backward),
            send_recv=sends,
            blocking=schedule.kind == "1f1b",
        ).makespan
    )
    rank = kernels.find_variation("rank")
    sigma = rank.parameters["sigma"] if rank else 0.0
    slowest = math.exp(sigma * _normal_maximum(job.layout.world_size))
    # Of the reductions what the backwards beside them do not hide, and what gathers parameters.
    exposed = predict(job).breakdown.get("exposed dp", 0.0)
    gathers = sum(k.mean * n for k, n in kernels_of(workload.tail).items() if k.link)
    return slowest * makespan + exposed + _seconds(workload.tail, 1, kernels) - gathers


# `docs/accuracy.md` says why these are further off.
_FURTHER = {"deepseek-v3-gb300-256", "llama-3-405b-h100-8192", "llama-3-405b-h100-16384"}
_FURTHER |= {"dlrm-dcnv2-gb300-64"}
_MEASURED = [name for name in list_names("job") if load_job(name).measured and name not in _FURTHER]


@pytest.mark.parametrize("name", _MEASURED)
def test_shipped_jobs_are_within_ten_percent(name):
    job: Any = load_job(name)
    measured = job.measured.mean_s or job.measured.p50_s
    # Exchanges of experts beside compute are more than the estimate has.
    found = VARIABILITY * predict(job).mean if has_experts(job.model) else estimate(job)
    assert found == pytest.approx(measured, rel=0.1)


_22B, _175B = "megatron-22b-a100-8", "megatron-175b-a100-64"
_GPT3 = "gpt3-175b-h100-768"
_FULL = "training.recompute=full training.sequence_parallel=false"
_530B = "model=megatron-530b layout.pp=35 schedule.num_microbatches=280"
_1T = "model=megatron-1t layout.pp=64 schedule.num_microbatches=512 schedule.kind=1f1b"
_1T += " schedule.virtual_stages=1"
_405B = "model=llama-3.1-405b layout.cp=2 training.sequence_length=8192 schedule.virtual_stages=8"
_405B += " schedule.embedding_counts_as_layer=true schedule.head_counts_as_layer=true"
_70B = "model=llama-3.1-70b training.sequence_length=8192 schedule.virtual_stages=5"


def _on(cluster: str, num_nodes: int, dp: int = 1, microbatches: int | None = None) -> str:
    count = "" if microbatches is None else f"schedule.num_microbatches={microbatches}"
    return f"cluster={cluster} num_nodes={num_nodes} layout.dp={dp} {count}"


# Korthikanti et al. 2022 (arXiv:2205.05198), table 5; MLPerf Training v3.0, v3.1 (GPT-3), v5.0 and
# v5.1 (Llama 3.1 405B), medians of logged steps; Megatron-LM's Llama examples.
@pytest.mark.parametrize(
    ("name", "overrides", "measured"),
    [
        (_22B, _FULL, 1.42),
        (_175B, _FULL, 18.13),
        (_175B, f"{_530B} {_on('dgx-a100', 64)}", 37.83),
        (_175B, f"{_530B} {_on('dgx-a100', 64)} {_FULL}", 49.05),
        (_175B, f"{_1T} {_on('dgx-a100', 64)}", 71.49),
        (_175B, f"{_1T} {_on('dgx-a100', 64)} {_FULL}", 94.42),
        ("gpt3-175b-h100-4096", _on("dgx-h100", 768, 192), 1.616),
        (_GPT3, "", 11.076),  # v3.1, as much faster as its software.
        (_GPT3, "layout.dp=16", 11.053),
        (_GPT3, "layout.dp=16", 12.079),  # v3.0
        (_GPT3, _on("dgx-h100", 256, 48, 64), 6.340),
        (_GPT3, f"{_405B} layout.tp=8 {_on('dgx-h100', 64, 4, 288)}", 55.13),
        (_GPT3, f"{_405B} layout.tp=8 {_on('dgx-h100', 256, 16, 72)}", 14.22),
        (_GPT3, f"{_405B} {_on('dgx-h200', 64, 8, 144)}", 50.01),
        (_GPT3, f"{_405B} {_on('hgx-b200', 32, 4, 144)}", 27.66),
        (_GPT3, f"{_405B} {_on('gb200-nvl72', 144, 8, 112)}", 19.31),
        (_GPT3, f"{_405B} {_on('gb200-nvl72', 288, 16, 48)}", 8.447),
        (_GPT3, f"{_70B} {_on('dgx-h100', 8, 2, 64)}", 10.11),
    ],
)
def test_other_published_steps_are_within_ten_percent(name, overrides, measured):
    assert estimate(load_job(name, overrides.split())) == pytest.approx(measured, rel=0.1)


def test_attention_on_b200_is_not_twice_as_efficient_as_measured():
    """SimuMax measured 0.71 of the peak forward and 0.69 backward, counting the whole square of
    scores, of which causal attention computes half."""
    changes = "model=llama-3.1-70b training.sequence_length=4096 training.dtype=bf16 layout.tp=1"
    changes += " layout.pp=1 schedule.kind=1f1b schedule.virtual_stages=1"
    job = load_job(_GPT3, f"{changes} {_on('hgx-b200', 1)}".split())
    workload = lower_job(job)
    peak = load_device("b200").peak_flop_per_s["bf16"]
    square = 64 * 4096**2 * 128
    for blocks, products, measured in ((workload.forward, 4, 0.71), (workload.backward, 10, 0.69)):
        (found,) = {k for k in kernels_of(blocks[0]) if k.kind == "attention"}
        efficiency = products * square / found.mean / peak
        assert 0.8 * measured < efficiency < 1.05 * measured


_BOUNDS = {  # In percent, of the mean absolute error.
    "SimuMax, B200, context parallel": 6.0,
    "SimuMax, B200, experts": 5.5,
    "SimuMax, B200": 4.5,
    "Megatron-Bridge, H100, dense": 5.0,
    "Megatron-Bridge, B200, dense": 5.0,
    "Megatron-Bridge, GB200, dense": 5.0,
    "MLPerf families": 4.0,
    "Megatron-LM 2021": 6.0,
    "Korthikanti": 4.0,
}


def _has_tables(job):
    """The kernels of four bits have no table of their own: those of eight bits stand in."""
    return job.training.dtype != "fp4"


_published = ft.cache(lambda folder: tuple(published(folder)))


@pytest.mark.parametrize("table", _BOUNDS)
def test_published_means_by_table(shared, table):
    """The errors that showed the attention of a B200 to be counted wrongly, and a backward of 2021
    to be hidden that was not."""
    errors = [
        100 * (estimate(one.job) / one.seconds - 1)
        for one in _published(shared / "data")
        if one.table.startswith(table) and one.job is not None and _has_tables(one.job)
    ]
    assert len(errors) >= 2
    assert np.mean(np.abs(errors)) < _BOUNDS[table]


def test_peaks_of_memory_say_how_many_layers_are_dense(shared):
    """Of four layers of DeepSeek-V2 and V3, which the rows do not say."""

    def of(job, dense):
        first, second = job.model.layers
        layers = tuple(
            msgspec.structs.replace(layer, repeat=repeat)
            for layer, repeat in ((first, dense), (second, 4 - dense))
        )
        changed = msgspec.structs.replace(job.model, layers=layers[dense == 0 :])
        found = memory(msgspec.structs.replace(job, model=changed))
        return found.fullest.bytes / 2**30

    with (shared / "data" / "published" / "measured_steps.csv").open() as file:
        rows = list(csv.DictReader(file))
    rows = [row for row in rows if row["model"].startswith("deepseekv")]
    assert len(rows) == 7
    for row in rows:
        peak, job = float(re.findall(r"peak alloc ([\d.]+)", row["note"])[0]), of_steps(row)
        assert of(job, 1) == pytest.approx(peak, rel=0.025)
        if job.layout.pp == 1:
            assert of(job, 0) > 1.1 * peak
            assert of(job, 2) < 0.9 * peak


def test_the_backward_all_reduce_of_2021_is_not_hidden():
    old = ("training.sequence_parallel=false", "training.overlap_tp_backward=false")
    hidden, bare = (lower_job(load_job("megatron-175b-a100-64", old[:count])) for count in (1, 2))
    assert bare.forward == hidden.forward
    of_forward, of_backward, of_hidden = (
        block_mean(block) - sum(k.mean * n for k, n in kernels_of(block).items() if not k.link)
        for block in (bare.forward[1], bare.backward[1], hidden.backward[1])
    )
    assert of_backward == pytest.approx(of_forward)
    assert of_hidden < 0.5 * of_forward


_HEADER = (
    "source,model,layers,hidden,heads,kv_heads,ffn,vocab,seq,gpus,gpu_type,tp,pp,vpp,dp,cp,ep,"
)
_HEADER += "micro_batch,global_batch,recompute,seq_parallel,dtype,zero,step_time_s,note"
_LLAMA_8B = "Megatron-Bridge,LLAMA3_8B,32,4096,32,8,14336,128256,8192,8,DGX-B200,1,1,,8,1,1,"


@pytest.mark.slow
def test_means_are_printed_by_table(tmp_path):
    (tmp_path / "published").mkdir()
    rows = [_HEADER, _LLAMA_8B + "2,128,,,FP8,1,4.37,", _LLAMA_8B + "2,128,,,INT4,1,3,"]
    (tmp_path / "published" / "measured_steps.csv").write_text("\n".join(rows) + "\n")
    good, bad = found = list(mean_rows(tmp_path))
    assert good["measured"] == 4.37
    assert good["predicted"] == pytest.approx(4.37, rel=0.2)
    assert bad["reason"] == "no dtype INT4"
    printed = mean_table(found)
    assert "| Megatron-Bridge, B200, dense | 1 |" in printed
    assert "1 of 2 rows can be written as jobs" in printed
    assert "- 1: no dtype INT4" in printed
