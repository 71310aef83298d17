import json

import msgspec
import numpy as np
import pytest

import prism_jax as prism
from prism_jax.cli import main
from prism_jax.prediction import constant_step
from prism_jax.schedule import group_ends, make_schedule, op_graph, replay


JOBS = ("megatron-22b-a100-8", "megatron-175b-a100-64", "gpt3-175b-h100-4096")


@pytest.mark.parametrize("name", JOBS)
def test_a_prediction_is_the_step_of_constants_and_its_parts_add_up(name):
    job = prism.load_job(name)
    assert job.kernels is not None
    found = prism.predict(job)
    assert found.mean == pytest.approx(constant_step(job)(job.kernels), rel=1e-12)
    assert sum(found.breakdown.values()) == pytest.approx(found.mean, rel=1e-12)
    assert min(found.breakdown.values()) >= 0
    assert 0 <= found.exposed_send_recv <= found.breakdown.get("exposed pp", 0) + 1e-12
    # Every op is of a stage, and of a phase.
    assert sum(found.stages) == pytest.approx(sum(found.phases.values()) * job.layout.pp, rel=1e-12)


def test_products_are_those_of_the_closed_form():
    """Six operations for each parameter of a matrix and token, and attention to half of all tokens,
    though its kernels are not fused and compute the other half as well.
    """
    job = prism.load_job("megatron-22b-a100-8")
    assert job.model is not None
    assert job.training is not None
    assert job.cluster is not None
    model, tokens = job.model, job.training.sequence_length
    layers, width = model.num_layers, model.hidden_size
    matrices = 12 * layers * width**2 + width * model.vocab_size
    found = prism.predict(job)
    per_token = found.flop_per_s * job.layout.world_size / found.tokens_per_s
    assert per_token == pytest.approx(6 * matrices + 6 * layers * width * tokens)
    again = msgspec.structs.replace(job.training, recompute="full", recompute_layers=layers)
    same = prism.predict(msgspec.structs.replace(job, training=again))
    # What is computed again takes time, but is no work of the model.
    assert same.mean > found.mean
    assert same.flop_per_s * same.mean == pytest.approx(found.flop_per_s * found.mean)
    peak = job.cluster.device.peak_flop_per_s[job.training.dtype]
    assert found.mfu == pytest.approx(found.flop_per_s / peak)


def test_two_copies_of_a_model_share_the_microbatches():
    flat = ("megatron-175b-a100-64", ["schedule.virtual_stages=1"])
    job = prism.load_job(*flat)
    both = prism.load_job(flat[0], [*flat[1], "schedule.kind=dual-pipe"])
    one, two = prism.predict(job), prism.predict(both)
    assert two.tokens_per_s * two.mean == pytest.approx(one.tokens_per_s * one.mean)
    assert two.flop_per_s * two.mean == pytest.approx(one.flop_per_s * one.mean)


def test_predict_command_prints_the_prediction(capsys):
    assert main(["predict", "gpt3-175b-h100-4096", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    found = prism.predict(prism.load_job("gpt3-175b-h100-4096"))
    assert printed["step_time_s"] == {"mean": found.mean}
    assert printed["mfu"] == found.mfu
    assert printed["breakdown"] == found.breakdown
    assert main(["predict", "gpt3-175b-h100-4096"]) == 0
    assert "exposed dp" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("kind", "blocking"),
    [
        *((kind, False) for kind in ("1f1b", "zb-h1", "dual-pipe", "dual-pipe-v", "v-half")),
        ("1f1b", True),
    ],
)
def test_an_op_starts_when_all_before_it_have_ended(kind, blocking):
    stages = 2 if kind in ("dual-pipe-v", "v-half") else 1
    schedule = make_schedule(kind, num_ranks=4, num_microbatches=8, virtual_stages=stages)
    graph = op_graph(schedule, blocking=blocking)
    latencies = np.random.default_rng(0).lognormal(size=graph.num_ops)
    ends: list[float] = []
    for before, latency in zip(graph.predecessors, latencies.tolist(), strict=True):
        ends.append(max((ends[op] for op in before), default=0.0) + latency)
    expected = [max(ends[op] for op in last) for last in graph.last]
    assert replay(graph.predecessors, latencies)[1].tolist() == ends
    assert group_ends(graph, latencies, graph.last).tolist() == expected
