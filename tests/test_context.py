"""Context parallelism: what is computed, sent, hidden and kept, against closed forms."""

from collections import Counter
from typing import Any

import msgspec
import numpy as np
import pytest

from prism_jax.data import load_job
from prism_jax.data._model import Layer
from prism_jax.importers._frameworks import megatron_reader
from prism_jax.importers._megatron import read_megatron
from prism_jax.lowering import job_parts
from prism_jax.workload import Branches, block_mean
from prism_jax.workload._memory import memory_of_stages
from prism_jax.workload.modules import make_module
from prism_jax.workload.modules._core import Core

from .helpers import flop_of, kernels_of, lower_job, refusal, small_model
from .test_importers import _SMALL


_HEADS, _KV_HEADS, _DIM, _LENGTH, _CP, _TP = 32, 8, 128, 32768, 4, 2
_WIDTH, _KV = _HEADS * _DIM // _TP, 2 * _KV_HEADS * _DIM // _TP  # Of a rank: out; keys and values.
_TOKENS = _LENGTH // _CP
_KINDS = ("p2p", "all_gather", "a2a")
_LATENT = {"q_lora_rank": 1536, "kv_lora_rank": 512}


def _job(*overrides, module="attention", **settings) -> Any:
    """Layers of attention alone, on a node of eight."""
    heads = {"num_heads": _HEADS, "num_kv_heads": _KV_HEADS}
    modules = {module: settings or _LATENT if module == "mla" else settings}
    layers = (Layer((module,), 3),)
    model = small_model(hidden_size=4096, **heads, ffn_size=None, layers=layers, modules=modules)
    plain = f"num_nodes=1 layout.pp=1 layout.dp=1 layout.tp={_TP} layout.cp={_CP}".split()
    plain += ["schedule.kind=1f1b", "schedule.virtual_stages=1", "training.dtype=bf16"]
    plain += ["training.tp_overlap=false", f"training.sequence_length={_LENGTH}"]
    job = load_job("gpt3-175b-h100-768", (*plain, *overrides))
    return msgspec.structs.replace(job, model=model)


def _lowered(kind, *overrides, **changes):
    return lower_job(_job(f"training.cp_comm_type={kind}", *overrides, **changes))


def _sent(block):
    """Bytes of the context-parallel group's collectives, by kind."""
    found: Counter[str] = Counter()
    for kernel, count in kernels_of(block).items():
        if kernel.group == "cp":
            found[kernel.kind] += count * int(kernel.size.split("B")[0])
    return dict(found)


@pytest.mark.parametrize("module", ["attention", "mla"])
@pytest.mark.parametrize("kind", _KINDS)
def test_every_way_computes_as_much(kind, module):
    whole = _lowered(kind, "layout.cp=1", "layout.dp=4", module=module)
    split = _lowered(kind, module=module)
    for phase in ("forward", "backward"):
        of_whole, of_split = (flop_of(getattr(w, phase), "attention") for w in (whole, split))
        assert of_split == pytest.approx(of_whole / _CP, rel=1e-12)


def test_bytes_sent_by_each_kind_of_context_parallelism():
    """Three layers; two bytes of each value. A ring sends a block at a time, gathers and scatters
    are of the whole, and of what an all_to_all sends a part stays."""
    ring = 3 * 2 * (_CP - 1) * _TOKENS * _KV
    gathered = 3 * 2 * _CP * _TOKENS * _KV
    exchanged = 3 * 2 * _TOKENS * (2 * _WIDTH + _KV)
    expected = {
        "p2p": ({"send_recv": ring}, {"send_recv": 2 * ring}),
        "all_gather": (
            {"all_gather": gathered},
            {"all_gather": gathered, "reduce_scatter": gathered},
        ),
        "a2a": ({"all_to_all": exchanged}, {"all_to_all": exchanged}),
    }
    for kind, (forward, backward) in expected.items():
        work = _lowered(kind)
        assert _sent(work.forward[0]) == forward
        assert _sent(work.backward[0]) == backward
        assert _sent(work.backward_input[0]) == backward
        assert _sent(work.backward_weight[0]) == {}


def _rings(block) -> list[Branches]:
    return [
        one
        for segment, times in block
        for one in segment.branches * times
        if one.communication[0][0][0].group == "cp"
    ]


def test_a_ring_runs_beside_the_block_in_hand():
    """Forward the last step is bare, backward none is."""
    work = _lowered("p2p")
    for block, steps, sends in (
        (work.forward[0], _CP - 1, _CP - 1),
        (work.backward[0], _CP, 2 * (_CP - 1)),
    ):
        found = _rings(block)
        assert len(found) == 3
        for ring in found:
            assert sum(count for _, count in ring.compute) == steps
            assert sum(count for _, count in ring.communication[0]) == sends


@pytest.mark.parametrize(("slower", "hidden"), [(1, True), (4, True), (1000, False)])
def test_a_ring_takes_the_longer_of_compute_and_transfer(slower, hidden):
    """Of C and K side by side the longer one, where K takes a part of C's units: C (1 + a) or K."""

    def ring_of(factor):
        bandwidth = f"cluster.links.nvlink.bandwidth_bytes_per_s={450e9 / factor}"
        any_speed = "allow_implausible=true"
        # Without other collectives, which would be slower, too.
        block = _lowered("p2p", bandwidth, any_speed, "layout.tp=1", "layout.dp=2").forward[0]
        (ring, *_) = _rings(block)
        (row,) = ring.communication
        compute, sends = (sum(k.mean * n for k, n in part) for part in (ring.compute, row))
        alpha, _ = ring.slowdowns
        return block_mean(block), compute, sends, alpha * sends

    fast, compute, _, by_fast = ring_of(1e-6)
    slow, same, sends, by_slow = ring_of(slower)
    assert compute == same
    assert (sends < compute) == hidden
    longer = max(sends, compute + by_slow) - (compute + by_fast)
    assert slow - fast == pytest.approx(3 * longer, rel=1e-9)


