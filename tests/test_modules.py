"""The modules of layers: what they compute, hold and send; one that is not the package's own."""

import dataclasses
import pathlib
from collections import Counter
from typing import Any

import msgspec
import pytest

import prism_jax as prism
from prism_jax.cluster import compute_latency
from prism_jax.data import Model, ScheduleConfig, load_job, load_model
from prism_jax.data._model import Layer
from prism_jax.lowering import job_parts
from prism_jax.workload import Block, Workload, block_mean, count_parameters, lower
from prism_jax.workload._block import weights_of
from prism_jax.workload.modules import AbstractModule, Parameters, make_module, modules
from prism_jax.workload.modules._gather import close_backward, close_module, open_module

from .helpers import flop_of, kernels_of, lower_job
from .test_module_laws import HYBRID, LAYOUTS


_DEALT = tuple(LAYOUTS[3].split())  # Experts are.


def _lowered(model: Model, overrides=(), **changes: Any) -> tuple[Any, Workload]:
    """The megatron-22b job with another model."""
    job = load_job("megatron-22b-a100-8", ("training.attention=flash", "layout.tp=2", *overrides))
    job = msgspec.structs.replace(job, model=model, **changes)
    return job, lower_job(job)


def _sent(blocks: tuple[Block, ...]) -> Counter:
    """How often each collective runs."""
    found = Counter()
    for block in blocks:
        for kernel, count in kernels_of(block).items():
            if kernel.link is not None:
                found[kernel.kind] += count
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_matrices_run_once_forward_and_twice_backward(layout):
    """Six times the parameters that work on a token, and what attention and scans add."""
    job, work = _lowered(HYBRID, layout.split())
    tokens = job.training.microbatch_size * job.training.sequence_length
    h, tp = 1024, job.layout.tp
    attention = h * 128 * (8 + 2 * 2) + h * h
    mla = h * (256 + 128 + 64) + 256 * 8 * 192 + 128 * 8 * 256 + h * 8 * 128
    inner = 32 * 64
    mamba = h * (2 * inner + 2 * 8 * 128 + 32) + inner * h
    mlp, expert = 3 * h * 4096, 3 * h * 512
    moe = 8 * h + (2 + 1) * expert
    matrices = 2 * (attention + mlp) + 3 * (mla + moe) + 3 * (mamba + mlp) + h * 32000
    seq, batch = job.training.sequence_length, job.training.microbatch_size
    core = batch * 8 * seq**2 * (2 * (128 + 128) + 3 * (192 + 128))
    core_back = batch * 8 * seq**2 * (2 * 5 * 128 + 3 * (3 * 192 + 2 * 128))
    scan = 3 * 2 * tokens * (8 * 128 * 128 + 32 * (128 * 64 + 2 * 128 * 64))
    forward = 2 * tokens * matrices + core + scan
    backward = 4 * tokens * matrices + core_back + 3 * scan
    assert tp * flop_of(work.forward) == pytest.approx(forward, rel=1e-6)
    assert tp * flop_of(work.backward) == pytest.approx(backward, rel=1e-6)


def test_tokens_go_to_their_experts_and_back():
    job, work = _lowered(HYBRID, _DEALT)
    training, layout = job.training, job.layout
    tokens = training.microbatch_size * training.sequence_length // layout.tp
    found = [k for k in kernels_of(work.forward[0]) if k.kind == "all_to_all"]
    assert [k.size.split()[:2] for k in found] == [[f"{2 * 2 * tokens * 1024}B", "ep4"]]
    assert _sent(work.forward)["all_to_all"] == _sent(work.backward)["all_to_all"] == 2 * 3
    # Gradients of experts are reduced over the two replicas of each, all others over four.
    groups = {k.size.split()[1] for k in kernels_of(work.reduce_scatter[0])}
    assert groups == {"dp4", "edp2"}


_FAR = ("layout.tp=1", "layout.dp=8", "layout.ep=8", "training.sequence_parallel=false")


