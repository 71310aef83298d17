"""Fine-tuning: adapters of low rank, and packed sequences."""

import math
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose

import prism_jax as prism
from prism_jax.data import Adapters, Job, Layout, Lengths, Packed, ScheduleConfig, Training
from prism_jax.lowering import job_parts
from prism_jax.program import compile_job
from prism_jax.workload import lower, model_flop, rows_of

from .helpers import small_model


MODEL = small_model(num_layers=4, num_kv_heads=4, ffn_size=3072, vocab_size=8192)
# Of the matrices of a layer: queries, keys and values; what attention returns; the MLP's.
SIZES = {
    "linear_qkv": (1024, 2048),
    "linear_proj": (1024, 1024),
    "linear_fc1": (1024, 6144),
    "linear_fc2": (3072, 1024),
}
ATTENTION = ("linear_qkv", "linear_proj")


CLUSTER = prism.data.load_cluster("dgx-h100", 1)
KERNELS = prism.data.load_kernels(CLUSTER)


def job_of(layout: Layout | None = None, microbatches: int = 1, **keys: Any) -> Job:
    sizes: Any = {"microbatch_size": 1, "sequence_length": 2048} | keys
    parts: Any = {"model": MODEL, "training": Training(**sizes)}
    schedule = ScheduleConfig("1f1b", microbatches)
    return Job(layout or Layout(), schedule, cluster=CLUSTER, kernels=KERNELS, **parts)


def kernels_of(block: Any) -> list[Any]:
    rows = (row for segment, times in block for row, _ in rows_of(segment) for _ in range(times))
    return [kernel for row in rows for kernel, count in row for _ in range(count)]


@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize("names", [ATTENTION, tuple(SIZES)])
def test_operations_of_adapters(names, separate):
    """Each product of the model has a forward and the gradient of its input, those of adapters and
    the scores of attention also another gradient. Queries, keys and values share an adapter.
    """
    job, tokens = job_of(adapters=Adapters(8, names), separate_products=separate), 2048
    of_layer = sum(math.prod(size) for size in SIZES.values())
    of_model = 4 * of_layer + 1024 * 8192
    of_adapters = 4 * 8 * sum(sum(SIZES[name]) for name in names)
    scores = 4 * 2 * tokens**2 / 2 * 2 * 1024
    expected = 4 * tokens * of_model + 6 * tokens * of_adapters + 3 * scores
    assert_allclose(model_flop(job_parts(job)), expected, rtol=1e-12)


def test_only_adapters_have_gradients():
    """No kernel is the gradient of a matrix of the model, and all that adapters add goes to nothing
    with their rank.
    """
    load, plain = (
        lower(job_parts(job_of(Layout(tp=2), dtype="fp8", adapters=adapters)), (0,))
        for adapters in (Adapters(8), None)
    )
    products = [one for one in kernels_of(load.backward[0]) if "added" in one.size]
    assert len(products) == 4 * len(SIZES)
    assert all("x8x" in one.size or " 8x" in one.size for one in products)
    forward = [sum(one.flop for one in kernels_of(each.forward[0])) for each in (load, plain)]
    # A rank of two has all that a row-parallel matrix makes, and half of what it reads.
    split = {"linear_qkv": 1024 + 1024, "linear_proj": 512 + 1024}
    split |= {"linear_fc1": 1024 + 3072, "linear_fc2": 1536 + 1024}
    assert_allclose(forward[0] - forward[1], 4 * 2 * 2048 * 8 * sum(split.values()), rtol=1e-12)


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_memory_of_adapters(zero):
    """Weights of the model alone; gradients and the states of Adam of adapters alone; and no input
    of a matrix that nothing trained reads.
    """
    job = job_of(Layout(tp=2, dp=2), adapters=Adapters(8, ATTENTION), zero=zero)
    (rank,) = prism.memory(job).ranks
    parts, tokens = rank.parts, 2048
    adapters = 4 * 8 * sum(sum(SIZES[name]) for name in ATTENTION) / 2
    norms = (2 * 4 + 1) * 1024
    model = (4 * sum(math.prod(s) for s in SIZES.values()) + 2 * 8192 * 1024) / 2 + norms
    shard = adapters / (2 if zero else 1)
    assert_allclose(parts["frozen"], 2 * model / (2 if zero == 3 else 1))
    assert_allclose(parts["optimizer"], (8 if zero == 3 else 12) * shard)
    assert_allclose(parts["parameters"], 4 * shard if zero == 3 else 2 * adapters)
    # Inputs and outputs of the first norm of each layer, inputs of the second.
    assert_allclose(parts["norm"], 4 * 3 * 2 * tokens / 2 * 1024)
    assert_allclose(parts["mlp"], 4 * 2 * tokens * 6144 / 2)


