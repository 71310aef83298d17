"""Models of Hugging Face by the table of their types: right numbers of parameters, or a reason."""

import contextlib
import json
import pathlib
import tomllib

import msgspec
import pytest

from benchmarks import imports
from prism_jax.data import Model
from prism_jax.importers import import_job
from prism_jax.importers._adapters import read_adapters
from prism_jax.importers._formulas import formula_value, keys_of, parsed
from prism_jax.importers._hugging_face import read_model
from prism_jax.importers._models import tables, type_of
from prism_jax.prediction import expected_error
from prism_jax.workload import count_parameters
from prism_jax.workload.modules import modules

from .helpers import refusal


_ROOT = pathlib.Path(__file__).parents[1]
_NUMBERS = tomllib.loads((_ROOT / "benchmarks/parameters.toml").read_text())
SMALL = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 128,
    "vocab_size": 1000,
}


def _parameters(config):
    """How many parameters are imported, and of which status."""
    model, read, status = read_model(config)
    read.check()
    return count_parameters(msgspec.convert(model, Model)), status


def test_public_models_have_the_parameters_that_are_stated(shared):
    wrong = {}
    for row in _NUMBERS["models"]:
        folder = shared / "cases" / ("" if row["file"].startswith("c04") else "huggingface")
        counted, status = _parameters(json.loads((folder / row["file"]).read_text()))
        if status != "imported" or not imports.is_right(counted, row["parameters"]):
            wrong[row["file"]] = (status, counted, row["parameters"])
    assert not wrong


def test_a_rounded_number_of_parameters_is_equal_in_its_digits():
    assert imports.is_right(2_753_033_989_920, 2_800_000_000_000)
    assert not imports.is_right(2_740_000_000_000, 2_800_000_000_000)
    assert imports.is_right(8_030_261_248, 8_030_261_000)
    assert not imports.is_right(8_040_261_248, 8_030_261_248)


def test_default_configurations_have_the_parameters_that_transformers_makes_of_them():
    """Sizes and switches are those of the table of defaults. What is below a part in a thousand,
    as biases of words, is not counted.
    """
    counted = {
        kind: _parameters({"model_type": kind, "text_config": {"model_type": kind}})
        for kind in _NUMBERS["defaults"]
    }
    expected = {
        kind: (pytest.approx(number, rel=0.001), "imported")
        for kind, number in _NUMBERS["defaults"].items()
    }
    assert counted == expected


def _formulas(table):
    for value in table.values() if isinstance(table, dict) else table:
        if isinstance(value, dict | list):
            yield from _formulas(value)
        elif isinstance(value, str) and value.startswith("="):
            yield value


def test_the_table_of_types_has_no_dead_ends():
    others = {"maps", "sections", "same", "defaults", "published"}
    for formula in _formulas(tables()):
        values = dict.fromkeys(keys_of(formula))
        # Of a file without any key. What is no formula raises something else.
        with contextlib.suppress(ArithmeticError, LookupError, TypeError, ValueError):
            formula_value(parsed(formula), values | tables()["maps"])
    for name in [*tables().keys() - others, *tables()["same"]]:
        table = type_of(name)
        assert {"model", "modules", "layer", "num_layers", "names"} <= table.keys()
        for module, settings in table["modules"].items():
            while "like" in settings and "kind" not in settings:
                module, settings = settings["like"], table["modules"][settings["like"]]
            assert settings.get("kind", module) in modules()
    assert tables()["defaults"].keys() - tables().keys() <= tables()["same"].keys()


def test_a_type_that_is_not_known_is_guessed():
    llama, imported = _parameters(SMALL | {"model_type": "llama"})
    other, guessed = _parameters(SMALL | {"model_type": "aurora"})
    assert (imported, guessed) == ("imported", "guessed")
    assert other == llama
    names = {"n_embd": 64, "n_layer": 4, "n_head": 4, "n_inner": 128, "n_vocab": 1000}
    assert _parameters(names | {"model_type": "aurora"}) == (llama, "guessed")
    experts = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    mixture, _ = _parameters(SMALL | experts | {"model_type": "aurora"})
    assert mixture - llama == 4 * (64 * 8 + 3 * 64 * (8 * 32 - 128))


def test_keys_of_other_sections_are_notes():
    others = {
        "vision_config": {"hidden_size": 8},
        "use_unified_vision_chunk": True,
        "audio_token_id": 3,
        "quantization_config": {"quant_method": "fp8"},
        "eos_token_id": [1, 2],
    }
    plain, said = (read_model(SMALL | more | {"model_type": "llama"}) for more in ({}, others))
    assert plain[0] == said[0]
    assert not plain[1].notes
    notes = said[1].notes
    assert len(notes) == 4
    for key in others:
        assert sum(f"`{key}`" in note for note in notes) == 1