def test_shared_experts_run_beside_the_way_to_the_others():
    """All of both is there, and what is shorter is hidden but for contention."""
    _, alone = _lowered(HYBRID, _FAR)
    _, beside = _lowered(HYBRID, (*_FAR, "training.overlap_shared_experts=true"))
    for phase in ("forward", "backward"):
        (one,), (other,) = getattr(alone, phase), getattr(beside, phase)
        assert kernels_of(one) == kernels_of(other)
        ((branches, times),) = ((s.branches[0], n) for s, n in other if s.branches)
        shared = sum(kernel.mean * count for kernel, count in branches.compute)
        ((sent, _),) = branches.communication[0]
        a, _ = branches.contention
        slower = max(shared + a / (1 + a) * sent.mean, sent.mean)
        saved = 3 * (shared + sent.mean - slower)
        assert times == 3
        assert saved > 0
        assert block_mean(one) - block_mean(other) == pytest.approx(saved, rel=1e-9)


def test_shared_experts_that_are_split_are_not_known_beside_others():
    split = ("layout.tp=2", "layout.dp=4", "layout.ep=4", "layout.etp=1")
    with pytest.raises(ValueError, match="overlap_shared_experts` = false"):
        _lowered(HYBRID, (*split, "training.overlap_shared_experts=true"))


def test_tokens_that_are_sent_once_are_permuted_once():
    """Two all_to_alls as before, shorter, and two permutations of four."""
    _, copies = _lowered(HYBRID, _DEALT)
    _, once = _lowered(HYBRID, (*_DEALT, "training.token_dispatcher=deepep"))
    for phase in ("forward", "backward"):
        one, other = (kernels_of(getattr(work, phase)[0]) for work in (copies, once))
        fewer = {kernel: n for kernel, n in (one - other).items() if kernel.link is None}
        ((permute, number),) = fewer.items()
        assert (permute.kind, number) == ("elementwise", 2 * 3)
        long, short = (
            next(k.mean for k in found if k.kind == "all_to_all") for found in (one, other)
        )
        assert short < long


@pytest.mark.parametrize(
    ("dispatcher", "graphs", "waits"),
    [("deepep", "none", 1), ("deepep", "iteration", 0), ("hybridep", "none", 0)],
)
def test_each_forward_of_deepep_waits_for_the_number_of_tokens(dispatcher, graphs, waits):
    names = (f"training.token_dispatcher={dispatcher}", f"training.cuda_graphs={graphs}")
    _, work = _lowered(HYBRID, (*_DEALT, *names))
    for block, number in ((work.forward[0], 3 * waits), (work.backward[0], 0)):
        found = kernels_of(block)
        assert sum(n for k, n in found.items() if k.size == "counts of tokens") == number


def test_grouped_products_are_as_efficient_as_one_of_them():
    job = load_job("megatron-22b-a100-8")
    costs = job_parts(job)
    one, many = costs.linear(2048, 4096, 2048), costs.linear(2048, 4096, 2048, groups=16)
    for kind in ("forward", "dgrad", "wgrad"):
        single, grouped = getattr(one, kind).mean, getattr(many, kind).mean
        overhead = 5e-6 * costs.kernels.compute
        assert grouped - overhead == pytest.approx(16 * (single - overhead), rel=1e-9)


def test_gradients_of_experts_are_added_in_float32():
    """With few tokens each, they take as long as their bytes: 8 of a gradient, 2 of a weight."""
    job = load_job("megatron-22b-a100-8")
    job = msgspec.structs.replace(job, model=load_model("mixtral-8x7b"))
    costs = job_parts(job)
    experts, single = costs.linear(1, 4096, 2048, groups=16), costs.linear(1, 4096, 2048)
    of_experts, of_one = weights_of(experts, single)
    assert of_experts.mean / experts.forward.mean == pytest.approx(4, rel=0.1)
    assert of_experts.mean / of_one.mean == pytest.approx(16, rel=0.1)


def test_scans_of_a_sequence_that_is_split():
    """Each rank has the whole sequence for a part of the heads: equal work, two exchanges."""
    model = msgspec.structs.replace(
        HYBRID,
        layers=(Layer(("mamba",), 3),),
        num_layers=3,
        modules={"mamba": {"mamba_num_heads": 32}},
    )
    (_, whole), (_, split) = (
        _lowered(model, (f"layout.cp={cp}", f"layout.dp={4 // cp}")) for cp in (1, 2)
    )
    for phase in ("forward", "backward"):
        assert flop_of(getattr(whole, phase)) == 2 * flop_of(getattr(split, phase))
        assert _sent(getattr(split, phase))["all_to_all"] == 2 * 3
        assert _sent(getattr(whole, phase))["all_to_all"] == 0


