"""ZeRO-2 and ZeRO-3 (FSDP): what is gathered and dealt, and what a GPU holds."""

import re

import pytest

import prism_jax as prism
from prism_jax.lowering import job_parts
from prism_jax.program import count_calls
from prism_jax.workload import block_mean, count_parameters, memory_of_stages

from .helpers import kernels_of, lower_job


_SMALL = ("layout.tp=1", "layout.pp=1", "layout.dp=16", "schedule.kind=1f1b", "num_nodes=2")
_SMALL += ("schedule.virtual_stages=1", "model=llama-3.1-8b", "training.gradient_dtype=fp32")
_PARAMETERS = count_parameters(prism.load_model("llama-3.1-8b"))
_HEAD = 128256 * 4096 + 4096


def _job(*overrides):
    return prism.load_job("gpt3-175b-h100-768", (*_SMALL, *overrides))


def _bytes(block, kind):
    """What the collectives of a kind move, by their group."""
    found = {}
    for kernel, times in kernels_of(block).items():
        if kernel.kind == kind:
            named = re.match(r"(\d+)B ([a-z-]+\d+)", kernel.size)
            found[named[2]] = found.get(named[2], 0) + times * int(named[1])
    return found


@pytest.mark.parametrize("prefetch", [0, 1])
def test_each_layer_is_gathered_twice_and_its_gradients_dealt_once(prefetch):
    """The head once, whose backward follows its forward."""
    work = lower_job(_job("training.zero=3", f"training.prefetch={prefetch}"))
    assert _bytes(work.forward[0], "all_gather") == {"dp16": 2 * _PARAMETERS}
    assert _bytes(work.backward[0], "all_gather") == {"dp16": 2 * (_PARAMETERS - _HEAD)}
    assert _bytes(work.backward[0], "reduce_scatter") == {"dp16": 4 * _PARAMETERS}
    # Nothing is left to do at the end of the step.
    assert work.reduce_scatter == ((),)
    assert _bytes(work.tail, "all_gather") == {}


def test_a_forward_before_gradients_that_are_reduced_has_its_own_kernels():
    """What the backward runs until replicas meet is in none of its calls, and takes no time."""
    alone, waits = (lower_job(_job(f"training.zero={zero}")).forward[0] for zero in (1, 2))
    assert count_calls(waits, 1) == count_calls(alone, 1)
    assert block_mean(waits) == pytest.approx(block_mean(alone), rel=1e-12)


def test_gradients_alone():
    work = lower_job(_job("training.zero=2"))
    assert _bytes(work.forward[0], "all_gather") == {}
    assert _bytes(work.backward[0], "reduce_scatter") == {"dp16": 4 * _PARAMETERS}
    assert work.reduce_scatter == ((),)
    assert _bytes(work.tail, "all_gather") == {"dp16": 2 * _PARAMETERS}


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_what_is_sent_and_updated_has_the_bytes_of_its_dtypes(zero):
    """Layers are gathered in fp8, the ends are not; gradients are sent in bf16; an update moves two
    moments, each read and written, with half the bytes.
    """
    dtypes = ("gather_dtype=fp8", "gradient_comm_dtype=bf16", "optimizer_dtype=bf16")
    plain, changed = (
        lower_job(_job(f"training.zero={zero}", "training.overlap_param_gather=false", *more))
        for more in ((), [f"training.{one}" for one in dtypes])
    )
    layers = _PARAMETERS - _HEAD - 128256 * 4096
    gathers = changed.forward[0] if zero == 3 else changed.tail
    assert _bytes(gathers, "all_gather")["dp16"] == 2 * _PARAMETERS - layers
    reductions = changed.reduce_scatter[0] if zero == 1 else changed.backward[0]
    assert _bytes(reductions, "reduce_scatter")["dp16"] == 2 * _PARAMETERS
    moved = [
        sum(
            times * int(one.size[:-1])
            for one, times in kernels_of(work.tail).items()
            if one.kind == "optimizer"
        )
        for work in (plain, changed)
    ]
    assert moved[0] - moved[1] == pytest.approx(2 * 4 * _PARAMETERS / 16, abs=2)


