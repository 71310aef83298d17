"""Activations and the optimizer in the memory of the host: what they free, and what copies cost."""

import msgspec
import pytest

from prism_jax import predict
from prism_jax.data import Layer, load_device, load_job
from prism_jax.lowering import job_parts
from prism_jax.prediction import memory
from prism_jax.workload import memory_of_stages
from validation.published_jobs import of_steps
from validation.rows import job_of, read

from .helpers import lower_job


_DENSE = "megatron-22b-a100-8"
_ACTIVATIONS = 'training.offload=["activations"]'
_OPTIMIZER = 'training.offload=["optimizer"]'
_SLOW, _FAST = (
    "cluster.device.host.link_bytes_per_s=1e7",
    "cluster.device.host.link_bytes_per_s=1e15",
)


def _job(*changes):
    plain = ("layout.tp=8", "training.recompute=none", "schedule.num_microbatches=2")
    return load_job(_DENSE, [*plain, *changes])


def _host(job):
    return job.cluster.device.host


def _copies(block):
    return sum(
        times * count * kernel.mean
        for one, times in block
        for branches in one.branches
        for row in branches.communication
        for kernel, count in row
        if kernel.group == "host"
    )


@pytest.mark.parametrize("recompute", ["none", "full", "by-op"])
@pytest.mark.parametrize("sharded", [(), ("layout.tp=1", "layout.dp=8", "training.zero=3")])
def test_what_leaves_the_device_is_what_the_link_carries_each_way(recompute, sharded):
    how = (f"training.recompute={recompute}", *sharded)
    kept, offloaded = _job(*how), _job(*how, _ACTIVATIONS, "training.offload_layers=12")
    before, after = (memory_of_stages(job_parts(job), (0,))[0] for job in (kept, offloaded))
    left = sum(before.kept.values()) - sum(after.kept.values())
    work, link = lower_job(offloaded), _host(offloaded).link_bytes_per_s
    assert left > 0
    for block in (work.forward[0], work.backward[0]):
        assert _copies(block) * link == pytest.approx(left, rel=1e-6)
    # All else is the same.
    assert before._replace(kept={}) == after._replace(kept={}, offloaded=0.0)


def test_two_layers_stay_where_all_are_offloaded():
    each, two = (
        _job(_ACTIVATIONS, f"training.offload_layers={layers}", "model.num_layers=12")
        for layers in (12, 10)
    )
    every = _job(_ACTIVATIONS, "model.num_layers=12")
    kept = [memory_of_stages(job_parts(job), (0,))[0].kept for job in (each, two, every)]
    assert kept[0] == kept[1] == kept[2]


@pytest.mark.parametrize(
    "changes",
    [
        (_ACTIVATIONS,),
        ("training.recompute=full", "training.recompute_layers=4"),
        ("training.recompute=full", "training.recompute_layers=4", _ACTIVATIONS),
    ],
)
def test_layers_that_take_turns_are_kept_as_equal_ones(changes):
    """A window does not change what flash attention keeps."""
    equal = _job("model.num_layers=12", "training.attention=flash", *changes)
    turns = (Layer(("local", "mlp")), Layer(("attention", "mlp")))
    modules = {"local": {"kind": "attention", "window": 512}}
    model = msgspec.structs.replace(job_parts(equal).model, layers=6 * turns, modules=modules)
    jobs = equal, msgspec.structs.replace(equal, model=model)
    of_equal, of_turns = (memory_of_stages(job_parts(job), (0,))[0] for job in jobs)
    assert of_turns == of_equal


def test_copies_that_compute_covers_take_no_time_and_others_take_theirs():
    plain, fast, slow = _job(), _job(_ACTIVATIONS, _FAST), _job(_ACTIVATIONS, _SLOW)
    assert predict(fast).mean == pytest.approx(predict(plain).mean, rel=1e-9)
    work, prediction = lower_job(slow), predict(slow)
    copies = slow.schedule.num_microbatches * sum(
        _copies(block) for block in (work.forward[0], work.backward[0])
    )
    # The rest of the step is short beside them.
    assert prediction.mean == pytest.approx(copies, rel=0.01)
    assert prediction.breakdown["exposed host"] == pytest.approx(copies, rel=0.01)


@pytest.mark.parametrize("share", [1.0, 0.25])
@pytest.mark.parametrize(("zero", "weight"), [(1, 2), (3, 4)])
def test_an_optimizer_on_the_host_frees_its_states_and_takes_copies_and_its_memory(
    share, zero, weight
):
    kept = _job(f"training.zero={zero}")
    host = _job(f"training.zero={zero}", _OPTIMIZER, f"training.offload_fraction={share}")
    before, after = (memory_of_stages(job_parts(job), (0,))[0].held for job in (kept, host))
    assert after["optimizer"] == pytest.approx((1 - share) * before["optimizer"])
    parameters, of = before["parameters"] / weight, _host(kept)
    copies = share * parameters * (4 + weight) / of.link_bytes_per_s
    update = share * parameters * 30 / of.memory_bytes_per_s
    gpu = job_parts(kept).move("optimizer", 30 * parameters).mean
    rest = job_parts(kept).move("optimizer", 30 * (1 - share) * parameters).mean
    longer = predict(host).mean - predict(kept).mean
    assert longer == pytest.approx(copies + update + rest - gpu, rel=1e-6)


def test_gradients_of_an_optimizer_on_the_host_are_reduced_beside_the_backward():
    how = ("layout.tp=4", "layout.dp=2", "training.overlap_grad_reduce=true")
    before, after = (lower_job(_job(*how, *one)).reductions for one in ((), (_OPTIMIZER,)))
    assert len(before[0]) > 1
    assert before == after


@pytest.mark.parametrize("name", ["gh200-96g", "gh200-144g"])
def test_two_gpus_of_a_grace_have_half_of_it_each(name):
    whole, half = load_device(name).host, load_device("gb200").host
    assert half.link_bytes_per_s == pytest.approx(whole.link_bytes_per_s / 2, rel=0.01)
    assert half.memory_bytes_per_s == whole.memory_bytes_per_s / 2


def test_published_steps_with_activations_on_the_host_fit(shared):
    """All seven, each of which was refused for lack of memory without."""
    rows = [row for row in read(shared / "data/steps/step_means.csv") if row["offload"]]
    assert len(rows) == 7
    for row in rows:
        job = job_of(of_steps, row)
        assert job.training.offload == ("activations",)
        assert memory(job).fits
        assert predict(job).mean == pytest.approx(float(row["step_time_s"]), rel=0.15)