def test_a_key_that_is_not_known_is_a_note_or_with_strict_refused():
    config = SMALL | {"model_type": "llama", "num_warps_of_attention": 3, "eos_token_id": 1}
    _, read, _ = read_model(config)
    assert "Keys that are not known are left out: `num_warps_of_attention`." in read.notes
    assert not read.problems
    _, read, _ = read_model(config, strict=True)
    assert read.problems == ["`num_warps_of_attention`, which is not known"]


def test_a_part_of_a_larger_model_leaves_sizes_to_its_type():
    """As Transformers saves it, what equals the default of the class is not said."""
    text = {"model_type": "gemma3_text", "hidden_size": 64, "num_hidden_layers": 6}
    text |= {"intermediate_size": 128, "sliding_window": 32}
    model, read, _ = read_model({"model_type": "gemma3", "text_config": text})
    assert not read.problems
    assert (model["vocab_size"], model["num_heads"], model["tied_embeddings"]) == (262208, 8, True)
    assert "`vocab_size` is 262208, as the type has it by default." in read.notes
    _, whole, _ = read_model(text)
    assert any("`vocab_size` is missing" in problem for problem in whole.problems)
    tied = {"text_config": text | {"tie_word_embeddings": True}, "tie_word_embeddings": False}
    assert not read_model(tied | {"model_type": "gemma3"})[0]["tied_embeddings"]


def test_what_a_file_says_is_null_is_no_default():
    """The class has windows of 4,096 tokens."""
    mistral = SMALL | {"model_type": "mistral"}
    windows = [
        read_model(mistral | more)[0]["modules"]["attention"].get("window")
        for more in ({}, {"sliding_window": 512}, {"sliding_window": None})
    ]
    assert windows == [4096, 512, None]


def test_layers_of_different_sizes_have_modules_of_their_own():
    """As in the blocks of Nemotron Super, of which some lack attention or MLP."""

    def block(heads, multiple):
        attention = {"no_op": heads is None, "n_heads_in_group": heads}
        return {"attention": attention, "ffn": {"no_op": multiple is None, "ffn_mult": multiple}}

    blocks = [block(2, 6.0), block(2, 6.0), block(None, 9.0), block(4, None)]
    more = {"model_type": "nemotron-nas", "block_configs": blocks, "hidden_act": "silu"}
    config = SMALL | more | {"intermediate_size": None}
    model, read, _ = read_model(config)
    read.check()
    rows = [(layer["modules"], layer["repeat"]) for layer in model["layers"]]
    assert rows == [(["attention", "mlp"], 2), (["mlp-2"], 1), (["attention-2"], 1)]
    heads = [model["modules"][name]["num_kv_heads"] for name in ("attention", "attention-2")]
    assert heads == [2, 1]
    widths = [model["modules"][name]["ffn_size"] for name in ("mlp", "mlp-2")]
    assert widths == [256, 512]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"layer_types": ["full_attention"]}, "`layer_types` ['full_attention']"),
        ({"layer_types": ["other"] * 4}, "`layer_types`"),
        ({"hidden_size": float("nan")}, "`hidden_size` is nan"),
        ({"hidden_size": 10**400}, "`hidden_size` is 1000"),
        ({"num_hidden_layers": 2000}, "`num_hidden_layers` 2000, but must be from 1 to 1000"),
        ({"num_local_experts": 8}, "`num_local_experts`, which the type `qwen3` does not have"),
        ({"hidden_act": ["silu"]}, "`hidden_act` ['silu']"),
        ({"num_key_value_heads": 3}, "`num_key_value_heads` 3"),
        (
            {"model_type": "gpt2", "add_cross_attention": True},
            "attention to an encoder (`add_cross_attention` True)",
        ),
        ({"model_type": "vit", "image_size": 224}, "an encoder of images alone, which reads no"),
    ],
)
def test_what_is_no_model_is_a_problem(change, said):
    _, read, _ = read_model(SMALL | {"model_type": "qwen3", "head_dim": 16} | change)
    assert any(said in problem for problem in read.problems)


def test_a_formula_of_a_file_cannot_fill_the_memory():
    with pytest.raises(TypeError):
        formula_value(parsed("=a * b"), {"a": [1] * 1000, "b": 10**9})
    with pytest.raises(TypeError):
        formula_value(parsed("=a * b"), {"a": 10**400, "b": 2})


def test_import_says_that_a_type_was_guessed(written):
    path = written("config.json", json.dumps(SMALL | {"model_type": "aurora"}))
    imported = import_job(path, 8, batch=8)
    assert (imported.kind, imported.status) == ("huggingface", "guessed")
    assert "The type `aurora` is not known" in imported.notes[0]


