"""Modules of models of 2025 and 2026: the products of their papers, and work that a tensor-parallel
group divides.
"""

from typing import Any, NamedTuple

import msgspec
import pytest

from prism_jax.data import Model, load_job
from prism_jax.data._model import Layer, check_model
from prism_jax.lowering import job_parts
from prism_jax.workload import count_parameters, widen
from prism_jax.workload._memory import memory_of_stages
from prism_jax.workload._model_flop import model_flop
from prism_jax.workload.modules import make_module

from .helpers import flop_of, kernels_of, lower_job, refusal, small_model
from .test_module_laws import ACTIVE, MODELS


_HIDDEN, _TOKENS, _LENGTH = 1024, 2 * 2048, 2048


def _lowered(table: dict[str, Any], *overrides: str, number: int = 1):
    """Of a model whose layers are one module."""
    return lower_job(_job(table, *overrides, number=number))


def _job(table: dict[str, Any], *overrides: str, number: int = 1):
    model = small_model(
        layers=(Layer(("one",), number),), num_layers=number, modules={"one": table}, bias=False
    )
    size = ("training.microbatch_size=2", f"training.sequence_length={_LENGTH}")
    job = load_job("megatron-22b-a100-8", ("training.attention=flash", *size, *overrides))
    return msgspec.structs.replace(job, model=model)


def _forward_flop(model: Model, length: int) -> float:
    """Of the forward of a sequence."""
    size = ("training.microbatch_size=1", f"training.sequence_length={length}", "layout.tp=1")
    keys = ("training.attention=flash", "training.forward_only=true")
    job = load_job("megatron-22b-a100-8", (*keys, *size))
    return model_flop(job_parts(msgspec.structs.replace(job, model=model)))


@pytest.mark.parametrize("name", ACTIVE)
def test_a_token_uses_as_many_parameters_as_their_makers_say(name):
    """Each is multiplied once; few tokens have next to no scores."""
    assert _forward_flop(MODELS[name], 8) / 8 / 2 == pytest.approx(ACTIVE[name], rel=0.05)


@pytest.mark.parametrize(("name", "share"), [("pro", 0.27), ("flash", 0.10)])
def test_compressed_keys_are_as_much_less_work_as_their_report_says(name, share):
    """The operations for one token behind 2^20 others, over those of DeepSeek-V3.2 (the report of
    DeepSeek-V4, section 1), which counts narrow dtypes as parts of operations.
    """
    length = 2**20

    def last(name: str) -> float:
        model = MODELS[f"deepseek-{name}"]
        return _forward_flop(model, length + 128) - _forward_flop(model, length)

    assert last(f"v4-{name}") / last("v3.2") == pytest.approx(share, abs=0.025)


_DELTA = {"kind": "gated-delta", "num_key_heads": 4, "num_value_heads": 8}
_CHANNELS = _DELTA | {"num_key_heads": 8, "gate_per_channel": True}
_HEADS = {"kind": "attention", "num_heads": 8, "num_kv_heads": 2, "head_size": 192}
# Of a token, in multiplications: the matrices; what the backward has three times (a scan), and in
# the ratio of five products to two (a core). A chunk has 64 tokens, heads 128 values.
_CHUNK = 8 * (3 * 64 * 128 + 2 * 64 * 128 + 64 * 16 + 3 * 128 * 128)
_PAIRS = 8 * _LENGTH / 2


class _Work(NamedTuple):
    table: dict[str, Any]
    matrices: float
    scan: float = 0
    core: float = 0
    core_back: float = 0


