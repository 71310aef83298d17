import itertools as it
import math
import tracemalloc
from collections import Counter
from typing import Any

import msgspec
import numpy as np
import pytest

from prism_jax import predict
from prism_jax.data import Job, Model, job_warnings, load_job, load_model
from prism_jax.workload import Block, block_mean, count_parameters
from prism_jax.workload._split import balanced_layers, layers_of_stages

from .helpers import flop_of, kernels_of, lower_job


_H100 = "gpt3-175b-h100-4096"
_A100 = "megatron-175b-a100-64"
_LLAMA = (
    "model=llama-3.1-8b",
    "training.sequence_length=8192",
    "layout.tp=2",
    "layout.pp=4",
    "layout.dp=2",
    "schedule.virtual_stages=2",
)


def _layer_parameters(model: Model) -> int:
    """The parameters of one layer: what one more makes."""
    more = msgspec.structs.replace(model, num_layers=model.num_layers + 1)
    return count_parameters(more) - count_parameters(model)


def _step_flop(job: Job) -> float:
    """Of a replica."""
    work = lower_job(job)
    blocks = (*work.forward, *work.backward)
    return flop_of(blocks) * work.group_size * job.schedule.num_microbatches


def _collective_bytes(block: Block) -> Counter[str]:
    """Bytes of the tensor-parallel collectives of a block by kind, each the full tensor."""
    counts: Counter[str] = Counter()
    for kernel, count in kernels_of(block).items():
        if kernel.link is not None and " tp" in kernel.size:
            counts[kernel.kind] += count * int(kernel.size.split("B")[0])
    return counts


@pytest.mark.parametrize("name", ["megatron-22b-a100-8", _A100])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_flop_of_unfused_gpt_equals_korthikanti(name, recompute):
    job = load_job(name, (f"training.recompute={recompute}",))
    model, training = job.model, job.training
    sequences = job.schedule.num_microbatches * training.microbatch_size
    s, h, L, V = training.sequence_length, model.hidden_size, model.num_layers, model.vocab_size
    layers = 24 * sequences * s * L * h**2
    attention = 4 * sequences * s**2 * h * L
    head = 2 * sequences * s * h * V
    expected = 3 * (layers + attention + head)
    assert expected == pytest.approx(
        72 * sequences * s * L * h**2 * (1 + s / (6 * h) + V / (12 * h * L))
    )
    expected += {"none": 0, "selective": attention, "full": layers + attention}[recompute]
    assert _step_flop(job) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    "overrides",
    [
        _LLAMA,
        (*_LLAMA, "layout.cp=2"),
        (*_LLAMA, "layout.tp=1"),
        ("layout.dp=1",),
        (*_LLAMA, "training.sequence_parallel=false"),
    ],
)
def test_flop_of_flash_attention_models(overrides):
    job = load_job(_H100, overrides)
    model, training = job.model, job.training
    assert model is not None
    tokens = training.sequence_length * job.schedule.num_microbatches
    bare = msgspec.structs.replace(model, bias=False)  # Matrices and norms.
    norms = (2 * model.num_layers + 1) * model.hidden_size * (2 - (model.norm == "rmsnorm"))
    parameters = count_parameters(bare) - norms
    if model.position == "learned":
        parameters -= model.max_positions * model.hidden_size
    if not model.tied_embeddings:
        parameters -= model.vocab_size * model.hidden_size
    # Two products forward, five backward (one is computed again), half of each masked.
    attention = 7 * model.num_layers * model.hidden_size * training.sequence_length
    expected = tokens * (6 * parameters + attention)
    assert _step_flop(job) == pytest.approx(expected, rel=1e-12)
    if model.name == "llama-3.1-8b":
        # 6 N per token, without the embedding, which is looked up.
        n = count_parameters(model) - model.vocab_size * model.hidden_size
        assert 6 * parameters == pytest.approx(6 * n, rel=1e-4)


def test_bytes_of_tensor_parallel_collectives():
    job = load_job(_H100)
    workload = lower_job(job)
    full = 2 * 2048 * 12288  # Bytes, tokens, hidden size: x T h.
    middle = 40
    # Forward: two gathers and two scatters for each layer; backward: the gathers of X come on top.
    assert _collective_bytes(workload.forward[middle]) == {
        "all_gather": 2 * full,
        "reduce_scatter": 2 * full,
    }
    assert _collective_bytes(workload.backward[middle]) == {
        "all_gather": 4 * full,
        "reduce_scatter": 2 * full,
    }
    reduced = lower_job(load_job(_H100, ("training.sequence_parallel=false",)))
    assert _collective_bytes(reduced.forward[middle]) == {"all_reduce": 2 * full}
    assert _collective_bytes(reduced.backward[middle]) == {"all_reduce": 2 * full}
    again = lower_job(load_job(_H100, ("training.recompute=full",)))
    assert _collective_bytes(again.backward[middle]) == {
        "all_gather": 6 * full,
        "reduce_scatter": 4 * full,
    }