def test_the_last_chunk_of_a_scan_may_not_be_full():
    def scans(length):
        layers = {"layers": (Layer(("mamba",)),), "num_layers": 1}
        model = msgspec.structs.replace(
            HYBRID, **layers, modules={"mamba": {"mamba_num_heads": 32}}
        )
        _, work = _lowered(model, ("layout.tp=1", f"training.sequence_length={length}"))
        found = (k.size.split()[1] for k in kernels_of(work.forward[0]) if k.kind == "gemm")
        return [size for size in found if size.count("x") == 3]

    assert scans(200) == scans(256) != scans(128)


def test_shards_are_reduced_over_their_copies():
    options = ("training.zero=1", "training.overlap_grad_reduce=false", "layout.dp=4")
    (_, one), (_, two) = (
        _lowered(load_model("llama-3.1-8b"), (*options, f"training.optimizer_instances={n}"))
        for n in (1, 2)
    )
    sizes = [[k.size.split()[:2] for k in kernels_of(w.reduce_scatter[0])] for w in (one, two)]
    (whole, group), ((same, inner), (share, outer)) = sizes[0][0], sizes[1]
    assert (group, inner, outer) == ("dp4", "dp2", "dp-peers2")
    assert whole == same
    assert int(share[:-1]) == pytest.approx(int(whole[:-1]) / 2, rel=1e-9)


@pytest.mark.parametrize("overrides", [("layout.pp=2",), ("layout.pp=2", "layout.tp=2")])
def test_unequal_layers_are_dealt_in_order(overrides):
    overrides = ("layout.tp=1", *overrides, "schedule.layers_per_stage=[2,6]")
    _, work = _lowered(HYBRID, overrides)
    _, alone = _lowered(HYBRID, (*overrides[:1], *overrides[2:-1]))
    total: Counter = Counter()
    for block in work.forward:
        total += kernels_of(block)
    assert total == kernels_of(alone.forward[0])
    assert "all_to_all" not in _sent(work.forward)
    first, last = (kernels_of(block) for block in work.forward)
    assert {k.kind for k in first} != {k.kind for k in last}
    assert flop_of(work.forward[:1]) < 0.5 * flop_of(work.forward[1:])


def test_one_more_layer_predicts_the_word_after_next():
    more = msgspec.structs.replace(HYBRID, num_mtp_layers=1)
    assert count_parameters(more) == count_parameters(HYBRID)
    (before, work) = (_lowered(model, ("layout.tp=1",))[1] for model in (HYBRID, more))
    tokens, h = 4 * 2048, 1024
    mamba = h * (2 * 2048 + 2 * 8 * 128 + 32) + 2048 * h
    matrices = 2 * h * h + mamba + 3 * h * 4096 + h * 32000
    scan = 2 * tokens * (8 * 128 * 128 + 32 * 3 * 128 * 64)
    added = flop_of(work.forward) - flop_of(before.forward)
    assert added == pytest.approx(2 * tokens * matrices + scan, rel=1e-9)


def _latent(*overrides, number=3):
    """Layers of latent attention and nothing else."""
    layers = {"layers": (Layer(("mla",), number),), "num_layers": number}
    modules = {"mla": (HYBRID.modules or {})["mla"]}
    return _lowered(msgspec.structs.replace(HYBRID, **layers, modules=modules), overrides)[1]


def test_latents_are_gathered_once_more_in_the_backward():
    again = ("training.recompute=selective", "training.recompute_modules=['mla_up_proj']")
    for options, expected in ((("training.recompute=none",), (2, 1)), (again, (3, 2))):
        few, many = (_latent(*options, number=number) for number in (3, 4))
        for name, count in zip(("backward", "backward_input"), expected, strict=True):
            added = _sent(getattr(many, name)) - _sent(getattr(few, name))
            assert added["all_gather"] == count


def _elementwise(blocks: tuple[Block, ...]) -> int:
    """The bytes that elementwise kernels move."""
    found = (kernel for block in blocks for kernel in kernels_of(block).items())
    return sum(int(k.size[:-1]) * n for k, n in found if k.kind == "elementwise")