_WIDE, _NARROW = (2 * 192 * _PAIRS, 5 * 192 * _PAIRS), (320 * _PAIRS, (3 * 192 + 2 * 128) * _PAIRS)
_LIGHTNING = 8 * (2 * 256 * 128 + 2 * 128 * 128)
_RANKS = _CHANNELS | {"gate_rank": 128, "output_gate_rank": 64}
_VALUES = _HEADS | {"value_head_size": 128, "output_gate": "per_head"}
_MAMBA = {"kind": "mamba-1", "inner_size": 2048, "step_rank": 64}
_LATENTS = {"kind": "mla", "num_heads": 8, "kv_lora_rank": 256, "output_gate": True}
_MOE = {"kind": "moe", "latent_size": 256, "activation": "gelu"}
_MOE |= {"num_experts": 8, "top_k": 2, "expert_ffn_size": 512}
_WORK = {
    "gated delta": _Work(_DELTA, _HIDDEN * (2 * 512 + 3 * 1024 + 2 * 8), _CHUNK),
    "of full rank": _Work(_CHANNELS, _HIDDEN * (6 * 1024 + 8), _CHUNK),
    "of low rank": _Work(_RANKS, _HIDDEN * (4 * 1024 + 8 + 192) + 192 * 1024, _CHUNK),
    "short convolution": _Work({"kind": "short-convolution"}, 4 * _HIDDEN**2),
    "lightning attention": _Work(
        {"kind": "lightning-attention", "num_heads": 8}, 5 * _HIDDEN**2, _LIGHTNING
    ),
    "mamba": _Work(_MAMBA, 2048 * (3 * _HIDDEN + 64 + 2 * 16 + 64)),
    "gated attention": _Work(
        _HEADS | {"output_gate": True}, _HIDDEN * 192 * (3 * 8 + 2 * 2), 0, *_WIDE
    ),
    "narrow values": _Work(_VALUES, _HIDDEN * (320 * (8 + 2) + 8), 0, *_NARROW),
    "values that are keys": _Work(
        _HEADS | {"kv_matrices": 1}, _HIDDEN * 192 * (2 * 8 + 2), 0, *_WIDE
    ),
    "keys of another layer": _Work(_HEADS | {"kv_matrices": 0}, _HIDDEN * 192 * 2 * 8, 0, *_WIDE),
    "input of a layer": _Work({"kind": "per-layer-input", "input_size": 256}, 3 * _HIDDEN * 256),
    "gated latents": _Work(
        _LATENTS, _HIDDEN * (8 * 192 + 320 + 2 * 8 * 128) + 256 * 8 * 256, 0, *_NARROW
    ),
    "latent experts": _Work(_MOE, _HIDDEN * (8 + 2 * 256) + 2 * 2 * 256 * 512),
}


@pytest.mark.parametrize("name", _WORK)
def test_a_backward_has_two_products_for_each_of_the_forward(name):
    table, matrices, scan, core, core_back = _WORK[name]
    work = _lowered(table, "layout.tp=1")
    matrices += _HIDDEN * 32_000  # The head.
    forward = 2 * _TOKENS * (matrices + scan + core)
    backward = 2 * _TOKENS * (2 * matrices + 3 * scan + core_back)
    assert flop_of(work.forward) == pytest.approx(forward, rel=1e-12)
    assert flop_of(work.backward) == pytest.approx(backward, rel=1e-12)
    assert flop_of(work.backward_weight) == pytest.approx(2 * _TOKENS * matrices, rel=1e-12)


def test_scans_have_somewhat_more_products_than_megatron_lm_counts():
    """It counts four with a state for each token of a head, the least that any order needs."""
    counted = 8 * 4 * 128 * 128
    assert counted / _CHUNK == pytest.approx(0.72, abs=0.005)


# What each rank of a tensor-parallel group has all of: latents of gates.
_COPIED = {"of low rank": _HIDDEN * (128 + 64)}


@pytest.mark.parametrize("name", _WORK)
def test_a_tensor_parallel_group_divides_the_work(name):
    table, *_ = _WORK[name]
    whole, split = (_lowered(table, f"layout.tp={tp}") for tp in (1, 2))
    for phase, passes in (("forward", 2), ("backward", 4)):
        one, two = (flop_of(getattr(work, phase)) for work in (whole, split))
        copied = passes * _TOKENS * _COPIED.get(name, 0)
        assert 2 * two == pytest.approx(one + copied, rel=1e-9)


def _decoder(norms: tuple[int, ...] | None = None, **changes: Any) -> Model:
    layers = (Layer(("attention", "mlp"), 4, norms=norms),)  # pyright: ignore[reportArgumentType]
    return small_model(layers=layers, num_layers=4, modules={}, **changes)


def _of_model(model: Model, *overrides: str):
    job = load_job("megatron-22b-a100-8", ("layout.tp=2", *overrides))
    return lower_job(msgspec.structs.replace(job, model=model))