@pytest.mark.parametrize("window", [None, 1000, 5000, 40000])
def test_pairs_of_queries_and_keys(window):
    """By counting: query i sees as many keys as are before it and half itself, within the window.
    Where the first query is not given, queries have an even share of all pairs."""
    keys, queries = 32768, 8192
    seen = np.minimum(np.arange(keys) + 0.5, keys if window is None else window)
    for first in (0, 4096, keys - queries):
        core = Core(1, queries, keys, 1, 1, 1, 1, window, True, first)
        assert core.pairs == pytest.approx(seen[first : first + queries].sum(), rel=1e-12)
    even = Core(1, queries, keys, 1, 1, 1, 1, window)
    assert even.pairs == pytest.approx(seen.sum() * queries / keys, rel=1e-12)
    assert even._replace(causal=False).pairs == 2 * even.pairs


@pytest.mark.parametrize("kind", _KINDS)
def test_without_balance_the_last_rank_has_the_most(kind):
    """(2 c - 1) / c of an equal share, unless heads are dealt, or no key is masked."""
    uneven = ("training.cp_load_balance=false",)
    for causal in (True, False):
        even, found = (_lowered(kind, *more, causal=causal) for more in ((), uneven))
        ratio = (2 * _CP - 1) / _CP if causal and kind != "a2a" else 1
        for phase in ("forward", "backward"):
            parts = [getattr(work, phase) for work in (even, found)]
            flops = [flop_of(blocks, "attention") for blocks in parts]
            assert flops[1] == pytest.approx(ratio * flops[0], rel=1e-12)
            # Only the ranks of one tensor-parallel group are as late.
            members = {
                segment.members
                for segment, _ in parts[1][0]
                for kernels in (segment.kernels, *(one.compute for one in segment.branches))
                if any(kernel.kind == "attention" for kernel, _ in kernels)
            }
            assert members == ({_TP} if ratio > 1 else {None})


def _memory(job):
    return memory_of_stages(job_parts(job), (0,))[0]


def test_memory_kept_by_each_kind_of_context_parallelism():
    """A ring keeps what one rank would; what is put in another order is kept in both. Keys and
    values of other ranks are not kept; they are there again in a backward, with gradients."""
    found = {kind: _memory(_job(f"training.cp_comm_type={kind}")) for kind in _KINDS}
    kept = 2 * _TOKENS * (2 * _WIDTH + _KV)
    assert found["p2p"].kept["attention"] == 3 * kept
    for kind in ("all_gather", "a2a"):
        assert found[kind].kept["attention"] == 3 * (kept + 2 * _TOKENS * _WIDTH)
    job = _job()
    costs = job_parts(job)
    for kind, blocks in {"p2p": 2, "all_gather": _CP, "a2a": 0}.items():
        training = msgspec.structs.replace(costs.training, cp_comm_type=kind)
        own = msgspec.structs.replace(costs, training=training)
        buffers = make_module(job.model, "attention").buffers(own)
        assert buffers == 2 * 2 * blocks * _TOKENS * _KV


def test_a_context_is_whole_on_each_rank():
    """So cross-attention sends nothing, and each rank makes all of its keys and values."""
    work = _lowered("p2p", context_length=512)
    assert _sent(work.forward[0]) == {}
    assert _sent(work.backward[0]) == {}
    seen = {k.size: n for k, n in kernels_of(work.forward[0]).items() if k.kind == "attention"}
    assert seen == {f"bf16 1x{_HEADS // _TP}x{_TOKENS}x512x{_DIM} all forward": 3}


@pytest.mark.parametrize(
    ("overrides", "settings", "parts"),
    [
        (("training.cp_comm_type=a2a",), {"num_kv_heads": 4}, ["2*4", "`model.num_kv_heads` = 4"]),
        (("training.cp_comm_type=a2a",), {"num_heads": 4}, ["2*4", "`model.num_heads` = 4"]),
        ((), {"window": 512}, ["`window` = 512", '"all_gather"']),
    ],
)
def test_sizes_that_context_parallelism_cannot_split_are_refused(overrides, settings, parts):
    heads = {"num_kv_heads": 4} if "num_heads" in settings else {}
    settings = {"head_size": 128} | heads | settings
    message = refusal(lambda: lower_job(_job(*overrides, **settings)), "cp")
    for part in parts:
        assert part in message


@pytest.mark.parametrize(
    ("given", "kind"),
    [(None, None), ("a2a", "a2a"), ("allgather", "all_gather"), ("p2p p2p", "p2p")],
)
def test_arguments_of_megatron(given, kind):
    arguments = _SMALL | {"context-parallel-size": "2"}
    more = {} if given is None else {"cp-comm-type": given}
    read = megatron_reader({**arguments, **more})
    assert read_megatron(read, 8)["training"].get("cp_comm_type") == kind
    mixed = {**arguments, "cp-comm-type": "a2a p2p"}
    refusal(lambda: read_megatron(megatron_reader(mixed), 8), "`cp-comm-type` a2a p2p")
    del mixed["context-parallel-size"]
    assert read_megatron(megatron_reader(mixed), 8)["training"]["cp_comm_type"] == "p2p"
