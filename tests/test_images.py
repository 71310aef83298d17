"""Models of images: published sizes of U-Nets, FLUX.1 and diffusion transformers, closed forms of
convolutions and of streams, encoders that are not trained, and shares of time.
"""

import math
from collections import Counter
from typing import Any

import jax.numpy as jnp
import msgspec
import numpy as np
import pytest
from msgspec.structs import replace

import prism_jax as prism
from prism_jax.data import load_job, load_model
from prism_jax.data._kernels import Efficiency
from prism_jax.data._model import Layer, Model
from prism_jax.lowering import job_parts
from prism_jax.measure._calls import _convolution
from prism_jax.prediction import class_of
from prism_jax.workload import Costs, count_parameters
from prism_jax.workload._block import weights_of
from prism_jax.workload._split import balanced_layers
from prism_jax.workload.modules import Convolution, ResNetBlock, StreamBlock
from prism_jax.workload.modules._convolution import convolve
from prism_jax.workload.modules._core import Core

from .helpers import flop_of, kernels_of, lower_job, refusal


_UNET, _FLUX, _VIDEO = "stable-diffusion-2-a100-8", "flux1-gb300-72", "latte-xl-2-a100-8"
_WIDTHS, _PIXELS = (320, 640, 1280, 1280), (4096, 1024, 256, 64)


def _costs(*overrides: str) -> Costs:
    job: Any = load_job(_UNET, overrides)
    return job_parts(job)


def _without_encoder(job: Any) -> Any:
    layers = tuple(layer for layer in job.model.layers if not layer.frozen)
    return replace(job, model=replace(job.model, layers=layers, num_layers=0))


@pytest.mark.parametrize(("context", "published"), [(1024, 865_910_724), (768, 859_520_964)])
def test_the_unet_has_the_published_parameters(context, published):
    """Of Stable Diffusion 2 and of 1, whose texts are narrower; and the biases of the queries, keys
    and values of two modules in five blocks of 320 and 640 channels and in six of 1280."""
    words = (f"model.modules.text_{width}.context_size={context}" for width in (320, 640, 1280))
    job: Any = load_job(_UNET, tuple(words))
    assert count_parameters(job.model) == published + 2 * 3 * (5 * 320 + 5 * 640 + 6 * 1280)


def test_convolutions_of_a_unet_have_the_operations_of_their_pixels():
    """Each of the two in a block, those of one pixel where channels change or in a transformer,
    and those that halve and double; written out once more from the structure."""
    per_image = 9 * 4096 * (4 * 320 + 320 * 4)
    entering, before = [320], 320
    for level, (width, pixels) in enumerate(zip(_WIDTHS, _PIXELS, strict=True)):
        for _ in range(2):
            per_image += pixels * (9 * before * width + 9 * width**2)
            per_image += pixels * (before * width * (before != width) + 2 * width**2 * (level < 3))
            before = width
            entering.append(width)
        if level < 3:
            per_image += 9 * width**2 * pixels // 4
            entering.append(width)
    per_image += 64 * (4 * 9 + 2) * 1280**2
    for level in (3, 2, 1, 0):
        width, pixels = _WIDTHS[level], _PIXELS[level]
        for _ in range(3):
            joined = before + entering.pop()
            per_image += pixels * (10 * joined * width + 9 * width**2)
            per_image += pixels * 2 * width**2 * (level < 3)
            before = width
        per_image += 9 * width**2 * 4 * pixels * (level > 0)
    job = load_job(_UNET, ("training.microbatch_size=3",))
    work = lower_job(job)
    forward = 2 * 3 * per_image
    found = [
        flop_of(one, "convolution")
        for one in (work.forward, work.backward, work.backward_input, work.backward_weight)
    ]
    assert found == [forward, 2 * forward, forward, forward]


def test_a_convolution_is_as_fast_as_its_product_or_as_measured():
    costs = _costs()
    linear = convolve(costs, 640, 320)
    (pixels, batch), peak = (32 * 4096, 32), costs.cluster.device.peak_flop_per_s["bf16"]
    product = costs.gemm(pixels, 640, 9 * 320, "bf16")
    for kernel in (linear.forward, linear.dgrad, *weights_of(linear)):
        assert (kernel.flop, kernel.mean) == (product.flop, product.mean)
        assert kernel.size.startswith(f"bf16 {batch}x4096x640x320 3x3/1 ")
    table = Efficiency("convolution", "bf16", (1e9, 1e12), (0.25, 0.25), 1e-5)
    measured = replace(costs.kernels, efficiency=(*costs.kernels.efficiency, table))
    slower = convolve(replace(costs, kernels=measured), 640, 320).forward
    expected = costs.kernels.compute * (product.flop / (0.25 * peak) + 1e-5)
    assert slower.mean == pytest.approx(expected, rel=1e-12)