@pytest.mark.parametrize("norms", [(1, 0), (2, 2), (0, 1)])
def test_a_layer_has_as_many_norms_as_are_said(norms):
    """Each is a weight for each value, and moves as much."""
    usual, other = _decoder(), _decoder(norms)
    more = 4 * (sum(norms) - 2)
    assert count_parameters(other) - count_parameters(usual) == more * _HIDDEN
    moved = {
        name: [
            sum(int(k.size[:-1]) * n for k, n in kernels_of(block).items() if k.kind == "norm")
            for block in (work.forward[0], work.backward[0])
        ]
        for name, work in (("usual", _of_model(usual)), ("other", _of_model(other)))
    }
    # Four for a layer and one before the head, of which each has a part.
    for before, after in zip(moved["usual"], moved["other"], strict=True):
        assert after / before == pytest.approx(1 + more / 9, rel=1e-12)


@pytest.mark.parametrize(
    ("norm", "weights"),
    [("layernorm", 2), ("layernorm-without-bias", 1), ("rmsnorm", 1), ("without-weights", 0)],
)
def test_norms_have_the_weights_of_their_kind(norm, weights):
    none = count_parameters(_decoder(norm="without-weights"))
    assert count_parameters(_decoder(norm=norm)) - none == 9 * weights * _HIDDEN


def test_norms_are_said_for_each_module():
    refusal(lambda: check_model(_decoder((1,))), "1 `norms` for 2 modules")


@pytest.mark.parametrize("overrides", [(), ("training.forward_only=true",)])
def test_operations_of_a_model_have_only_the_gradients_that_an_indexer_has(overrides):
    """Those of the keys that it chose, and of its own matrices."""
    shared = {key: value for key, value in _SPARSE.items() if not key.startswith("index_n")}
    indexed, without = (model_flop(job_parts(_job(one, *overrides))) for one in (_SPARSE, shared))
    every, chosen = _LENGTH**2 / 2, 512 * _LENGTH - 512**2 / 2
    matrices = 2 * _TOKENS * (128 * 4 * 64 + _HIDDEN * (64 + 4))
    forward, backward = matrices + 2 * 2 * 4 * 64 * every, matrices + 2 * 2 * 2 * 4 * 64 * chosen
    expected = forward if overrides else forward + backward
    assert indexed - without == pytest.approx(expected, rel=1e-9)


def test_streams_are_mixed_around_each_module():
    """A matrix of 4 * 6 columns reads four streams; they are sent to the next stage, and kept."""
    one, four = (_decoder(hyper_connections=n) for n in (1, 4))
    mixing, summed = 4 * 6 * (4 * _HIDDEN + 1) + 3, 4 * (4 * _HIDDEN + 1) + 1
    assert count_parameters(four) - count_parameters(one) == 8 * mixing + summed
    tokens = 4 * 2048
    single, several = (_of_model(model, "layout.tp=1", "layout.pp=2") for model in (one, four))
    products = 8 * 4 * 6 * 4 * _HIDDEN + 4 * 4 * _HIDDEN
    for phase, times in (("forward", 2), ("backward", 4), ("backward_weight", 2)):
        more = flop_of(getattr(several, phase)) - flop_of(getattr(single, phase))
        assert more == pytest.approx(times * tokens * products, rel=1e-9)
    sent = [int(work.send_recv[0, 1].size.split("B")[0]) for work in (single, several)]
    assert sent[1] == 4 * sent[0]


_SPARSE = {"kind": "mla", "num_heads": 8, "kv_lora_rank": 256, "q_lora_rank": 128}
_SPARSE |= {"index_top_k": 512, "index_num_heads": 4, "index_head_size": 64}