def test_shapes_of_the_gemms():
    workload = lower_job(load_job(_H100))
    forward = {k.size: c for k, c in kernels_of(workload.forward[40]).items() if k.kind == "gemm"}
    assert forward == {
        "fp8 2048x9216x12288": 1,
        "fp8 2048x12288x3072": 1,
        "fp8 2048x12288x12288": 2,  # Up and down happen to be alike.
    }
    backward = {
        k.size.removesuffix(" added"): c
        for k, c in kernels_of(workload.backward[40]).items()
        if k.kind == "gemm"
    }
    assert backward == {
        "fp8 2048x12288x9216": 1,
        "fp8 12288x9216x2048": 1,
        "fp8 2048x3072x12288": 1,
        "fp8 3072x12288x2048": 1,
        "fp8 2048x12288x12288": 2,
        "fp8 12288x12288x2048": 2,
    }


def test_bytes_between_pipeline_ranks():
    job = load_job(_H100)
    workload = lower_job(job)
    expected = 2 * 2048 * 12288 // 4
    assert {kernel.size.split("B")[0] for kernel in workload.send_recv.values()} == {str(expected)}
    ranks = range(8)
    neighbours = {(r, (r + 1) % 8) for r in ranks} | {((r + 1) % 8, r) for r in ranks}
    assert set(workload.send_recv) == neighbours
    plain = lower_job(
        load_job(_H100, ("schedule.virtual_stages=1", "training.sequence_parallel=false"))
    )
    assert set(plain.send_recv) == neighbours - {(0, 7), (7, 0)}
    assert plain.send_recv[0, 1].size.split("B")[0] == str(4 * expected)
    # Replicas lie between the neighbours, so the adapters carry it all.
    assert plain.send_recv[0, 1].link == "infiniband"


_PLAIN = ("training.sequence_parallel=false",)
_SCATTERED = "training.scatter_send_recv=true"