def test_a_backward_in_two_deals_gradients_with_its_weights():
    work = lower_job(_job("training.zero=3"))
    assert _bytes(work.backward_input[0], "all_gather") == {"dp16": 2 * (_PARAMETERS - _HEAD)}
    assert _bytes(work.backward_input[0], "reduce_scatter") == {}
    assert _bytes(work.backward_weight[0], "reduce_scatter") == {"dp16": 4 * _PARAMETERS}


def test_copies_of_the_shards():
    work = lower_job(_job("training.zero=3", "training.optimizer_instances=2"))
    assert _bytes(work.forward[0], "all_gather") == {"dp8": 2 * _PARAMETERS}
    assert _bytes(work.backward[0], "reduce_scatter") == {"dp8": 4 * _PARAMETERS}
    (reduced,) = _bytes(work.backward[0], "all_reduce").values()
    assert reduced == pytest.approx(4 * _PARAMETERS / 8, rel=1e-6)


def test_parameters_that_stay_gathered_are_gathered_once():
    work = lower_job(_job("training.zero=3", "training.reshard_after_forward=false"))
    assert _bytes(work.backward[0], "all_gather") == {}
    again = lower_job(_job("training.zero=3", "training.recompute=full"))
    assert _bytes(again.backward[0], "all_gather") == {"dp16": 2 * (_PARAMETERS - _HEAD)}


def test_experts_are_shared_by_those_who_have_the_same():
    moe = ("model=mixtral-8x7b", "layout.ep=4", "training.zero=3")
    work = lower_job(_job(*moe))
    experts = 32 * 8 * 3 * 4096 * 14336
    gathered = _bytes(work.forward[0], "all_gather")
    assert gathered["edp4"] == 2 * experts / 4
    total = count_parameters(prism.load_model("mixtral-8x7b"))
    assert gathered["dp16"] == 2 * (total - experts)


_WIDE = ("model.num_layers=8", "layout.tp=8", "layout.pp=4", "layout.dp=4", "num_nodes=16")
_WIDE += ("training.overlap_grad_reduce=false",)


def _reduced(job):
    """The bytes of gradients that each rank reduces over its replicas."""
    work = lower_job(job)
    pairs = zip(work.reduce_scatter, work.backward, strict=True)
    found = [[_bytes(one, "reduce_scatter").get("dp4", 0) for one in both] for both in pairs]
    return list(map(sum, found))


@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize("change", ["bias=true", "tied_embeddings=true", "num_mtp_layers=1"])
def test_all_gradients_that_are_held_are_reduced(zero, change):
    """What each tensor-parallel rank, or each end of the pipeline, has a copy of, too."""
    changed = ("schedule.num_microbatches=4", f"model.{change}")
    held = prism.memory(_job(*_WIDE, *changed, "training.zero=1")).ranks
    job = _job(*_WIDE, *changed, f"training.zero={zero}")
    reduced = _reduced(job)
    assert reduced == pytest.approx([rank.parts["gradients"] for rank in held], rel=1e-7)


def test_the_optimizer_waits_for_the_largest_shard():
    """Not for the rank that holds most: its words are shared by more ranks than experts are."""
    stages = ("layout.pp=4", "num_nodes=8", "schedule.layers_per_stage=[1,15,15,1]")
    moe = ("model=mixtral-8x7b", "model.vocab_size=2000000", "layout.ep=8", "training.zero=1")
    job = _job(*stages, *moe, "schedule.num_microbatches=4")
    ranks = [rank.parts for rank in prism.memory(job).ranks]
    most, shard = (max(ranks, key=lambda parts: parts[key]) for key in ("parameters", "optimizer"))
    assert most is not shard
    sizes = [int(k.size[:-1]) for k in kernels_of(lower_job(job).tail) if k.kind == "optimizer"]
    assert max(sizes) == pytest.approx(30 * shard["optimizer"] / 12, rel=1e-7)