def test_an_indexer_scores_all_keys_and_attention_reads_the_best():
    """It learns by a loss of its own over these, so that its matrices' input has no gradient."""
    dense = {key: value for key, value in _SPARSE.items() if not key.startswith("index")}
    table = [dense, _SPARSE, dense | {"index_top_k": 512}]
    usual, indexed, shared = (_lowered(one, "layout.tp=1") for one in table)
    every, chosen = _LENGTH**2 / 2, 512 * _LENGTH - 512**2 / 2
    # Of two sequences: heads of 192 and 128 values, or in latents of 256 and 64.
    assert flop_of(shared.forward) - flop_of(usual.forward) == pytest.approx(
        2 * 2 * 8 * ((320 + 256) * chosen - (192 + 128) * every), rel=1e-9
    )
    assert flop_of(shared.backward) - flop_of(usual.backward) == pytest.approx(
        2 * 2 * 8 * ((3 * 320 + 2 * 256) * chosen - (3 * 192 + 2 * 128) * every), rel=1e-9
    )
    matrices = 2 * _TOKENS * (128 * 4 * 64 + _HIDDEN * (64 + 4))
    forward = matrices + 2 * 2 * 4 * 64 * every
    backward = matrices + 2 * 2 * 2 * 4 * 64 * chosen
    assert flop_of(indexed.forward) - flop_of(shared.forward) == pytest.approx(forward, rel=1e-9)
    assert flop_of(indexed.backward) - flop_of(shared.backward) == pytest.approx(backward, rel=1e-9)
    # Each rank of a tensor-parallel group has all of the indexer.
    both = [_lowered(one, "layout.tp=2") for one in (_SPARSE, dense | {"index_top_k": 512})]
    assert flop_of(both[0].forward) - flop_of(both[1].forward) == pytest.approx(forward, rel=1e-9)


@pytest.mark.parametrize("kind", ["window", "many tokens", "few tokens"])
def test_compressed_attention_has_the_products_of_its_report(kind):
    """Two of each of its cores forward and five backward; of the indexer, as above."""
    heads, size, latent, groups, rank = 8, 64, 128, 4, 96
    table = {"kind": "compressed-attention", "num_heads": heads, "head_size": size}
    table |= {"q_lora_rank": latent, "num_output_groups": groups, "output_rank": rank}
    table |= {"qk_rope_head_size": 32, "window": 256}
    pairs, made = 256 * _LENGTH - 256**2 / 2, 0
    index = chosen = every = 0.0
    if kind == "many tokens":
        table["compress_ratio"], made = 128, 2 * size
        pairs += _LENGTH**2 / 2 / 128
    elif kind == "few tokens":
        table |= {"compress_ratio": 4, "index_num_heads": 4, "index_head_size": 32}
        table["index_top_k"], made = 64, 4 * size
        every, chosen = _LENGTH**2 / 2 / 4, 4 * (64 * _LENGTH / 4 - 64**2 / 2)
        pairs += chosen
        index = latent * 4 * 32 + _HIDDEN * (4 * 32 + 4)
    shared = _HIDDEN * (latent + size + made)
    split = heads * size * (latent + rank) + groups * rank * _HIDDEN + _HIDDEN * 32_000
    cores, scores = heads * 2 * size * pairs, 4 * 32
    for tp in (1, 2):
        work = _lowered(table, f"layout.tp={tp}")
        matrices = _TOKENS * (shared + split / tp)
        forward = matrices + _TOKENS * index + 2 * (cores / tp + scores * every)
        backward = 2 * matrices + _TOKENS * index + 2 * (2.5 * cores / tp + 2 * scores * chosen)
        assert flop_of(work.forward) == pytest.approx(2 * forward, rel=1e-9)
        assert flop_of(work.backward) == pytest.approx(2 * backward, rel=1e-9)


def test_queries_of_compressed_attention_are_made_again():
    again = ("training.recompute=selective", "training.recompute_modules=['mla_up_proj']")
    works = [
        _lowered(_COMPRESSED, "layout.tp=1", *more)
        for more in (("training.recompute=none",), again)
    ]
    plain, other = (flop_of(work.backward) for work in works)
    assert other - plain == pytest.approx(2 * _TOKENS * 128 * 8 * 64, rel=1e-9)


_COMPRESSED = {"kind": "compressed-attention", "num_heads": 8, "head_size": 64}
_COMPRESSED |= {"q_lora_rank": 128, "num_output_groups": 4, "output_rank": 96}


@pytest.mark.parametrize(
    ("table", "words"),
    [
        (_COMPRESSED | {"num_output_groups": 3}, "`num_output_groups` = 3 does not divide"),
        (_COMPRESSED | {"index_top_k": 64}, "neither of the first two"),
        (_COMPRESSED | {"index_top_k": 64, "index_num_heads": 4}, "neither of the first two"),
        (_COMPRESSED | {"cp": 2}, "`layout.cp` = 2"),
        (_HEADS | {"kv_matrices": 1, "value_head_size": 128}, "leave it out"),
        (_SPARSE | {"index_top_k": None}, "give `index_top_k`"),
        (_SPARSE | {"cp": 2, "how": "p2p"}, "all_gather"),
        (_SPARSE | {"cp": 2, "how": "a2a"}, "all_gather"),
    ],
)
def test_attention_that_cannot_be_is_refused(table, words):
    """Heads share chosen keys, and the steps of a ring would have unequal work."""
    cp, how = table.get("cp", 1), table.get("how", "all_gather")
    table = {key: value for key, value in table.items() if key not in ("cp", "how")}
    split = (f"layout.cp={cp}", f"layout.dp={3 - cp}", f"training.cp_comm_type={how}")
    refusal(lambda: _lowered(table, "layout.tp=1", *split), words)