@pytest.mark.parametrize("virtual", [1, 12])
def test_parts_that_are_sent_are_gathered(virtual):
    """Each GPU sends a part; each stage but the first, backward but the last, gathers it all."""
    plain, scattered = (
        lower_job(load_job(_H100, (f"schedule.virtual_stages={virtual}", *_PLAIN, *more)))
        for more in ((), (_SCATTERED,))
    )
    num_bytes, job = 2 * 2048 * 12288, load_job(_H100)
    assert {k.size.split("B")[0] for k in plain.send_recv.values()} == {str(num_bytes)}
    assert {k.size.split("B")[0] for k in scattered.send_recv.values()} == {str(num_bytes // 4)}
    # Over NVLink three quarters of the tensor arrive, in three hops.
    link = job.cluster.links[0]
    table = job.kernels.find_efficiency("all_gather", link.name)
    efficiency = table.at(num_bytes)
    gather = 0.75 * num_bytes / (link.bandwidth_bytes_per_s * efficiency) + 3 * link.latency_s
    for name, without in (("forward", 0), ("backward", -1), ("backward_input", -1)):
        before, after = (list(map(block_mean, getattr(one, name))) for one in (plain, scattered))
        more = np.full(8 * virtual, gather)
        more[without] = 0
        assert np.subtract(after, before) == pytest.approx(more, rel=1e-9, abs=1e-12)
    assert scattered.backward_weight == plain.backward_weight
    assert len({id(block) for block in scattered.forward}) <= 3


def test_scattered_sends_need_ranks_with_equal_activations():
    for plain in ((), ("layout.tp=1", "layout.dp=512", "training.sequence_parallel=false")):
        assert lower_job(load_job(_H100, plain)) == lower_job(load_job(_H100, (*plain, _SCATTERED)))


def test_pieces_of_a_reduction_add_up_to_the_backward():
    job = load_job(_H100, ("training.sequence_parallel=false", _SCATTERED))
    workload = lower_job(job)
    pieces = [one.piece for one in workload.reductions[0] if one.piece is not None]
    assert len(pieces) > 1
    assert sum(map(block_mean, pieces)) == pytest.approx(block_mean(workload.backward[0]))


def test_stages_differ_at_the_ends_only():
    workload = lower_job(load_job(_H100))
    assert len(workload.forward) == len(workload.backward) == 96
    assert len(set(workload.forward[1:-1])) == 1
    assert len(set(workload.backward[1:-1])) == 1
    assert block_mean(workload.forward[-1]) > block_mean(workload.forward[1])
    assert {k.kind for k in kernels_of(workload.forward[0])} - {
        k.kind for k in kernels_of(workload.forward[1])
    } == {"embedding"}
    assert {k.kind for k in kernels_of(workload.forward[-1])} - {
        k.kind for k in kernels_of(workload.forward[1])
    } == {"loss", "all_reduce"}
    assert workload.group_size == 4


def test_layers_are_counted_not_listed():
    one = lower_job(load_job(_H100)).forward[40]
    twelve = lower_job(load_job(_H100, ("schedule.virtual_stages=1",))).forward[4]
    assert len(one) == len(twelve)
    assert {segment: 12 * times for segment, times in one if segment.collective} == {
        segment: times for segment, times in twelve if segment.collective
    }
    assert block_mean(twelve) == pytest.approx(12 * block_mean(one))


def test_without_groups_nobody_waits():
    workload = lower_job(load_job(_H100, (*_LLAMA, "layout.tp=1")))
    for block in (*workload.forward, *workload.backward):
        assert len(block) == 1
        assert block[0][0].collective is None
    assert workload.group_size == 1


def test_context_parallel_ranks_wait_for_each_other():
    workload = lower_job(load_job(_H100, (*_LLAMA, "layout.cp=2")))
    layers = 32 // 8
    found = {k.size: c for k, c in kernels_of(workload.forward[3]).items() if " cp2 " in k.size}
    # Keys and values, two bytes, half of the sequence, 8 / tp heads of 128.
    assert found == {f"{2 * 2 * 4096 * 4 * 128}B cp2 nvlink": layers}
    assert workload.group_size == 4


def test_uneven_stages():
    job = load_job(
        _H100,
        (
            "model=llama-3.1-405b",
            "schedule.virtual_stages=8",
            "schedule.embedding_counts_as_layer=true",
            "schedule.head_counts_as_layer=true",
        ),
    )
    assert job.model is not None
    layers = layers_of_stages(job.model, job.layout, job.schedule)
    assert layers == (1, *[2] * 62, 1)
    job = load_job(_A100, ("schedule.layers_per_stage=[" + "4," * 20 + "0,4,4,8]",))
    workload = lower_job(job)
    assert sum(len(block) == 0 for block in workload.forward) == 1
    assert block_mean(workload.forward[20]) == 0
    assert block_mean(workload.forward[22]) * 2 < block_mean(workload.forward[23])


def test_overlap_leaves_a_part():
    plain = lower_job(load_job(_H100, ("training.tp_overlap=false",)))
    overlapped = lower_job(load_job(_H100))
    assert block_mean(overlapped.forward[40]) < block_mean(plain.forward[40])
    exposed = lower_job(load_job(_H100, ("training.overlap_param_gather=false",)))
    assert 0 < block_mean(overlapped.tail) < block_mean(exposed.tail)


def test_gradients_are_reduced_over_replicas_and_context():
    job: Any = load_job(_H100, ("training.overlap_grad_reduce=false",))
    workload = lower_job(job)
    (segment, times), *rest = workload.reduce_scatter[3]
    assert times == 1
    assert not rest
    assert segment.collective.kind == "reduce_scatter"
    # Each rank has all of two norms and of the biases of what it adds to the hidden states.
    copied = 6 * job.model.hidden_size
    parameters = 12 * ((_layer_parameters(job.model) - copied) / 4 + copied)
    assert segment.collective.size == f"{round(2 * parameters)}B dp128 infiniband"
    # The ends also add up the gradients of the embedding, of which each has a copy.
    for rank in (0, 7):
        kinds = [s.collective.kind for s, _ in workload.reduce_scatter[rank] if s.collective]
        assert kinds == ["reduce_scatter", "all_reduce"]
    zero = lower_job(load_job(_H100, ("training.zero=0",)))
    assert {k.kind for k in kernels_of(zero.reduce_scatter[3])} == {"all_reduce"}
    assert "all_gather" not in {k.kind for k in kernels_of(zero.tail)}


def test_one_replica_reduces_nothing():
    workload = lower_job(load_job("megatron-22b-a100-8"))
    assert workload.reduce_scatter == ((),)
    assert workload.send_recv == {}


def test_the_optimizer_moves_thirty_bytes_per_parameter():
    job: Any = load_job(_H100)
    found = [k for k in kernels_of(lower_job(job).tail) if k.kind == "optimizer"]
    first = 12 * _layer_parameters(job.model) + job.model.vocab_size * job.model.hidden_size
    first += 4 * job.model.max_positions * job.model.hidden_size  # Each rank has all positions.
    sizes = sorted(int(kernel.size[:-1]) for kernel in found)
    assert sizes[1] == pytest.approx(30 * first / 4 / 128, rel=1e-3)
    assert sizes[0] == pytest.approx(4 * first / 4 / 128, rel=1e-3)


def test_selective_recompute_is_free_with_flash_attention():
    assert lower_job(load_job(_H100, ("training.recompute=selective",))) == lower_job(
        load_job(_H100)
    )


def test_all_means_are_positive_and_named_apart():
    for overrides in ((), _LLAMA, (*_LLAMA, "layout.cp=2", "training.recompute=full")):
        workload = lower_job(load_job(_H100, overrides))
        names: dict[tuple[str, str], float] = {}
        blocks = (*workload.forward, *workload.backward, *workload.reduce_scatter, workload.tail)
        for block in blocks:
            for kernel, count in kernels_of(block).items():
                assert count > 0
                assert math.isfinite(kernel.mean)
                assert kernel.mean > 0
                assert names.setdefault((kernel.kind, kernel.size), kernel.mean) == kernel.mean


@pytest.mark.parametrize("name", [_H100, _A100])
def test_each_kind_of_kernel_has_a_law_and_each_collective_a_link(name):
    job = load_job(name)
    workload = lower_job(job)
    links = {link.name for link in job.cluster.links}
    blocks = (*workload.forward, *workload.backward, *workload.reduce_scatter, workload.tail)
    kernels = {kernel for block in blocks for kernel in kernels_of(block)}
    for kernel in (*kernels, *workload.send_recv.values()):
        assert job.kernels.find_variation("residual", kernel.kind) is not None
        collective = kernel.kind.startswith(("all_", "reduce_")) or kernel.kind == "send_recv"
        assert (kernel.link in links) == collective


def _attention(version: str, *overrides: str) -> list[float]:
    given = ("training.sequence_length=65536", f"training.attention={version}", *overrides)
    work = lower_job(load_job(_H100, given))
    blocks = (work.forward[0], work.backward[0])
    return [k.mean for block in blocks for k in kernels_of(block) if k.kind == "attention"]


def test_older_attention_takes_as_much_longer_as_its_table_says():
    """Where a device has no table of it, it is that of the fastest."""
    fast = _attention("flash")
    for version, forward, backward in (("flash-1", 0.207, 0.155), ("flash-2", 0.378, 0.326)):
        slower = [one / other for one, other in zip(_attention(version), fast, strict=True)]
        assert slower == pytest.approx([0.62 / forward, 0.52 / backward], rel=0.01)
    b200 = ("cluster=hgx-b200", "num_nodes=512")
    assert _attention("flash-1", *b200) == _attention("flash", *b200)


def test_layers_that_do_not_divide_are_balanced_by_cost():
    """No other split of consecutive layers has less work on its fullest stage."""
    for number, stages in ((7, 3), (8, 5), (9, 4)):
        model = msgspec.structs.replace(load_model("llama-3.1-8b"), num_layers=number)
        found = balanced_layers(model, stages)
        assert sum(found) == number
        assert len(found) == stages
        head = model.vocab_size / (13 * model.hidden_size + 2 * 1024)  # In layers of this model.
        fullest = min(
            max(*split[:-1], split[-1] + head)
            for split in it.product(range(number + 1), repeat=stages)
            if sum(split) == number
        )
        assert max(*found[:-1], found[-1] + head) == pytest.approx(fullest)
    # Llama team 2024 (arXiv:2407.21783), section 3.3.2: one layer fewer on the first and the last.
    assert balanced_layers(load_model("llama-3.1-405b"), 16) == (7, *[8] * 14, 7)


def test_very_many_layers_are_balanced_in_little_memory():
    """As many bytes as layers, not as pairs of them: four thousand had 128 MB for each array."""
    model = msgspec.structs.replace(load_model("llama-3.1-8b"), num_layers=4_000)
    tracemalloc.start()
    found = balanced_layers(model, 7)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 20e6
    assert sum(found) == 4_000
    assert max(found[:-1]) - min(found[:-1]) <= 1
    assert found[-1] == pytest.approx(found[0] - model.vocab_size / (13 * model.hidden_size), abs=1)


def test_flagship_models_are_split_or_say_how():
    changes = ["schedule.layers_per_stage=auto"]
    deepseek = load_job("deepseek-v3-h800-2048")
    auto = load_job("deepseek-v3-h800-2048", changes)
    none = msgspec.structs.replace(
        deepseek, schedule=msgspec.structs.replace(deepseek.schedule, layers_per_stage=None)
    )
    assert predict(auto) == predict(none)
    assert any("are distributed by cost" in note for note in job_warnings(none))