def _folder(tmp_path, **files):
    for name, table in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(table))
    return tmp_path


def test_adapters_beside_a_configuration_are_those_of_the_job(tmp_path):
    adapters = {"peft_type": "LORA", "r": 8, "lora_dropout": 0.1}
    adapters |= {"target_modules": ["q_proj", "v_proj", "model.layers.0.mlp.down_proj", "lm_head"]}
    llama = SMALL | {"model_type": "llama"}
    folder = _folder(tmp_path, config=llama, adapter_config=adapters)
    imported = import_job(folder, 8, batch=8)
    assert imported.job.name == folder.name
    made = imported.job.training.adapters
    assert (made.rank, made.modules, made.dropout) == (8, ("linear_qkv", "linear_fc2"), True)
    assert any("`lm_head`" in note for note in imported.notes)
    for targets in ("all-linear", r".*\.(q_proj|o_proj|up_proj|down_proj)"):
        _folder(tmp_path, adapter_config=adapters | {"target_modules": targets})
        training = import_job(folder / "config.json", 8, batch=8).job.training
        assert len(training.adapters.modules) == 4
    alone = tmp_path / "alone"
    alone.mkdir()
    _folder(alone, config=llama)
    training = import_job(alone, 8, batch=8).job.training
    assert training.adapters is None


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"peft_type": "IA3"}, "`peft_type` IA3 of `adapter_config.json`"),
        ({"target_modules": ["lm_head"]}, "`target_modules`"),
        ({"target_modules": 3}, "`target_modules` 3"),
        ({"r": None}, "`r` is missing"),
        ({"lora_dropout": "much"}, "`lora_dropout` is much"),
    ],
)
def test_adapters_that_a_job_cannot_have_are_refused(change, said, tmp_path):
    adapters = {"peft_type": "LORA", "r": 8, "target_modules": ["q_proj"]} | change
    llama = SMALL | {"model_type": "llama"}
    folder = _folder(tmp_path, config=llama, adapter_config=adapters)
    message = refusal(lambda: import_job(folder, 8, batch=8), said)
    assert message.startswith(f"{folder / 'adapter_config.json'}: ")


def test_a_folder_without_a_configuration_is_refused(tmp_path):
    refusal(lambda: import_job(tmp_path, 8), "no `config.json`")


def test_a_guessed_model_has_the_expected_error_of_a_class_without_steps(tmp_path):
    errors = {}
    for kind in ("llama", "aurora"):
        folder = _folder(tmp_path, config=SMALL | {"model_type": kind})
        errors[kind] = expected_error(import_job(folder, 8, batch=8).job)
    assert errors["aurora"].num_runs == 0
    assert errors["aurora"].spread > 2 * errors["llama"].spread


def test_a_configuration_of_many_megabytes_is_read(tmp_path):
    layers = {f"model.layers.{i}.mlp.experts.{i}.down_proj": "nvfp4" for i in range(30_000)}
    config = SMALL | {"model_type": "llama", "quantization_config": {"layers": layers}}
    assert len(json.dumps(config)) > 2**20
    assert import_job(_folder(tmp_path, config=config), 8, batch=8).status == "imported"


def test_the_benchmark_of_imports_has_a_row_for_each_file(tmp_path, monkeypatch, capsys):
    llama = SMALL | {"model_type": "llama"}
    _folder(tmp_path, llama=llama, other=SMALL | {"model_type": "aurora"}, broken=[1])
    (tmp_path / "downloaded").mkdir()
    _folder(tmp_path / "downloaded", config=llama)
    (tmp_path / "binary.json").write_bytes(bytes(range(256)))
    monkeypatch.setattr("sys.argv", ["imports.py", str(tmp_path), "--json", "--gpus", "16"])
    imports.main()
    rows = {pathlib.Path(row["file"]).name: row for row in json.loads(capsys.readouterr().out)}
    keys = (
        "file kind status parameters stated_parameters gpus global_batch_size notes reasons seconds"
    )
    assert {tuple(row) for row in rows.values()} == {tuple(keys.split())}
    said = {name: (row["status"], row["gpus"], len(row["reasons"])) for name, row in rows.items()}
    assert said == {
        "binary.json": ("refused", None, 1),
        "broken.json": ("refused", None, 1),
        "downloaded": ("imported", 16, 0),
        "llama.json": ("imported", 16, 0),
        "other.json": ("guessed", 16, 0),
    }
    assert rows["llama.json"]["global_batch_size"] == 512
    assert rows["llama.json"]["kind"] == "huggingface"
    assert rows["llama.json"]["parameters"] == _parameters(llama)[0]