def test_chosen_keys_are_gathered_in_a_context_parallel_group():
    works = [
        _lowered(_SPARSE, "layout.tp=1", f"layout.cp={n}", "training.cp_comm_type=all_gather")
        for n in (1, 2)
    ]
    whole, half = (flop_of(work.forward) for work in works)
    assert whole == pytest.approx(2 * half, rel=1e-9)


def test_narrow_values_of_mamba_are_summed_over_a_tensor_parallel_group():
    work = _lowered(_WORK["mamba"][0], "layout.tp=2", "training.sequence_parallel=false")
    for block in (work.forward[0], work.backward[0]):
        sizes = {k.size.split()[0]: n for k, n in kernels_of(block).items() if k.link is not None}
        assert sizes[f"{2 * _TOKENS * (64 + 2 * 16)}B"] == 1


def test_a_context_parallel_group_divides_scans():
    for name in ("gated delta", "lightning attention", "short convolution"):
        table = _WORK[name][0]
        works = [_lowered(table, "layout.tp=1", f"layout.cp={n}", "layout.dp=2") for n in (1, 2)]
        for phase in ("forward", "backward"):
            whole, split = (flop_of(getattr(work, phase)) for work in works)
            assert whole == pytest.approx(2 * split, rel=1e-12)


def _kept(table: dict[str, Any], tp: int) -> tuple[float, int]:
    """The bytes that a module keeps on a rank, and the tokens."""
    module = make_module(small_model(layers=(), modules={"one": table}), "one")
    options = ("training.microbatch_size=2", "training.attention=flash", f"layout.tp={tp}")
    job = load_job("megatron-22b-a100-8", options)
    costs = job_parts(msgspec.structs.replace(job, model=small_model()))
    return sum(module.activations(costs).values()), 2 * costs.training.sequence_length


@pytest.mark.parametrize(
    ("name", "values"),
    [
        # What the first matrix makes, the convolution, the scan, and what is gated and normed.
        ("gated delta", 2 * 512 + 2 * 1024 + 16 + 2 * 512 + 1024 + 2 * 1024),
        ("short convolution", 6 * _HIDDEN),
        ("lightning attention", 6 * _HIDDEN),
        # The gate, which an activation changes, the input, and their product.
        ("input of a layer", 4 * 256),
        # Queries, keys and values, the gate, and the output before and after it.
        ("gated attention", 192 * (8 + 2 * 2 + 8 + 2 * 8)),
    ],
)
def test_modules_keep_what_they_make(name, values):
    for tp in (1, 2):
        size, tokens = _kept(_WORK[name][0], tp)
        assert size == pytest.approx(2 * tokens * values / tp, rel=1e-9)


def test_streams_are_kept_for_each_module():
    """Its input and output besides all streams, where there are several."""
    job = load_job("megatron-22b-a100-8", ("layout.tp=1", "training.recompute=none"))
    states = job_parts(job).tokens * _HIDDEN

    def norms(streams: int) -> float:
        model = _decoder(hyper_connections=streams)
        (stage,) = memory_of_stages(job_parts(msgspec.structs.replace(job, model=model)), (0,))
        return stage.kept["norm"]

    assert norms(1) == 2 * 8 * 2 * states
    assert norms(4) == 2 * 8 * (2 + 4 + 1) * states


def test_the_inner_width_of_mamba_grows_with_the_width():
    layers, table = (Layer(("mamba-1",), 2),), {"inner_size": 2 * _HIDDEN, "step_rank": 64}
    narrow = small_model(vocab_size=1000, layers=layers, modules={"mamba-1": table})
    wide = widen(narrow, 4 * count_parameters(narrow))
    assert wide.hidden_size > 1.9 * _HIDDEN
    assert (wide.modules or {})["mamba-1"]["inner_size"] == 2 * wide.hidden_size