def test_inputs_of_latent_attention_are_cast_to_fp8():
    options = ("cluster=dgx-h100", "layout.tp=1")
    wide, narrow = (_latent(*options, f"training.dtype={dtype}") for dtype in ("bf16", "fp8"))
    read, made = 1024 + 256 + 128 + 8 * 128, 1024 + 8 * (192 + 256) + 448
    tokens = 3 * 4 * 2048
    assert _elementwise(narrow.forward) - _elementwise(wide.forward) == 3 * tokens * read
    assert _elementwise(narrow.backward) - _elementwise(wide.backward) == 4 * tokens * made


def test_gradients_of_keys_and_values_are_cast_for_the_context_that_they_are_of():
    tokens, context, width = 128, 512, 1024
    cross = {"kind": "attention", "causal": False, "context_length": context}
    layers = {"num_layers": 1, "layers": (Layer(("cross",)),), "modules": {"cross": cross}}
    model = msgspec.structs.replace(HYBRID, num_kv_heads=8, **layers)
    options = (f"training.sequence_length={tokens}", "training.microbatch_size=1", "layout.tp=1")
    both = [
        _lowered(model, ("cluster=dgx-h100", *options, f"training.dtype={dtype}"))[1].backward
        for dtype in ("bf16", "fp8")
    ]
    # Of queries and of the output; of keys and values.
    cast = tokens * 2 * width + context * 2 * width
    assert _elementwise(both[1]) - _elementwise(both[0]) == 4 * cast


def test_an_mlp_that_is_computed_again_is_gathered_and_scattered_again():
    again = ("training.recompute=selective", "training.recompute_modules=['mlp']")
    model = msgspec.structs.replace(HYBRID, layers=(Layer(("mlp",), 5),), num_layers=5)
    (_, plain), (_, work) = (
        _lowered(model, ("training.recompute=none", *more)) for more in ((), again)
    )
    tokens = 4 * 2048
    added = flop_of(work.backward) - flop_of(plain.backward)
    assert added == pytest.approx(5 * 2 * tokens * 3 * 1024 * 4096 / 2, rel=1e-12)
    sent = {"all_gather": 5, "reduce_scatter": 5}
    assert _sent(work.backward) - _sent(plain.backward) == Counter(sent)


def test_the_short_form_is_a_list_of_layers():
    short = load_model("llama-3.1-8b")
    long = msgspec.structs.replace(short, layers=(Layer(("attention", "mlp"), 32),))
    assert count_parameters(long) == count_parameters(short)
    overrides = ("layout.tp=2", "layout.pp=4")
    assert _lowered(short, overrides)[1] == _lowered(long, overrides)[1]


def test_windowed_attention_counts_the_pairs_in_its_band():
    window = msgspec.structs.replace(
        HYBRID,
        layers=(Layer(("attention",)),),
        num_layers=1,
        modules={"attention": {"window": 512}},
    )
    whole = msgspec.structs.replace(window, modules=None)
    options = ("training.sequence_length=4096", "layout.tp=1")
    job, _ = _lowered(window, options)
    # Pairs of query and key: a triangle, and the band after the window is full.
    pairs = [(window, 512**2 / 2 + (4096 - 512) * 512), (whole, 4096**2 / 2)]
    for model, count in pairs:
        found = kernels_of(_lowered(model, options)[1].forward[0])
        (kernel,) = (k for k in found if k.kind == "attention")
        flop = 4 * 8 * count * 2 * 2 * 128  # Sequences, heads, products, multiply and add.
        dtype = job.training.dtype
        mean = compute_latency("attention", dtype, flop, 0, job.cluster.device, job.kernels)
        assert kernel.mean == pytest.approx(mean, rel=1e-12)
        assert kernel.size.endswith("window512 forward") == (model is window)