def test_replicas_reduce_adapters_alone():
    """FSDP gathers all parameters, and reduces the gradients of adapters."""
    plain, job = (job_of(Layout(dp=8), zero=3, adapters=a) for a in (None, Adapters(8, ATTENTION)))
    trained = 4 * 8 * sum(sum(SIZES[name]) for name in ATTENTION)

    def sent(job: Job, kind: str) -> float:
        load = lower(job_parts(job), (0,))
        found = [one for one in kernels_of(load.forward[0] + load.backward[0]) if one.kind == kind]
        return sum(int(one.size.partition("B")[0]) for one in found)

    layers = 2 * 4 * sum(math.prod(size) for size in SIZES.values())
    ends = 2 * 2 * 8192 * 1024
    norms = 2 * (4 * 2 * 1024)
    # Layers are gathered twice, the head once, and the embedding has no backward.
    expected = 2 * layers + ends + 2 * norms + 2 * 1024 + 2 * 2 * trained
    assert_allclose(sent(job, "all_gather"), expected, rtol=1e-6)
    assert_allclose(sent(job, "reduce_scatter"), 4 * trained, rtol=1e-6)
    assert sent(plain, "reduce_scatter") > 50 * sent(job, "reduce_scatter")


def test_equal_packed_sequences_are_a_larger_microbatch():
    """Sequences of one length that fill a longer one take as long as a microbatch of these; one
    that fills it alone takes as long as without packing. Over the ranks of a context-parallel
    group, attention has as many operations.
    """
    keys: Any
    for length, keys in ((512, {"microbatch_size": 4, "sequence_length": 512}), (2048, {})):
        packed = Packed(Lengths(length))
        one, other = prism.predict(job_of(packed=packed)), prism.predict(job_of(**keys))
        assert_allclose(one.mean, other.mean, rtol=1e-12)
        assert_allclose(one.flop_per_s, other.flop_per_s, rtol=1e-12)
        for cp_comm_type in ("p2p", "a2a"):
            shared: Any = {"layout": Layout(cp=2), "cp_comm_type": cp_comm_type}
            jobs = job_of(packed=packed, **shared), job_of(**keys, **shared)
            assert_allclose(*map(attended, jobs), rtol=1e-12)


def attended(job: Job) -> float:
    """The operations of attention in the forward of a GPU."""
    kernels = kernels_of(lower(job_parts(job), (0,)).forward[0])
    return sum(one.flop for one in kernels if one.kind == "attention")


def test_sum_of_squares_of_packed_lengths():
    """The mean and the spread of the sum of squares are those of sequences that are drawn until
    they fill a microbatch.
    """
    lengths, most, tokens = Lengths(300.0, 0.9), 2048, 16 * 2048
    packed, rng = Packed(lengths), np.random.default_rng(0)
    drawn = 300 * np.exp(0.9 * rng.standard_normal((4000, 400)) - 0.9**2 / 2)
    drawn = np.minimum(drawn, most)
    for power in (1, 2, 3, 4):
        assert_allclose(lengths.moment(power, most), np.mean(drawn**power), rtol=0.02)
    fits = np.cumsum(drawn, axis=1) <= tokens
    each = np.sum(drawn**2 * fits, axis=1) / np.sum(drawn * fits, axis=1)
    assert_allclose(packed.mean_length(most), np.mean(each), rtol=0.02)
    assert_allclose(packed.spread(most, tokens), np.std(each) / np.mean(each), rtol=0.06)
    assert Packed(Lengths(300.0)).spread(most, tokens) == 0


def test_packed_microbatches_differ():
    """A microbatch's factor has the spread of attention in the share of compute that this is."""
    packed = Packed(Lengths(300.0, 0.9))
    job = job_of(Layout(pp=2), microbatches=4, packed=packed)
    found = prism.predict(job)
    parts = {key: s for key, s in found.breakdown.items() if not key.startswith("exposed")}
    kinds = ("gemm", "attention", "elementwise", "norm", "embedding", "loss")
    share = parts["attention"] / sum(parts[kind] for kind in kinds)
    law: Any = compile_job(job).variability.microbatch
    spread = float(np.sqrt(law.variance()) / law.mean())
    assert_allclose(spread, share * packed.spread(2048, 2048), rtol=1e-5)
    assert compile_job(job_of()).variability.microbatch is None


def test_dropout_keeps_a_mask():
    """A byte more of each value that an adapter reads, and a longer step. What a dropout leaves of
    the output of attention is another tensor, whose own backward needs it as it was.
    """
    jobs = [job_of(zero=0, adapters=Adapters(8, ATTENTION, drop)) for drop in (False, True)]
    plain, dropped = (prism.memory(job).ranks[0].parts for job in jobs)
    assert_allclose(dropped["norm"] - plain["norm"], 4 * 2048 * 1024)
    assert_allclose(dropped["attention"] - plain["attention"], 3 * 4 * 2048 * 1024)
    assert prism.predict(jobs[1]).mean > prism.predict(jobs[0]).mean