def _stage(*overrides):
    return memory_of_stages(job_parts(_job(*overrides)), (0,))[0]


def test_memory_of_shards():
    """FSDP has shards in float32 alone, of the parameters, two moments and, once a backward has
    made them, gradients; its root, the ends of the model, is whole until the backward is done.
    """
    whole, gradients, shards = (_stage(f"training.zero={zero}") for zero in (1, 2, 3))
    number = _PARAMETERS / 16
    assert whole.held["optimizer"] == gradients.held["optimizer"] == 12 * number
    assert gradients.held["gradients"] == whole.held["gradients"] / 16 == 4 * number
    assert gradients.held["parameters"] == whole.held["parameters"] == 2 * _PARAMETERS
    assert (shards.held["parameters"], shards.held["optimizer"]) == (4 * number, 8 * number)
    assert (whole.made, gradients.made, shards.made) == (0, 0, 4 * number)
    assert "gradients" not in shards.held
    narrow = _stage("training.zero=3", "training.optimizer_dtype=bf16")
    assert narrow.held["optimizer"] == 4 * number
    ends, layer = _HEAD + 128256 * 4096, 2 * 4096 * (4096 + 1024) + 3 * 4096 * 14336 + 2 * 4096
    assert whole.closing["gathered"] == 0
    assert gradients.closing["gathered"] == 4 * (_HEAD + layer)  # Two units that are neighbours.
    assert shards.forward["gathered"] == 2 * (ends + 2 * layer)
    assert shards.closing["gathered"] == (2 + 2) * ends + (2 + 4) * 2 * layer
    ahead = _stage("training.zero=3", "training.prefetch=3", "training.gather_dtype=fp8")
    assert ahead.forward["gathered"] == 2 * ends + 4 * layer
    kept = _stage("training.zero=3", "training.reshard_after_forward=false")
    assert kept.held["parameters"] == 4 * number + 2 * _PARAMETERS


@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_step_has_no_gradients_before_its_first_backward(microbatches):
    """At the loss, which has most here: those of an earlier microbatch."""
    sizes = ("training.zero=3", "training.sequence_length=32768", "training.recompute=full")
    job = _job(*sizes, f"schedule.num_microbatches={microbatches}")
    parts = prism.memory(job).ranks[0].parts
    assert parts["logits"] == 12 * 32768 * 128256
    assert parts.get("gradients", 0) == (microbatches > 1) * 4 * _PARAMETERS / 16


@pytest.mark.parametrize(("nodes", "length", "fits"), [(1, 20000, 0), (2, 20000, 1), (2, 32000, 0)])
def test_a_dense_32b_model_that_ran_fits_and_that_ran_out_does_not(nodes, length, fits):
    """Qwen2.5-32B on nodes of 8 H100: a sequence on each GPU, FSDP, all layers recomputed, and the
    loss of PyTorch.
    """
    sizes = "hidden_size=5120 num_layers=64 num_heads=40 num_kv_heads=8 ffn_size=27648"
    changes = [f"model.{one}" for one in f"{sizes} vocab_size=152064".split()]
    changes += [
        f"training.{one}" for one in ("zero=3", "recompute=full", f"sequence_length={length}")
    ]
    changes += ["cluster=dgx-h100", f"num_nodes={nodes}", f"layout.dp={8 * nodes}"]
    changes += ["schedule.num_microbatches=1", "training.microbatch_size=1"]
    job = _job(*changes)
    memory = prism.memory(job)
    assert memory.fits == fits
    parts, number = memory.fullest.parts, count_parameters(job_parts(job).model)
    assert parts["parameters"] + parts["optimizer"] == 12 * number / (8 * nodes)
    assert "gradients" not in parts  # At the loss, which is the peak.