@dataclasses.dataclass(frozen=True)
class Convolution(AbstractModule):
    """A causal convolution over the sequence, as a matrix multiplication of its taps."""

    kind = "toy-convolution"

    taps: int

    def check(self, model, layout, training):
        if self.taps > training.sequence_length:
            raise ValueError(f"`taps` = {self.taps} is more than the sequence has.")

    def parameters(self, model):
        return Parameters(self.taps * model.hidden_size**2)

    def _linear(self, costs):
        hidden = costs.model.hidden_size
        return costs.linear(costs.tokens, hidden // costs.layout.tp, self.taps * hidden)

    def forward(self, costs, before):
        linear = self._linear(costs)
        closed = close_module(costs, [linear.forward], linear.forward)
        return open_module(costs, before, linear.forward, closed)

    def backward(self, costs, before, *, weights=True):
        linear = self._linear(costs)
        closed = close_backward(costs, [], linear, weights)
        return open_module(costs, before, linear.dgrad, closed)

    def backward_weight(self, costs):
        from prism_jax.workload._parts import segment

        return [segment(weights_of(self._linear(costs)))]

    def activations(self, costs):
        return {"toy-convolution": 0.0}


def test_a_module_from_outside(written):
    """One class is enough: it is found by its kind, dealt, priced, counted, and simulated."""
    model = load_model(pathlib.Path(__file__).parent / "data/toy_model.toml")
    assert make_module(model, "short") == Convolution(4)
    without = msgspec.structs.replace(model, layers=(Layer(("attention", "mlp"), 4),))
    taps = 4 * 1024**2 + 2 * 1024  # With its norm.
    assert count_parameters(model) - count_parameters(without) == 4 * taps
    (job, work), (_, less) = (_lowered(m, ("layout.tp=2",)) for m in (model, without))
    tokens = job.training.microbatch_size * job.training.sequence_length
    for phase, passes in (("forward", 2), ("backward", 4)):
        added = 2 * (flop_of(getattr(work, phase)) - flop_of(getattr(less, phase)))
        assert added == pytest.approx(passes * tokens * 4 * 4 * 1024**2, rel=1e-12)
    program = prism.compile_job(job)
    assert program.num_ops == 2


def test_a_schedule_that_splits_backwards_runs_a_model():
    """On one rank, a backward in two parts is as long as its parts."""
    job, work = _lowered(HYBRID, ("layout.tp=1",))
    schedule = prism.CustomSchedule([["0F0", "0I0", "0W0"]], [0])
    parts = (job.model, job.layout, schedule, job.cluster)
    options = {"training": job.training, "kernels": job.kernels}
    program = prism.compile_program(*parts, **options)
    assert program.num_ops == 3
    config = ScheduleConfig(kind="1f1b", num_microbatches=1)
    assert lower(job_parts(msgspec.structs.replace(job, schedule=config)), (0,)) == work


def test_every_module_has_a_kind_and_a_docstring():
    for kind, cls in modules().items():
        assert cls.kind == kind
        assert cls.__doc__


def test_an_encoder_and_a_decoder_that_reads_it():
    """Products of weights count each stream by its own tokens, and pairs of query and key are
    those of the whole square."""
    encoder, decoder, hidden, ffn = 512, 128, 1024, 4096
    model = msgspec.structs.replace(
        HYBRID,
        num_kv_heads=8,
        activation="gelu",
        num_layers=5,
        layers=(
            Layer(("both", "mlp"), 2, sequence_length=encoder),
            Layer(("attention", "cross", "mlp"), 3),
        ),
        modules={
            "both": {"kind": "attention", "causal": False},
            "cross": {"kind": "attention", "causal": False, "context_length": encoder},
        },
    )
    options = ("training.sequence_length=128", "training.microbatch_size=1", "layout.tp=1")
    _, work = _lowered(model, options)
    pairs = {"8x512x512x128 all": 2, "8x128x512x128 all": 3, "8x128x128x128": 3}
    seen = {}
    for kernel, count in kernels_of(work.forward[0]).items():
        if kernel.kind == "attention":
            name = kernel.size.removeprefix("fp16 1x").removesuffix(" forward")
            seen[name] = count
    assert seen == pairs
    square, mlp = hidden * hidden, 2 * hidden * ffn
    products = 2 * encoder * (4 * square + mlp) + 3 * decoder * (4 * square + mlp)
    products += 3 * (2 * decoder + 2 * encoder) * square + decoder * hidden * 32000
    for blocks, times in ((work.forward, 2), (work.backward, 4)):
        assert flop_of(blocks, "gemm") == times * products


def test_attention_to_all_keys_is_twice_as_much():
    work = [
        _lowered(
            msgspec.structs.replace(HYBRID, num_layers=1, layers=(Layer(("both",)),), modules=m),
            ("training.sequence_length=16384", "layout.tp=1"),
        )[1]
        for m in ({"both": {"kind": "attention", "causal": c}} for c in (True, False))
    ]
    half, whole = (
        next(k.mean for k in kernels_of(one.forward[0]) if k.kind == "attention") for one in work
    )
    assert 1.8 < whole / half < 2.0  # Larger kernels are a little more efficient.
