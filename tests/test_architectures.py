"""Layers in files of their own, repeated to a depth, and models of a number of parameters."""

from typing import Any

import msgspec
import pytest

import prism_jax as prism
from prism_jax.data import Layer, load_job, load_model, repeat_layers
from prism_jax.data._model import load_architecture
from prism_jax.workload import count_parameters, widen

from .documents import ROOT
from .helpers import small_model


_JOB, _HYBRID = ROOT / "examples/job.toml", ROOT / "examples/hybrid_layers.toml"
_ATTENTION = ROOT / "examples/attention_layers.toml"
_DENSE = small_model(num_layers=6, name="dense")
_BLOCK = (Layer(("mamba", "mlp"), 2), Layer(("attention", "moe")))
_MODULES = {
    "mamba": {"mamba_num_heads": 32},
    "moe": {"num_experts": 8, "top_k": 2, "expert_ffn_size": 512},
}
_MIXED = msgspec.structs.replace(_DENSE, layers=_BLOCK, modules=_MODULES, num_layers=3)


def dense_parameters(width, layers=6):
    """Embedding and head; queries, output, keys and values; an MLP of three matrices; norms."""
    ffn = round(4 * width / 64) * 64
    layer = 2 * width**2 + 2 * width * (2 * width // 8) + 3 * width * ffn + 2 * width
    return 2 * 32000 * width + layers * layer + width


def mixed_parameters(width, blocks=1):
    """Of the block above, repeated; Mamba-2 with 8 groups of states of 128 and 4 taps."""
    heads, ffn = round(width / 32 / 8) * 8, round(4 * width / 64) * 64
    inner, conv = 64 * heads, 64 * heads + 2 * 8 * 128
    mamba = width * (inner + conv + heads + inner) + 5 * conv + 3 * heads + inner
    expert = 3 * width * round(width / 2 / 64) * 64
    attention = 2 * width**2 + 2 * width * (2 * width // 8)
    block = 2 * (mamba + 3 * width * ffn) + attention + 8 * (expert + width) + 6 * width
    return 2 * 32000 * width + blocks * block + width


_FORMS = [(_DENSE, dense_parameters), (_MIXED, mixed_parameters)]


@pytest.mark.parametrize(("model", "form"), _FORMS)
@pytest.mark.parametrize("parameters", [30_000_000, 400_000_000, 3_000_000_000])
def test_the_width_is_the_smallest_with_so_many_parameters(model, form, parameters):
    assert count_parameters(model) == form(1024)
    wide = widen(model, parameters)
    width = wide.hidden_size
    assert width % 64 == 0
    assert count_parameters(wide) == form(width) >= parameters > form(width - 64)


@pytest.mark.parametrize(("model", "form"), _FORMS)
def test_twice_the_width_has_all_sizes_twice_and_one_parameter_less_finds_it_too(model, form):
    wide = widen(model, form(2048))
    assert (wide.hidden_size, wide.ffn_size, wide.num_heads) == (2048, 8192, 8)
    if model is _MIXED:
        assert wide.modules == {
            "mamba": {"mamba_num_heads": 64},
            "moe": {"num_experts": 8, "top_k": 2, "expert_ffn_size": 1024},
        }
    assert widen(model, form(2048) - 1) == wide
    assert widen(wide, form(1024)) == model


def test_parameters_of_repeated_layers_add_up():
    for times in (1, 2, 5):
        deep = repeat_layers(_MIXED, 3 * times)
        assert deep.layers == _BLOCK * times
        assert count_parameters(deep) == mixed_parameters(1024, times)
        assert count_parameters(repeat_layers(_DENSE, times)) == dense_parameters(1024, times)
    assert repeat_layers(_MIXED, 3) == _MIXED


@pytest.mark.parametrize("parameters", [50_000_000, 400_000_000, 3_000_000_000])
def test_the_width_has_whole_heads_of_each_module(parameters):
    """The least common multiple of 64, of 8 heads of the model, and of 24 and 10 of modules."""
    modules = {
        "attention": {"num_heads": 24, "num_kv_heads": 4},
        "near": {"kind": "attention", "num_heads": 10, "window": 128},
    }
    layers = (Layer(("attention", "mlp")), Layer(("near", "mlp")))
    changes = {"layers": layers, "modules": modules, "num_layers": 2, "hidden_size": 960}
    model = msgspec.structs.replace(_DENSE, **changes)
    wide = widen(model, parameters)
    assert wide.hidden_size % 960 == 0
    assert count_parameters(wide) >= parameters


@pytest.mark.parametrize("name", ["dit-xl-2", "wan2.1-t2v-14b", "deepseek-v3", "nemotron-h-8b"])
def test_the_number_of_a_shipped_model_gives_the_model(name):
    model = load_model(name)
    wide = widen(model, count_parameters(model))
    assert (wide.hidden_size, wide.ffn_size) == (model.hidden_size, model.ffn_size)
    assert count_parameters(wide) == count_parameters(model)


def test_layers_of_a_file_replace_those_of_the_model():
    plain = load_job(_JOB)
    same = load_job(_JOB, [f"layers={_ATTENTION}"])
    hybrid = load_job(_JOB, [f"layers={_HYBRID}", "model.hidden_size=2048"])
    assert prism.predict(same).mean == prism.predict(plain).mean
    models = [job.model for job in (plain, same, hybrid) if job.model is not None]
    before, again, changed = models
    assert again.layers is not None is before.layers
    assert count_parameters(again) == count_parameters(before)
    given = load_architecture(_HYBRID)
    assert (changed.layers, changed.modules) == (given.layers, given.modules)
    assert (changed.num_layers, changed.hidden_size) == (32, 2048)
    assert changed.ffn_size == before.ffn_size


def test_both_ends_keep_the_settings_of_the_job_and_layers_have_those_of_the_file(written):
    """Attention has a norm of its queries in the job's model, and none in the file."""
    text = 'kind = "layers"\nlayers = [{ modules = ["attention", "mlp"], repeat = 8 }]'
    path = written("layers.toml", text)
    video, name = load_model("wan2.1-t2v-14b"), "model=wan2.1-t2v-14b"
    found: Any = load_job(_JOB, [name, f"layers={path}"]).model
    assert found.modules == {k: v for k, v in video.modules.items() if k != "attention"}
    layers = (Layer(("attention", "mlp"), 8),)
    ends = {name: video.modules[name] for name in (video.first, video.last)}
    changes = {"layers": layers, "num_layers": 8, "modules": ends}
    assert count_parameters(found) == count_parameters(msgspec.structs.replace(video, **changes))


def test_architectures_are_compared_at_as_many_parameters(answered):
    over = f"layers={_ATTENTION},{_HYBRID}"
    words = ["compare", str(_JOB), "--over", over, "--samples", "1024", "--allow-oom"]
    table = answered([*words, "--parameters", "4e9"])
    found = answered([*words, "--parameters", "4e9", "--json"])
    for row in (*found["layouts"], found["best_by_mean"]):
        (file,) = (one for one in (_ATTENTION, _HYBRID) if one.name in row["name"])
        model: Any = load_job(_JOB, [f"layers={file}"]).model
        wide = widen(model, 4_000_000_000)
        assert row["hidden_size"] == wide.hidden_size
        assert row["parameters"] == count_parameters(wide) >= 4_000_000_000
        assert f"{row['hidden_size']:,}  {row['parameters']:,}" in table


def test_a_key_that_is_set_before_the_layers_changes_them():
    """A file that `--over` names comes behind what `--set` sets."""
    both = [f"layers={_HYBRID}", "model.modules.mamba.mamba_num_heads=64"]
    assert load_job(_JOB, both) == load_job(_JOB, both[::-1])