_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


@pytest.mark.parametrize(
    ("said", "same"),
    [
        ({"attention_bias": "false", "num_hidden_layers": "4"}, {}),
        ({"tie_word_embeddings": "True", "head_dim": "32"}, {"tie_word_embeddings": True}),
        ({"num_key_value_heads": "2"}, {"num_key_value_heads": 2}),
    ],
)
def test_numbers_and_switches_between_quotation_marks_are_read(said, same):
    sizes = {"model_type": "qwen3", "head_dim": 32}
    assert _parameters(SMALL | sizes | said) == _parameters(SMALL | sizes | same)


@pytest.mark.parametrize("kind", ["hy_v3", "kimi_linear", "aria_text", "cohere2_moe"])
def test_shared_experts_have_the_name_that_a_file_gives_them(kind):
    """Under no other name does the default of a type hold."""
    latents = {"kv_lora_rank": 32, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
    config = SMALL | _EXPERTS | latents | {"model_type": kind}
    config |= {"layer_types": ["full_attention"] * 4, "mlp_layer_types": ["sparse"] * 4}
    one, two, three = (_parameters(config | {"num_shared_experts": n})[0] for n in (1, 2, 3))
    assert three - two == two - one > 0
    without, read, _ = read_model(config | {"num_shared_experts": 0})
    assert not read.problems
    assert "num_shared_experts" not in without["modules"]["moe"]


def test_types_with_keys_of_experts_are_read_by_whether_they_have_them():
    doge, _ = _parameters(SMALL | {"model_type": "doge", "is_moe": False, "num_experts": 16384})
    assert doge == _parameters(SMALL | {"model_type": "doge"})[0]
    shared = {"shared_expert_intermediate_size": 48, "mlp_only_layers": [0]}
    flint, status = _parameters(SMALL | _EXPERTS | shared | {"model_type": "flint"})
    plain, _ = _parameters(SMALL | {"model_type": "qwen3"})
    assert status == "imported"
    assert flint - plain == 3 * (64 * 8 + 3 * 64 * (8 * 32 + 48 - 128))


def test_windows_without_a_first_layer_are_of_all_layers():
    windows = {"use_sliding_window": True, "sliding_window": 16}
    model, read, _ = read_model(SMALL | _EXPERTS | windows | {"model_type": "qwen3_moe"})
    assert not read.problems
    assert [layer["modules"] for layer in model["layers"]] == [["local", "moe"]]


def test_a_list_of_layers_is_as_long_as_the_model_or_says_so():
    kinds = {"layer_types": ["full_attention"] * 5, "model_type": "qwen3"}
    _, read, _ = read_model(SMALL | kinds)
    assert read.notes == ["`layer_types` has 5 entries, of which the 4 of layers are read."]
    _, read, _ = read_model(SMALL | kinds | {"num_hidden_layers": 6})
    assert read.problems[0].endswith("ends before layer 5")
    _, read, _ = read_model(SMALL | kinds | {"layer_types": ["full_attention"] * 3 + ["odd"]})
    assert read.problems[0].endswith("of which odd is not known")


def test_experts_have_any_of_their_names():
    names = ("n_routed_experts", "num_local_experts", "num_experts")
    sizes = {"hybrid_override_pattern": "E*", "moe_shared_expert_intermediate_size": 16}
    sizes |= {"num_experts_per_tok": 2, "moe_intermediate_size": 32, "num_hidden_layers": 2}
    counted = [_parameters(SMALL | sizes | {"model_type": "nemotron_h", n: 4}) for n in names]
    assert counted == [counted[0]] * 3


def test_a_pattern_of_adapters_names_whole_matrices():
    targets = r".*\.(query_key_value|dense_h_to_4h)"
    table, _ = read_adapters({"r": 8, "target_modules": targets})
    assert table["modules"] == ["linear_qkv", "linear_fc1"]


def test_gates_and_shared_experts_are_as_their_classes_make_them():
    laguna = SMALL | _EXPERTS | {"model_type": "laguna", "head_dim": 16}
    per_head, wide = (_parameters(laguna | {"gating": said})[0] for said in (True, False))
    assert wide - per_head == 4 * 64 * (64 - 4)
    assert _parameters(laguna)[0] == per_head
    sizes = {"hybrid_override_pattern": "E*", "moe_shared_expert_intermediate_size": 16}
    nemotron = SMALL | _EXPERTS | sizes | {"model_type": "nemotron_h", "num_hidden_layers": 2}
    one, two = (_parameters(nemotron | {"n_shared_experts": n})[0] for n in (1, 2))
    assert one == two  # The size is that of all of them, as in Megatron-LM.