def test_few_channels_take_as_long_as_their_bytes():
    """Of four channels in and out: two images in 16 bits, four times as large where they are read
    with a stride of two, and the weights."""
    costs = _costs()
    pixels = costs.tokens
    moving: Any = costs.kernels.find_efficiency("elementwise", "")
    gemm: Any = costs.kernels.find_efficiency("gemm", "bf16")
    rate = costs.cluster.device.memory_bandwidth_bytes_per_s * moving.values[-1]
    for stride in (1, 2):
        kernel = convolve(costs, 4, 4, 1, stride).forward
        seconds = (2 * 4 * pixels * (stride**2 + 1) + 2 * 16) / rate + gemm.latency_s
        assert kernel.mean == pytest.approx(costs.kernels.compute * seconds, rel=1e-12)


def test_layers_of_another_width_are_those_of_a_model_of_that_width():
    words = ("training.attention=flash", "layout.tp=1", "layout.dp=8")
    job: Any = load_job("megatron-22b-a100-8", words)
    model = replace(job.model, num_heads=8, ffn_size=2048, num_layers=0)
    found = []
    for width, own in ((512, None), (4096, 512)):
        layers = (Layer(("attention", "mlp"), 3, hidden_size=own),)
        changed = replace(model, hidden_size=width, layers=layers)
        kernels = kernels_of(lower_job(replace(job, model=changed)).backward[0]).items()
        # The ends of the model run once, and are as wide as it is.
        found.append({kernel: n // 3 for kernel, n in kernels if n >= 3})
    assert found[0] == found[1]
    assert {kernel.kind for kernel in found[0]} >= {"gemm", "norm", "attention"}


def _with_layers(*layers: Layer, **layout: int) -> Any:
    """A dense job of these layers on eight GPUs, of which each has a replica."""
    given = {"tp": 1, "pp": 1, "dp": 8} | layout
    words = [f"layout.{name}={number}" for name, number in given.items()]
    job: Any = load_job("megatron-22b-a100-8", ("training.attention=flash", *words))
    sizes = {"hidden_size": 512, "num_heads": 8, "ffn_size": 2048, "num_layers": 0}
    return replace(job, model=replace(job.model, layers=layers, **sizes))


def test_stages_of_several_widths_are_refused():
    layers = tuple(Layer(("attention", "mlp"), 2, hidden_size=width) for width in (512, 1024))
    lower_job(_with_layers(*layers))
    lower_job(_with_layers(layers[0], pp=2, dp=4))
    with pytest.raises(ValueError, match=r"`layout.pp` is 2, .* 512 and 1024, .* `pp = 1`"):
        lower_job(_with_layers(*layers, pp=2, dp=4))


@pytest.mark.parametrize("width", [256, 512, 1024])
def test_the_widest_layer_has_the_largest_gathered_input(width):
    job = _with_layers(Layer(("attention", "mlp"), hidden_size=width), tp=2, dp=4)
    job = replace(job, training=replace(job.training, sequence_parallel=True))
    tokens = job.training.microbatch_size * job.training.sequence_length
    found = prism.memory(job).ranks[0].parts["communication"]
    assert found == 2 * tokens * max(width, 512)


def test_stages_are_balanced_by_the_widths_of_layers():
    """A layer of half the width has a quarter of the parameters: 3 * 4 beside 2 * 4 + 5."""
    layers = tuple(Layer(("attention", "mlp"), 5, hidden_size=width) for width in (1024, 512))
    sizes = {"hidden_size": 512, "vocab_size": 1, "num_heads": 8, "bias": False}
    model = Model(layers=layers, modules={"mlp": {"ffn_size": 1}}, **sizes)
    assert balanced_layers(model, 2) == (3, 7)


@pytest.mark.parametrize(("frozen", "layers"), [(12, (12, 4)), (6, (8, 4)), (24, (21, 9))])
def test_stages_are_balanced_by_the_passes_of_layers(frozen, layers):
    """A frozen layer runs a third: 12 / 3 beside 4; 6 / 3 + 2 beside 4; 21 / 3 beside 3 / 3 + 6."""
    trained = sum(layers) - frozen
    both = ((frozen, True), (trained, False))
    job = _with_layers(*(Layer(("attention", "mlp"), n, frozen=one) for n, one in both))
    model = replace(job.model, vocab_size=1, num_layers=sum(layers))
    assert balanced_layers(model, 2) == layers


def _moved(kernels: Any) -> dict[str, float]:
    found: Counter[str] = Counter()
    for kernel in kernels:
        if kernel.flop == 0:
            found[kernel.kind] += int(kernel.size.removesuffix("B"))
    return dict(found)


@pytest.mark.parametrize("backward", [False, True])
def test_bytes_of_elementwise_kernels_in_a_unet_block(backward):
    """In 16 bits: norms read twice and write, and their gradients read two tensors twice and write
    one; a SiLU reads and writes; 320 + 640 channels are joined to 320; time and a residual are
    added. What a convolution of one pixel does besides is its norm and its residual."""
    costs = _costs("training.microbatch_size=2")
    pixels = 2 * 4096
    norm, silu = (10, 6) if backward else (6, 4)
    block = ResNetBlock(in_channels=320, skip_channels=640, time_size=1280)
    assert _moved(block.moved(costs, backward=backward)) == {
        "norm": norm * pixels * (960 + 320),
        "elementwise": pixels * (silu * (960 + 320) + 4 * 960 + 4 * 320 + 6 * 320),
    }
    one = Convolution(kernel_size=1, group_norm=True, residual=True)
    assert _moved(one.moved(costs, backward=backward)) == {
        "norm": norm * pixels * 320,
        "elementwise": 6 * pixels * 320,
    }
    alone = Convolution(silu=True)
    assert _moved(alone.moved(costs, backward=backward)) == {"elementwise": silu * pixels * 320}
    # Of 4096 pixels 1024 are read, or their gradients written.
    double = Convolution(upsample=True).moved(costs, backward=backward)
    assert _moved(double) == {"elementwise": 2 * 2 * (4096 + 1024) * 320}
    assert block.activations(costs) == {"convolution": 2 * 3 * pixels * (960 + 320)}


@pytest.mark.parametrize("text", [None, 100])
@pytest.mark.parametrize("backward", [False, True])
def test_bytes_of_elementwise_kernels_in_a_flux_block(text, backward):
    """In MXFP8, the input of each matrix is cast, or the gradient of its output, besides what it
    is in bf16; both streams of a double block together have as many tokens as one."""
    width, ffn, tokens = 64, 256, 2 * 300
    found = []
    for dtype in ("bf16", "mxfp8"):
        words = (
            f"training.dtype={dtype}",
            "training.sequence_length=300",
            "training.scaling=delayed",
        )
        job: Any = load_job(
            _FLUX, (*words, "training.microbatch_size=2", f"model.hidden_size={width}")
        )
        costs = job_parts(job)
        block = StreamBlock(4, ffn, text)
        found.append(_moved(block.moved(costs, backward=backward)))
    streams, passes = (2 if text else 1), (3 if backward else 2)
    assert found[0]["norm"] == tokens * width * 2 * passes * (streams + 2)
    joined = 12 * width if text else 4 * (width + ffn)
    besides = (12 if backward else 8) * streams * width + 8 * width + joined
    besides += (6 if backward else 4) * ffn + 6 * streams * width
    assert found[0]["elementwise"] == tokens * besides
    # Queries, keys and values, their output, and the two of the MLP; in a single block of two.
    inputs = 3 * width + ffn if text else 2 * width + ffn
    outputs = 5 * width + ffn if text else 4 * width + ffn
    cast = 4 * outputs if backward else 3 * inputs
    assert found[1]["elementwise"] - found[0]["elementwise"] == tokens * cast


def test_an_encoder_runs_forward_only():
    job: Any = load_job(_UNET)
    bare = _without_encoder(job)
    whole, without = lower_job(job), lower_job(bare)
    tokens, width = 32 * 77, 1024
    # Attention of 77 causal tokens, and matrices of 12 widths squared.
    pairs = 32 * (77 * 77 - 77 * 77 / 2)
    encoder = 23 * (2 * tokens * 12 * width**2 + 2 * 2 * pairs * width)
    more = flop_of(whole.forward) - flop_of(without.forward)
    assert more == pytest.approx(encoder, rel=1e-9)
    assert whole.backward == without.backward
    assert whole.backward_weight == without.backward_weight
    assert whole.reductions == without.reductions
    optimizers = [
        {k.size for k in kernels_of(work.tail) if k.kind == "optimizer"}
        for work in (whole, without)
    ]
    assert optimizers[0] == optimizers[1]
    parts, others = (prism.memory(one).ranks[0].parts for one in (job, bare))
    held = 23 * (12 * width**2 + 9 * width + 2 * 2 * width)
    assert parts.pop("frozen") == 2 * held
    assert parts == others


def test_frozen_layers_do_the_model_flop_of_one_forward():
    """Of the rest it is thrice the forward, as without the encoder; and utilisation follows."""
    job: Any = load_job(_UNET)
    bare = _without_encoder(job)
    whole, without = (flop_of(lower_job(one).forward) for one in (job, bare))
    step = prism.predict(job)
    flop = step.flop_per_s * step.mean
    assert flop == pytest.approx(whole + 2 * without, rel=1e-12)
    assert step.mfu == step.flop_per_s / job.cluster.device.peak_flop_per_s["bf16"]


def _half_frozen(frozen: bool = True, *, width: int | None = None, **layout: int) -> Any:
    sizes = {"repeat": 4, "hidden_size": width}
    layers = [Layer(("attention", "mlp"), frozen=one, **sizes) for one in (frozen, False)]
    return _with_layers(*layers, **layout)


def _tied(job: Any, tied: bool) -> Any:
    return replace(job, model=replace(job.model, tied_embeddings=tied))


def test_no_gradient_comes_back_to_an_embedding_below_frozen_layers():
    frozen, trained = (lower_job(_half_frozen(one)) for one in (True, False))
    kinds = [{k.kind for k in kernels_of(one.backward[0])} for one in (frozen, trained)]
    assert kinds[1] - kinds[0] == {"embedding"}
    # Layers of another width cannot read it.
    beside = lower_job(_half_frozen(width=1024))
    assert "embedding" in {k.kind for k in kernels_of(beside.backward[0])}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("pp", [1, 2])
def test_frozen_and_trained_parameters_are_all_of_a_model(tied, pp):
    held = []
    for frozen in (True, False):
        job = _tied(_half_frozen(frozen, pp=pp, dp=8 // pp), tied)
        ranks = [rank.parts for rank in prism.memory(job).ranks]
        held.append([rank.get("parameters", 0.0) + rank.get("frozen", 0.0) for rank in ranks])
        if pp == 1:
            assert count_parameters(job.model) == ranks[0]["parameters"] / 2
    assert held[0] == held[1]


def test_frozen_experts_are_shared_as_trained_ones_are():
    experts = {"num_experts": 8, "top_k": 2, "expert_ffn_size": 512}
    held = []
    for ep in (1, 2):
        layers = (Layer(("attention", "moe"), frozen=True), Layer(("attention", "mlp")))
        job = _with_layers(*layers, ep=ep)
        job = replace(job, model=replace(job.model, modules={"moe": experts}))
        assert class_of(job)[0] == "experts"
        lower_job(job)
        held.append(prism.memory(job).ranks[0].parts["frozen"])
    assert held[0] - held[1] == 2 * 4 * 2 * (512 + 1) * 512  # Four experts of two matrices.


def test_frozen_tables_have_no_moment():
    job: Any = load_job("dlrm-dcnv2-gb300-64")
    layers = tuple(replace(layer, frozen=True) for layer in job.model.layers)
    frozen = replace(job, model=replace(job.model, layers=layers))
    whole, values = (prism.memory(one).ranks[0].parts for one in (job, frozen))
    assert class_of(frozen)[:-1] == class_of(job)[:-1]  # Tables are still tables.
    assert "tables" not in values
    rest = whole["parameters"] - values["parameters"]
    assert values["frozen"] - rest == pytest.approx(whole["tables"] / 2, rel=1e-12)


def test_a_frozen_stage_has_no_backward_and_gets_no_gradient():
    for pp, stages in ((2, 1), (4, 2)):
        job = _half_frozen(pp=pp, dp=8 // pp)
        work = lower_job(job)
        assert [bool(block) for block in work.backward] == [False] * stages + [True] * stages
        back = {(b, b - 1) for b in range(stages + 1, pp)}
        assert set(work.send_recv) == {(a, a + 1) for a in range(pp - 1)} | back
        frozen, trained = (
            prism.predict(one) for one in (job, _half_frozen(False, pp=pp, dp=8 // pp))
        )
        assert frozen.mean < trained.mean
        assert frozen.mfu < 1


def test_an_encoder_that_is_trained_costs_more():
    job: Any = load_job(_UNET)
    trained = tuple(replace(layer, frozen=False) for layer in job.model.layers)
    model = replace(job.model, layers=trained)
    frozen, whole = lower_job(job), lower_job(replace(job, model=model))
    more = flop_of(whole.backward, "gemm") - flop_of(frozen.backward, "gemm")
    assert more == 23 * 2 * 2 * 32 * 77 * 12 * 1024**2
    assert count_parameters(model) > count_parameters(job.model)


def test_blocks_of_flux_have_the_operations_of_their_matrices():
    """Each token passes through 12 squares of the hidden size in a block of either kind, and a
    vector for each image through those of modulation; both halves see all tokens."""
    job: Any = load_job(_FLUX)
    hidden, batch, tokens = 3072, 32, 512
    work = lower_job(job)
    matrices = (19 + 38) * tokens * 12 * hidden**2 + (19 * 2 * 6 + 38 * 3) * hidden**2
    ends = tokens // 2 * (4096 + 64 + 64) * hidden + (256 + 768 + 2 * hidden) * hidden
    ends += 2 * hidden**2
    forward = flop_of(work.forward, "gemm")
    assert forward == 2 * batch * (matrices + ends)
    # Nothing needs the gradient of the patches.
    backward = 2 * forward - 2 * batch * tokens // 2 * 64 * hidden
    assert flop_of(work.backward, "gemm") == backward
    core = 2 * 2 * batch * 57 * tokens**2 * hidden
    assert flop_of(work.forward, "attention") == core
    assert flop_of(work.backward, "attention") == 5 / 2 * core


def test_short_sequences_fill_a_tile():
    """Sixteen queries and keys compute as much as the 128 queries and 64 keys of a tile."""
    costs = _costs()
    for backward in (False, True):
        core = Core(256, 16, 16, 16, 16, 72, 72, causal=False)
        (kernel,) = core.kernels(costs, backward=backward)
        assert kernel.flop == 2 * 256 * 16 * 16 * 16 * 72 * (5 if backward else 2)
        whole = costs.attention("", 8 * 4 * kernel.flop, 0, backward=backward)
        assert kernel.mean == pytest.approx(whole.mean, rel=1e-12)
    long = Core(1, 128, 64, 16, 16, 72, 72, causal=False).kernels(costs, backward=False)[0]
    assert long.mean == costs.attention("", long.flop, 2 * 16 * 192 * 144, backward=False).mean


def test_convolutions_are_the_largest_part_of_a_unet():
    """Golden et al. 2023 (arXiv:2312.14385) measured up to 44 % with fused attention, and less
    without, as attention then takes more."""
    shares = []
    for attention in ("flash", "unfused"):
        words = ("training.forward_only=true", f"training.attention={attention}")
        found = prism.predict(load_job(_UNET, (*words, "training.microbatch_size=8")))
        largest = max(found.breakdown, key=lambda name: found.breakdown[name])
        assert (largest == "convolution") == (attention == "flash")
        shares.append(found.breakdown["convolution"] / found.mean)
    assert 0.3 < shares[0] < 0.44
    assert shares[1] < shares[0]


def test_attention_across_frames_takes_longer_than_within_them():
    """The same authors: over 60 % of the time of attention, with fewer operations."""
    for block in (lower_job(load_job(_VIDEO)).forward[0], lower_job(load_job(_VIDEO)).backward[0]):
        found = {
            k.size.split("x")[2]: (k, n) for k, n in kernels_of(block).items() if "all" in k.size
        }
        (within, a), (across, b) = found["256"], found["16"]
        assert (a, b) == (14, 14)
        assert within.flop == 16 * across.flop
        assert across.mean / (across.mean + within.mean) > 0.6


@pytest.mark.parametrize("stride", [1, 2])
def test_measured_convolutions_are_linear_and_their_gradients_adjoint(stride):
    """`<g, f(x, w)>` is `<x, dgrad(g)>` and `<w, wgrad(g)>`, on images of 3 x 4 pixels."""
    costs = _costs("training.microbatch_size=2", "training.sequence_length=12")
    linear = convolve(costs, 5, 7, 3, stride)
    rng, made = np.random.default_rng(0), {}

    def array(shape, dtype=jnp.float32):
        return made.setdefault(shape, jnp.asarray(rng.normal(size=shape), dtype))

    calls = [
        _convolution(one, array) for one in (linear.forward, linear.dgrad, *weights_of(linear))
    ]
    out, of_images, of_weights = (call.run() for call in calls)
    (images, weights), gradient = calls[0].run.args, calls[1].run.args[-1]  # pyright: ignore
    assert images.shape == (2, 3 * stride, 4 * stride, 7)
    assert {call.size for call in calls} == {2 * 2 * 12 * 9 * 5 * 7}
    expected = float(jnp.sum(out * gradient))
    assert float(jnp.sum(of_images * images)) == pytest.approx(expected, rel=1e-4)
    assert float(jnp.sum(of_weights * weights)) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("name", [_UNET, _FLUX, _VIDEO])
def test_models_of_images_are_of_no_class_of_published_runs(name):
    error = prism.expected_error(load_job(name))
    low, high = error.interval()
    assert error.num_runs == 0
    assert high / low > 1.6


def test_frozen_layers_come_first():
    job: Any = load_job(_UNET)
    model = replace(job.model, layers=job.model.layers[::-1])
    refusal(lambda: lower_job(replace(job, model=model)), "put frozen layers first")


_JOBS = ("dit-xl-2-a100-8", "latte-xl-2-a100-8", "wan2.1-t2v-14b-h100-256")


@pytest.mark.parametrize(("tokens", "giga"), [(256, 118.64), (1024, 524.60)])
def test_a_forward_of_dit_has_the_published_operations(tokens, giga):
    """Peebles and Xie 2023, table 4: multiply-adds of one image of 256 and of 512 pixels."""
    size = f"training.sequence_length={tokens}"
    work = lower_job(load_job("dit-xl-2-a100-8", (size, "training.microbatch_size=2")))
    assert flop_of(work.forward) / 2 / 2 == pytest.approx(giga * 1e9, rel=5e-4)


def test_attention_within_frames_and_across_them():
    """Each of 4096 tokens sees the 256 of its frame in one half of the blocks, and the 16 of its
    place in the other; a product forward is two operations for each value of a head."""
    tokens, hidden = 4096, 1152
    work = lower_job(load_job("latte-xl-2-a100-8", ("training.microbatch_size=1",)))
    pairs = 14 * tokens * (256 + 16)
    for blocks, products in ((work.forward, 2), (work.backward, 5)):
        assert flop_of(blocks, "attention") == 2 * products * pairs * hidden


@pytest.mark.parametrize("name", _JOBS)
def test_what_is_read_has_one_product_in_the_backward(name):
    """Each other product of a forward has two."""
    job: Any = load_job(name, ("training.recompute=none", "layout.cp=1"))
    work = lower_job(job)
    forward, whole = (flop_of(blocks, "gemm") for blocks in (work.forward, work.backward))
    hidden, batch = job.model.hidden_size, job.training.microbatch_size
    tokens = batch * job.training.sequence_length
    read = 2 * tokens * hidden * job.model.modules["patches"]["patch_values"]
    assert whole == pytest.approx(2 * forward - read, rel=1e-12)


def test_a_norm_that_is_modulated_has_no_parameters_of_its_own():
    """A table has three entries for each value and module; the norm before the text stays."""
    model: Any = load_model("wan2.1-t2v-14b")
    (layer,) = model.layers
    plain = msgspec.structs.replace(layer, modules=layer.modules[1:])
    bare = msgspec.structs.replace(model, layers=(plain,))
    added = count_parameters(model) - count_parameters(bare)
    assert added == 40 * (2 * 3 - 2 * 2) * model.hidden_size


def test_memory_kept_by_modulation():
    job = load_job("dit-xl-2-a100-8")
    parts = prism.memory(job).ranks[0].parts
    values = 28 * 2 * 32 * 256 * 1152
    assert parts["modulation"] == 2 * 2 * values
    assert "logits" not in parts


@pytest.mark.parametrize("name", _JOBS)
def test_shipped_jobs_are_predicted(name):
    prediction = prism.predict(load_job(name))
    assert 0.2 < prediction.mfu < 0.7
    assert math.isclose(sum(prediction.breakdown.values()), prediction.mean, rel_tol=1e-9)
