"""Foreign configurations: what they say is in the job, and what a job cannot say is named."""

import copy
import csv
import json
import pathlib
import random
import re
import resource
import time
from typing import Any

import pytest

from prism_jax.cli import main
from prism_jax.data import load_job, make_job
from prism_jax.importers import import_job
from prism_jax.importers._documents import document
from prism_jax.importers._frameworks import framework, megatron_reader
from prism_jax.importers._megatron import layers_of_layout, read_megatron
from prism_jax.importers._megatron_model import repeated
from prism_jax.prediction import memory
from prism_jax.workload import count_parameters

from .helpers import refusal


def from_megatron(arguments, num_gpus):
    """The tables of a job from flags."""
    return read_megatron(megatron_reader(arguments), num_gpus)


def parsed(text, name="job.sh"):
    """The flat keys of a file, by their last names."""
    keys = document(name, text).keys
    return {key.rpartition(".")[2].lstrip("-"): value for key, value in keys.items()}


# The keys of the published files that say the shape, and how many parameters the published weights
# have (the tensors' total in each model's index on Hugging Face), or their makers say.
_DATA = pathlib.Path(__file__).parent / "data"
_ROWS = json.loads((_DATA / "configs.json").read_text())
CONFIGS = {name: row["config"] for name, row in _ROWS.items()}
_RECENT = [name for name, row in _ROWS.items() if "kinds" in row]
_LLAMA, _MIXTRAL, _GPT_OSS = (
    CONFIGS[name] for name in ("llama-3.1-8b", "mixtral-8x7b", "gpt-oss-120b")
)


def _file(tmp_path, config, name="config.json"):
    path = tmp_path / name
    path.write_text(config if isinstance(config, str) else json.dumps(config))
    return path


@pytest.mark.parametrize("name", [name for name in CONFIGS if name not in _RECENT])
def test_models_of_hugging_face_have_their_parameters(name, tmp_path):
    job: Any = import_job(_file(tmp_path, CONFIGS[name]), 64, overrides=("layout.tp=4",)).job
    assert count_parameters(job.model) == _ROWS[name]["parameters"]
    assert (job.layout.tp, job.layout.dp) == (4, 16)


def test_groups_of_experts_are_imported(tmp_path):
    config = CONFIGS["deepseek-v3"] | {"n_group": 8, "topk_group": 4}
    limits = []
    for more in ({}, {"topk_method": "greedy"}, {"n_group": 1, "topk_group": 1}):
        model = import_job(_file(tmp_path, config | more), 64, overrides=("layout.tp=4",)).job.model
        limits.append(model.modules["moe"].get("top_k_groups"))
    assert limits == [4, None, None]
    experts = {"num-experts": 64, "moe-router-topk": 6, "moe-router-num-groups": 8}
    for topk, kept in ((None, 8), (3, 3)):
        raw = from_megatron(_SMALL | experts | {"moe-router-group-topk": topk}, 8)
        assert raw["model"]["modules"]["moe"]["top_k_groups"] == kept
    one_group = _SMALL | {"num-experts": 64, "moe-router-topk": 6, "moe-router-group-topk": 1}
    assert "top_k_groups" not in from_megatron(one_group, 8)["model"]["modules"]["moe"]


def test_an_imported_job_is_a_file_that_can_be_read(tmp_path, answered):
    config, out = _file(tmp_path, _MIXTRAL), tmp_path / "mixtral.toml"
    options = ["--set", "layout.pp=4", "--set", "layout.ep=8", "--set", "layout.etp=1"]
    options += ["--set", "training.sequence_length=2048"]
    words = ["import", str(config), "--gpus", "64", "--out", str(out), "--json"]
    said = answered([*words, *options, "--set", "schedule.num_microbatches=8"])
    assert said["parameters"] == 46_702_792_704
    job = load_job(out)
    assert (job.layout.pp, job.layout.ep, job.layout.dp, job.layout.world_size) == (4, 8, 16, 64)
    ranks = answered(["memory", str(out), "--json"])["ranks"]
    assert [rank["rank"] for rank in ranks] == [0, 1, 2, 3]
    for rank in ranks:
        assert rank["bytes"] == pytest.approx(sum(rank["parts"].values()))


def test_a_command_of_megatron():
    job: Any = import_job(_DATA / "train.sh", 32).job
    # 128256 words are padded to a multiple of 128 * 4, in the embedding and in the head.
    assert count_parameters(job.model) == 8_030_261_248 + 2 * 256 * 4096
    layout, schedule, training = job.layout, job.schedule, job.training
    assert (layout.tp, layout.pp, layout.dp, layout.cp) == (4, 2, 4, 1)
    assert (schedule.kind, schedule.virtual_stages) == ("interleaved-1f1b", 4)
    assert schedule.num_microbatches == 16
    assert (training.sequence_length, training.zero, training.dtype) == (8192, 1, "bf16")
    assert training.sequence_parallel
    assert not job.model.dropout


def test_flags_of_a_script():
    """A line ends a flag, and a text of flags is read as a list of them is, if it is used."""
    script = """
ARGS="--num-layers 4 --swiglu"
MORE=" --bf16
  --lr 1e-4"  # --fp8-format hybrid
LIST=(--sequence-parallel --hidden-size 64)
IDLE=(--transformer-impl local)
torchrun pretrain_gpt.py $ARGS ${MORE} "${LIST[@]}" --tp-comm-overlap
echo done
"""
    switches = dict.fromkeys(("swiglu", "bf16", "sequence-parallel", "tp-comm-overlap"), True)
    numbers = {"num-layers": "4", "lr": "1e-4", "hidden-size": "64"}
    assert parsed(script) == switches | numbers


def test_defaults_of_megatron():
    grouped = from_megatron(_SMALL | {"group-query-attention": True}, 8)
    assert grouped["model"]["num_kv_heads"] == 1
    half = _SMALL | {"bf16": False, "fp16": True, "perform-rl-step": False}
    assert from_megatron(half, 8)["training"]["gradient_dtype"] == "fp16"
    half["accumulate-allreduce-grads-in-fp32"] = True
    assert from_megatron(half, 8)["training"]["gradient_dtype"] == "fp32"
    assert "token_dispatcher" not in grouped["training"]
    sent = {"moe-token-dispatcher-type": "flex", "moe-shared-expert-overlap": True}
    training = from_megatron(_SMALL | sent, 8)["training"]
    assert (training["token_dispatcher"], training["overlap_shared_experts"]) == ("deepep", True)
    blockwise = {"fp8-format": "e4m3", "fp8-recipe": "blockwise"}
    assert from_megatron(_SMALL | blockwise, 8)["training"]["dtype"] == "fp8"
    micro = blockwise | {"fp8-recipe": "mxfp8", "main-grads-dtype": "fp32"}
    assert from_megatron(_SMALL | micro, 8)["training"]["dtype"] == "mxfp8"
    both = {"fp8-format": "hybrid", "fp8": "hybrid"}
    assert from_megatron(_SMALL | both, 8)["training"]["dtype"] == "fp8"
    pipeline = {"no-overlap-p2p-communication": True, "pipeline-model-parallel-size": 4}
    assert from_megatron(_SMALL | pipeline, 8)["schedule"]["blocking"]
    assert "blocking" not in grouped["schedule"]
    padded = from_megatron(_SMALL | {"padded-vocab-size": 50_260}, 8)
    assert padded["model"]["vocab_size"] == 50_260


def test_model_config_files_and_commands_give_equal_flags():
    flags = parsed("--num-layers 4 --swiglu --lr 1e-4 --hidden-size=64")
    text = """
ENV_VARS:
  CUDA_DEVICE_MAX_CONNECTIONS: 1
MODEL_ARGS:
  --num-layers: 4  # A comment.
  --swiglu: true
  --lr: "1e-4"
  --hidden-size: 64
TEST_TYPE: regular
"""
    assert flags.items() <= parsed(text, "job.yaml").items()


@pytest.mark.parametrize(
    "text",
    [
        '{"MODEL_ARGS": {"--lr": 1e-5, "--bf16": true, "--spec": "a b"}, "ENV_VARS": {"A": 1}}',
        "MODEL_ARGS:\n  --lr: 1e-5\n  --bf16: True\n  --spec: >\n    a\n    b\nENV_VARS: {A: 1}\n",
        "lr: 1e-5\nbf16: true  # a comment\nspec: 'a b'\n",
    ],
)
def test_all_of_yaml_is_read(text):
    values = parsed(text, "job.yaml")
    assert (float(values["lr"]), values["bf16"], values["spec"]) == (1e-5, True, "a b")


_SMALL = {
    "num-layers": 12,
    "hidden-size": 512,
    "num-attention-heads": 8,
    "micro-batch-size": 4,
    "global-batch-size": 32,
    "seq-length": 1024,
    "max-position-embeddings": 1024,
    "vocab-size": 50257,
    "bf16": True,
}


def test_stages_of_a_layout():
    assert layers_of_layout("Et*7|t*7mL") == [7, 7]
    assert layers_of_layout("Et|(tt|)*6mL") == [1, *[2] * 6, 0]
    assert repeated("([0]*3+[1]*11)") == [0] * 3 + [1] * 11
    uneven = {"pipeline-model-parallel-size": 4, "decoder-first-pipeline-num-layers": 2}
    more = _SMALL | uneven | {"decoder-last-pipeline-num-layers": 2}
    raw = from_megatron(more, 8)
    assert raw["schedule"]["layers_per_stage"] == [2, 4, 4, 2]


def test_patterns_of_layers():
    pattern = {"hybrid-layer-pattern": "M-M*|E-M*", "pipeline-model-parallel-size": 2}
    raw = from_megatron(_SMALL | pattern | {"num-experts": 8}, 8)
    kinds = [
        name for layer in raw["model"]["layers"] for name in layer["modules"] * layer["repeat"]
    ]
    assert kinds == ["mamba", "mlp", "mamba", "attention", "moe", "mlp", "mamba", "attention"]
    frequency = {"num-experts": 8, "moe-layer-freq": "([0]*2+[1]*10)", "moe-router-topk": 2}
    raw = from_megatron(_SMALL | frequency, 8)
    assert [layer["repeat"] for layer in raw["model"]["layers"]] == [2, 10]
    assert raw["model"]["vocab_size"] == 50304


_DELTA = {
    "experimental-attention-variant": "gdn",
    "linear-attention-freq": 4,
    "linear-num-key-heads": 4,
    "linear-num-value-heads": 8,
    "attention-output-gate": True,
    "softmax-type": "learnable",
}
_SPARSE = {
    "multi-latent-attention": True,
    "kv-lora-rank": 64,
    "experimental-attention-variant": "dsa",
    "dsa-indexer-n-heads": 4,
    "dsa-indexer-head-dim": 64,
    "dsa-indexer-topk": 256,
    "enable-hyper-connections": True,
    "num-experts": 8,
    "moe-latent-size": 128,
}


def test_variants_of_attention_and_experts_are_modules():
    model = from_megatron(_SMALL | _DELTA, 8)["model"]
    layers = [(*layer["modules"], layer["repeat"]) for layer in model["layers"]]
    assert layers == [("gated-delta", "mlp", 3), ("attention", "mlp", 1)] * 3
    shapes = {"num_key_heads": 4, "num_value_heads": 8, "conv_size": 4}
    assert model["modules"]["gated-delta"] == shapes | dict.fromkeys(
        ("key_head_size", "value_head_size"), 128
    )
    gated = {"kind": "attention", "qk_norm": False, "output_gate": True, "sinks": True}
    assert model["modules"]["attention"] == gated
    model = from_megatron(_SMALL | _SPARSE, 8)["model"]
    index = {"index_num_heads": 4, "index_head_size": 64, "index_top_k": 256}
    assert index.items() <= model["modules"]["mla"].items()
    assert model["modules"]["moe"]["latent_size"] == 128
    assert model["hyper_connections"] == 4
    shared = {"dsa-indexer-topk-freq": 4, "dsa-indexer-skip-topk-offset": 2}
    model = from_megatron(_SMALL | _SPARSE | shared, 8)["model"]
    kinds = [(layer["modules"][0], layer["repeat"]) for layer in model["layers"]]
    assert kinds == [("mla", 2), *[("shared", 3), ("mla", 1)] * 2, ("shared", 2)]
    assert "index_num_heads" not in model["modules"]["shared"]
    pattern = {"hybrid-layer-pattern": "GED-", "num-experts": 8}
    kinds = from_megatron(_SMALL | _SPARSE | _DELTA | pattern, 8)["model"]["layers"]
    assert [layer["modules"] for layer in kinds] == [["gated-delta"], ["moe"], ["mla"], ["mlp"]]


@pytest.mark.parametrize(
    ("config", "parts"),
    [
        ({"hidden_size": 64}, ["`model_type` is missing"]),
        (_LLAMA | {"num_attention_heads": 33}, ["`num_attention_heads` 33"]),
        (_LLAMA | {"num_key_value_heads": 5}, ["`num_key_value_heads` 5"]),
        (_LLAMA | {"hidden_size": None}, ["`hidden_size` is missing"]),
        (_LLAMA | {"vocab_size": "many"}, ["`vocab_size` is many"]),
        (_LLAMA | {"num_hidden_layers": 10**12}, ["num_layers", "repeat"]),
        (_LLAMA | {"num_local_experts": 8}, ["`num_local_experts`"]),
        (_LLAMA | {"hidden_act": "sine"}, ["`hidden_act` sine"]),
        (_MIXTRAL | {"num_experts_per_tok": None}, ["`num_experts_per_tok`"]),
        (_MIXTRAL | {"num_experts_per_tok": 9}, ["`top_k` = 9"]),
        ("[1, 2]", ["not a table"]),
        ("{", ["cannot be read"]),
        ("[" * 100_000, ["cannot be read"]),
    ],
)
def test_configurations_that_cannot_be_are_refused(config, parts, tmp_path, capsys):
    path = _file(tmp_path, config)
    out = tmp_path / "job.toml"
    assert main(["import", str(path), "--gpus", "8", "--out", str(out), "--allow-oom"]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert len(said.err.splitlines()) == 1
    assert any(part in said.err for part in parts)
    assert parts[0] in said.err or len(parts) == 2
    assert not out.exists()


_EXPERTS = {"num-experts": 8, "expert-model-parallel-size": 2}
_OVERLAPPED = _EXPERTS | {"overlap-moe-expert-parallel-comm": True}


@pytest.mark.parametrize(("pp", "stages"), [(1, 1), (4, 3)])
def test_exchanges_beside_another_microbatch_are_imported(pp, stages):
    pipeline = {"pipeline-model-parallel-size": pp, "num-virtual-stages-per-pipeline-rank": stages}
    schedule = from_megatron(_SMALL | _OVERLAPPED | pipeline, 8)["schedule"]
    assert (schedule["kind"], schedule["virtual_stages"]) == ("overlapped-1f1b", stages)


@pytest.mark.parametrize(
    ("change", "keys"),
    [
        ({"moe-layer-recompute": True}, ("selective", ["moe"])),
        ({"moe-layer-recompute": True, "recompute-activations": True}, ("selective", None)),
        ({"moe-layer-recompute": True, "recompute-granularity": "full"}, ("full", None)),
    ],
)
def test_an_older_flag_recomputes_experts(change, keys):
    """Beside the modules of the newer one (transformer_config.py of Megatron-Core)."""
    training = from_megatron(_SMALL | _EXPERTS | change, 8)["training"]
    recompute, modules = keys
    assert training["recompute"] == recompute
    if recompute == "selective":
        assert training["recompute_modules"] == (modules or ["core_attn", "moe"])


@pytest.mark.parametrize(
    ("change", "keys"),
    [
        ({"cpu-offloading-num-layers": 3}, (["activations"], 3, None)),
        ({"cpu-offloading": True, "cpu-offloading-num-layers": 0}, (None, None, None)),
        ({"cpu-offloading-num-layers": 3, "cpu-offloading-activations": False}, (None,) * 3),
        ({"optimizer-cpu-offload": True}, (["optimizer"], None, None)),
        (
            {"optimizer-cpu-offload": True, "optimizer-offload-fraction": 0.5},
            (["optimizer"], None, 0.5),
        ),
        ({"optimizer-offload-fraction": 0.5}, (None, None, None)),
        (
            {"cpu-offloading-num-layers": 3, "optimizer-cpu-offload": True},
            (["activations", "optimizer"], 3, None),
        ),
    ],
)
def test_what_is_offloaded_is_imported(change, keys):
    training = from_megatron(_SMALL | change, 8)["training"]
    names = ("offload", "offload_layers", "offload_fraction")
    assert tuple(training.get(name) for name in names) == keys


_FP8 = {"fp8-format": "hybrid", "fp8-param-gather": True}


@pytest.mark.parametrize(
    ("change", "keys"),
    [
        ({}, {"loss": "vocab-parallel", "gradient_dtype": "fp32"}),
        ({"cross-entropy-loss-fusion": True}, {"loss": "vocab-parallel-compiled"}),
        ({"cross-entropy-loss-fusion": True, "cross-entropy-fusion-impl": "te"}, {"loss": "fused"}),
        ({"cross-entropy-fusion-impl": "te"}, {"loss": "vocab-parallel"}),
        ({"exp-avg-dtype": "bf16", "exp_avg_sq_dtype": "bf16"}, {"optimizer_dtype": "bf16"}),
        ({"main-grads-dtype": "bf16"}, {"gradient_dtype": "bf16"}),
        ({"grad-reduce-in-bf16": True}, {"gradient_dtype": "bf16"}),
        ({"fp16": True, "bf16": False}, {"gradient_dtype": "fp16"}),
        ({"megatron-fsdp-grad-comm-dtype": "bf16"}, {"gradient_comm_dtype": "bf16"}),
        ({"grad-comm-dtype": "auto"}, {"gradient_comm_dtype": None}),
        (_FP8, {"gather_dtype": "fp8"}),
        (_FP8 | {"fp8-recipe": "mxfp8"}, {"gather_dtype": None}),
        (_FP8 | {"use-torch-fsdp2": True}, {"gather_dtype": None}),
        ({"fp8-param-gather": True}, {"gather_dtype": None}),
    ],
)
def test_dtypes_and_the_loss_are_imported(change, keys):
    """`None` stands for a key that is left to the software stack."""
    training = from_megatron(_SMALL | change, 8)["training"]
    assert {key: training.get(key) for key in keys} == keys


@pytest.mark.parametrize(
    ("change", "of"),
    [
        ({"no-fp8-wgrad": True, "fp8-param-gather": True, "fp8-recipe": "tensorwise"}, {}),
        ({"overlap-moe-expert-parallel-comm": True}, _EXPERTS | {"expert-model-parallel-size": 1}),
        ({"no-overlap-p2p-communication": True}, _OVERLAPPED),
        ({"no-gradient-accumulation-fusion": True, "main-params-dtype": "fp32"}, {}),
    ],
)
def test_flags_of_absent_features_change_nothing(change, of):
    tables = [from_megatron(_SMALL | of | more, 8) for more in ({}, change)]
    assert tables[0] == tables[1]


def test_gpus_that_do_not_divide(tmp_path):
    with pytest.raises(ValueError, match=r"`world_size` is 8, which .*3\*1\*1 = 3 does not"):
        import_job(_file(tmp_path, _LLAMA), 8, overrides=("layout.tp=3",))
    with pytest.raises(ValueError, match=r"`world_size` is 8, but .* = 4 ranks; .* it follows"):
        import_job(_file(tmp_path, _LLAMA), 8, overrides=("layout.tp=4", "layout.dp=1"))


def test_a_family_has_as_many_nodes_as_the_gpus_need(tmp_path):
    for family, nodes in (("dgx-h100", 3), ("gb200-nvl72", 5)):
        job = import_job(_file(tmp_path, _LLAMA), 20, cluster=family).job
        assert (job.cluster.name, job.cluster.num_nodes) == (family, nodes)


@pytest.mark.parametrize(
    ("flags", "zero"),
    [
        ({"use-distributed-optimizer": True}, 1),
        ({"use-torch-fsdp2": True}, 3),
        ({"use-megatron-fsdp": True, "data-parallel-sharding-strategy": "optim_grads"}, 2),
        ({"use-megatron-fsdp": True, "data-parallel-sharding-strategy": "optim_grads_params"}, 3),
    ],
)
def test_zero_stage_follows_from_sharding_flags(flags, zero):
    assert from_megatron(_SMALL | flags, 8)["training"]["zero"] == zero


_WORDS = {"vocab-file": "bert-large-cased-vocab.txt", "vocab-size": None}


def test_t5_is_an_encoder_and_a_decoder_that_reads_it():
    flags = {"encoder-num-layers": 3, "decoder-num-layers": 2, "vocab-extra-ids": 100}
    flags |= {"encoder-seq-length": 512, "decoder-seq-length": 128, "num-layers": None}
    raw = from_megatron(_SMALL | _WORDS | flags, 8)
    assert raw["training"]["sequence_length"] == 128
    assert raw["model"]["vocab_size"] == 29_184  # 28,996 words and 100 more, padded.
    job: Any = make_job(raw | {"cluster": "dgx-h100", "num_nodes": 1}, pathlib.Path("t5"))
    h, f = 512, 2048
    norm, bias = 2 * h, 4 * h
    attention, mlp = 4 * h * h + bias + norm, 2 * h * f + f + h + norm
    layers = 3 * (attention + mlp) + 2 * (2 * attention + mlp)
    ends = 29_184 * h + job.model.max_positions * h + norm
    assert count_parameters(job.model) == layers + ends


def test_bert_is_known_by_its_words():
    def model(**flags):
        raw = from_megatron(_SMALL | _WORDS | flags, 8)
        return make_job(raw | {"cluster": "dgx-h100", "num_nodes": 1}, pathlib.Path("bert")).model

    both, one = model(), model(**{"bert-no-binary-head": True})
    assert both is not None
    assert one is not None
    assert both.modules["attention"]["causal"] is False
    assert count_parameters(both) - count_parameters(one) == 512 * 513 + 2 * 512


# Commands of which each flag that sets a key changes it in one, and values that do.
_KINDS_OF_COMMANDS = [
    _SMALL,
    {flag: value for flag, value in _SMALL.items() if flag != "bf16"} | {"fp16": True},
    {flag: value for flag, value in _SMALL.items() if flag != "bf16"},
    {flag: value for flag, value in _SMALL.items() if flag not in ("seq-length", "vocab-size")},
    _SMALL | {"vocab-size": None, "tokenizer-type": "GPT2BPETokenizer", "vocab-file": "vocab.json"},
    _SMALL | {"num-experts": 8, "moe-router-num-groups": 4, "moe-router-topk": 2},
    _SMALL | {"num-experts": 8, "moe-shared-expert-intermediate-size": 64},
    _SMALL | {"num-experts": 8, "expert-model-parallel-size": 2},
    _SMALL | {"num-experts": 8, "moe-token-dispatcher-type": "flex"},
    _SMALL | {"cuda-graph-impl": "local"},
    _SMALL | {"multi-latent-attention": True},
    _SMALL | {"hybrid-layer-pattern": "M*-M*-"},
    _SMALL | {"encoder-num-layers": 3},
    _SMALL | {"pipeline-model-parallel-size": 4},
    _SMALL | {"pipeline-model-parallel-size": 2, "num-virtual-stages-per-pipeline-rank": 2},
    _SMALL | {"group-query-attention": True},
    _SMALL | {"vocab-file": "bert-large-cased-vocab.txt"},
    _SMALL | {"fp8": "hybrid"},
    _SMALL | {"use-torch-fsdp2": True},
    _SMALL | {"use-megatron-fsdp": True},
    _SMALL | {"recompute-granularity": "full"},
    _SMALL | {"recompute-granularity": "selective"},
    _SMALL | {"optimizer-cpu-offload": True},
    _SMALL | {"num-experts": 8, "moe-expert-capacity-factor": 1.0},
    _SMALL | {"window-size": "128,0"},
    _SMALL | {"transformer-impl": "local"},
    _SMALL | {"attention-dropout": 0.0, "hidden-dropout": 0.0},
    _SMALL | {"cross-entropy-loss-fusion": True},
    _SMALL | _DELTA,
    _SMALL | {"linear-attention-freq": 2},
    _SMALL | _SPARSE,
    _SMALL | _SPARSE | {"dsa-indexer-topk-freq": 4},
    _SMALL | {"global-batch-size": None},
    _SMALL | {"lora": True},
    _SMALL | {"cpu-offloading-num-layers": 2},
]
_WORDS_OF_FLAGS = """rope RMSNorm hybrid mxfp8 e2m1 unfused local bf16 fp32 te gdn learnable
    a2a flex hybridep full_iteration selective block mlp optim [1]*6+[0]*6 0.0
    Et*2|t*4|t*3|t*3L M*-E M*M* vocab.txt nemotron_2_256k.model TikTokenizer"""
_OTHER_VALUES = (True, False, 2, 3, 64, 0.5, "(128, 0)", *_WORDS_OF_FLAGS.split())
_TABLE = framework("megatron").meanings


def _imported(arguments, key=""):
    """What a job has under a key; nothing where the arguments are refused."""
    try:
        found = from_megatron(arguments, 8)
    except ValueError:
        return None
    for name in filter(None, key.split(".")):
        found = found.get(name, {})
    return found


@pytest.mark.parametrize(
    "name", [n for n, flag in _TABLE.items() if flag.kind == "sets" and flag.what != "world_size"]
)
def test_each_flag_that_sets_a_key_changes_it(name):
    key = _TABLE[name].what
    for command in _KINDS_OF_COMMANDS:
        before = _imported(command, key)
        for value in _OTHER_VALUES:
            after = _imported(command | {name: value}, key)
            # Flags that only say what all jobs have are refused with another value.
            if after != before and (after is not None or key in ("training", "training.zero")):
                return
    pytest.fail(f"`{name}` does not change `{key}`")


@pytest.mark.parametrize("kind", ["no_effect", "costs", "costs_in_fp8"])
def test_each_flag_of_the_list_is_imported_or_refused_as_the_list_says(kind):
    plain, low = _imported(_SMALL), _imported(_SMALL | {"fp8": "hybrid"})
    for listed, flag in _TABLE.items():
        if flag.kind != kind:
            continue
        refused = flag.percent > 10
        noted = kind == "costs" or flag.what in ("data", "tokenizer", "logs", "images")
        for name in (listed.replace("*", "of"), listed.replace("*", "of").replace("-", "_")):
            for value in (True, "3"):
                read = megatron_reader(_SMALL | {name: value})
                if refused and kind == "costs":
                    with pytest.raises(ValueError, match=re.escape(f"({flag.what})")):
                        read_megatron(read, 8)
                else:
                    assert read_megatron(read, 8) == plain, name
                    assert len(read.notes) == noted, name
            if refused and kind == "costs_in_fp8":
                with pytest.raises(ValueError, match=re.escape(f"({flag.what})")):
                    from_megatron(_SMALL | {"fp8": "hybrid", name: True}, 8)
            else:
                assert _imported(_SMALL | {name: False, "fp8": "hybrid"}) == low, name


@pytest.mark.parametrize("name", [n for n, f in _TABLE.items() if f.kind in ("same", "opposite")])
def test_other_names_of_a_flag(name):
    flag = _TABLE[name]
    command = _SMALL | ({"num-experts": 8} if name == "num-moe-experts" else {})
    for value in (True, 4) if flag.kind == "same" else (True, False):
        other = value if flag.kind == "same" else not value
        assert _imported(command | {name: value}) == _imported(command | {flag.what: other})


@pytest.mark.parametrize(
    ("flag", "value", "same"),
    [
        ("no-sequence-parallel", True, {"sequence-parallel": False}),
        ("no_sequence_parallel", "false", {"sequence-parallel": True}),
        ("disable-swiglu", True, {}),
        ("no-swiglu", False, {"swiglu": True}),
        ("overlap-p2p-communication", False, {"no-overlap-p2p-communication": True}),
        ("add_bias_linear", False, {"disable-bias-linear": True}),
        ("bias_linear", "false", {"disable-bias-linear": True}),
        ("no-cpu-offloading", True, {}),
        ("no-async-save", True, {}),
        ("bias-gelu-fusion", True, {}),
    ],
)
def test_flags_that_switch_others_off(flag, value, same):
    command = _SMALL | {"pipeline-model-parallel-size": 4}
    read = megatron_reader(command | {flag: value})
    assert read_megatron(read, 8) == from_megatron(command | same, 8)
    assert read.notes == []


def test_an_unknown_flag_is_a_note_that_names_it(tmp_path, refused, capsys):
    words = "--use-persistent-ckpt-worker --use-better-ckpt-cache 3 --ckpt-cache-of-mine"
    text = (_DATA / "train.sh").read_text().strip()
    path = _file(tmp_path, f"{text} {words}", "train.sh")
    out = tmp_path / "job.toml"
    command = ["import", str(path), "--gpus", "32", "--out", str(out), "--json"]
    said = refused([*command, "--strict"])
    assert "`use-better-ckpt-cache`, a flag that is not known here" in said
    assert not out.exists()
    assert main(command) == 0
    said = capsys.readouterr()
    notes = json.loads(said.out)["notes"]
    assert said.err == "".join(f"prism-jax: note: {note}\n" for note in notes)
    flags = [note.split("`")[1] for note in notes if note.startswith("The flag")]
    assert flags == ["use-better-ckpt-cache", "ckpt-cache-of-mine"]


def test_flags_that_begin_like_harmless_ones_are_not_known():
    read = megatron_reader(_SMALL | {"lr-of-what": 1, "save-to-what": "x"})
    read_megatron(read, 8)
    assert len(read.notes) == 2


def test_ten_invented_flags_change_no_import_of_measured_runs(shared):
    path = shared / "data/megatron_golden/memory.csv"
    invented = {f"use-better-ckpt-cache-{word}": 3 for word in "abcdefghij"}
    imported = 0
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            arguments, gpus = json.loads(row["args"]), int(row["gpus"] or 1024)
            try:
                plain = from_megatron(arguments, gpus)
            except ValueError:
                continue
            read = megatron_reader(arguments | invented)
            assert read_megatron(read, gpus) == plain
            assert sum("use-better-ckpt-cache" in note for note in read.notes) == 10
            imported += 1
    assert imported > 180


@pytest.mark.parametrize(
    ("flags", "size"),
    [
        ({"tokenizer-type": "GPT2BPETokenizer"}, 50_304),
        ({"tokenizer-type": "Llama2Tokenizer"}, 32_000),
        ({"tokenizer-type": "HuggingFaceTokenizer", "tokenizer-model": "Qwen/Qwen3-8B"}, 151_936),
        ({"tokenizer-type": "HuggingFaceTokenizer"}, 128_256),
        ({}, 128_256),
    ],
)
def test_a_vocabulary_that_is_not_said_is_that_of_the_tokenizer(flags, size):
    read = megatron_reader(_SMALL | {"vocab-size": None} | flags)
    assert read_megatron(read, 8)["model"]["vocab_size"] == size
    (note,) = read.notes
    assert "`vocab-size`" in note


def test_windows_of_megatron():
    def layers(**flags):
        model = from_megatron(_SMALL | flags, 8)["model"]
        return model["modules"], [
            (layer["modules"][0], layer["repeat"]) for layer in model["layers"]
        ]

    modules, found = layers(**{"window-size": "127,0", "window-attn-skip-freq": 2})
    assert modules["local"]["window"] == 128
    assert found == [("local", 1), ("attention", 1)] * 6
    assert layers(**{"window-size": [127, 0]})[1] == [("local", 12)]
    skips = {"window-size": "(127, 0)", "window-attn-skip-freq": "[1]*8+[0]*4"}
    assert layers(**skips)[1] == [("local", 8), ("attention", 4)]
    assert layers(**{"window-size": "-1,0"})[1] == [("attention", 12)]


@pytest.mark.parametrize("name", _RECENT)
def test_recent_models_have_the_parameters_that_their_makers_say(name, tmp_path):
    """Within 1 %: sinks of attention, biases of routers and what is noted are not counted."""
    config, row = CONFIGS[name], _ROWS[name]
    job: Any = import_job(_file(tmp_path, config), 64, batch=256).job
    assert count_parameters(job.model) == pytest.approx(row["parameters"], rel=0.01)
    assert {kind for layer in job.model.layers for kind in layer.modules} == {*row["kinds"]}
    inner = config.get("text_config", config)
    assert job.model.num_layers == inner["num_hidden_layers"]


def test_layers_of_recent_models(tmp_path):
    def layers(config):
        model = import_job(_file(tmp_path, config), 64, batch=64).job.model
        return [(*layer.modules, layer.repeat) for layer in model.layers][:4]

    assert layers(CONFIGS["qwen3-next"])[:2] == [("linear", "moe", 3), ("attention", "moe", 1)]
    assert layers(CONFIGS["llama-4-maverick"])[:2] == [
        ("attention", "mlp", 1),
        ("attention", "moe", 1),
    ]
    first = {"layer_types": ["full_attention"] * 9 + ["sliding_attention"] * 27}
    assert layers(_GPT_OSS | first) == [("attention", "moe", 9), ("local", "moe", 27)]
    for wrong in (["other"] * 36, ["full_attention"], "full_attention"):
        with pytest.raises(ValueError, match="`layer_types`"):
            layers(_GPT_OSS | {"layer_types": wrong})


def _command(path, out, *more):
    return ["import", str(path), "--gpus", "64", "--out", str(out), *more]


def test_import_asks_for_a_batch_that_is_not_known(tmp_path, answered, refused):
    path, out = _file(tmp_path, _LLAMA), tmp_path / "job.toml"
    split = ["--set", "layout.tp=8"]
    assert "`--batch`" in refused(_command(path, out, *split))
    assert not out.exists()
    assert "batch of 20 sequences is not a multiple of dp*microbatch_size = 8*1" in refused(
        _command(path, out, *split, "--batch", "20")
    )
    assert (
        answered(_command(path, out, *split, "--batch", "32", "--json"))["global_batch_size"] == 32
    )
    more = ["--set", "schedule.num_microbatches=3", "--force", "--json"]
    assert "say the same; give one of them" in refused(
        _command(path, out, *split, *more, "--batch", "32")
    )
    assert answered(_command(path, out, *split, *more))["global_batch_size"] == 24
    interleaved = ["schedule.kind=interleaved-1f1b", "schedule.virtual_stages=2", "layout.pp=4"]
    split = [word for change in interleaved for word in ("--set", change)]
    assert main(_command(path, out, *split, "--batch", "64", "--force", "--json")) == 0
    assert load_job(out).schedule.num_microbatches == 4


def test_import_says_which_published_batch_it_took(tmp_path, answered, refused):
    path, out = _file(tmp_path, CONFIGS["deepseek-v3"]), tmp_path / "job.toml"
    said = answered(_command(path, out, "--allow-oom", "--json"))
    assert (said["global_batch_size"], said["sequence_length"]) == (15360, 4096)
    assert "15,360 sequences (of 4,096 tokens each; DeepSeek-V3" in said["notes"][0]
    other = _command(path, out, "--allow-oom", "--force")
    assert "a published batch of 15,360 sequences is not a multiple" in refused(
        [*other[:3], "7", *other[4:]]
    )


def test_a_batch_for_arguments_of_megatron():
    job = import_job(_DATA / "train.sh", 32, batch=32).job
    assert job.schedule.num_microbatches == 8


def test_import_of_a_job_beyond_memory_suggests_overrides(tmp_path, capsys):
    path, out = _file(tmp_path, _LLAMA), tmp_path / "job.toml"
    assert main(_command(path, out, "--batch", "64")) == 1
    *_, said = capsys.readouterr().err.splitlines()
    assert "`--set training." in said
    assert "job.toml is written" in said
    assert load_job(out).layout.dp == 64


def test_import_never_overwrites_a_file_without_force(tmp_path, refused):
    path, out = _file(tmp_path, _LLAMA), tmp_path / "job.toml"
    out.write_text("mine")
    command = _command(path, out, "--batch", "64", "--set", "layout.tp=8")
    assert "`--force`" in refused(command)
    assert out.read_text() == "mine"
    assert main([*command, "--force"]) == 0
    assert out.read_text() != "mine"
    out.unlink()
    out.symlink_to(tmp_path / "elsewhere.toml")
    assert main(command) == 2


_LINE = " ".join(f"--{flag}" if v is True else f"--{flag} {v}" for flag, v in _SMALL.items())
_LONG = {
    "40 million layers": ("--num-layers 40000000", "`num-layers` is 40000000"),
    "a billion stages": (
        "--pipeline-model-parallel-layout (t|)*1000000000",
        "`pipeline-model-parallel-layout` of repeats",
    ),
    "repeats of repeats": (
        "--pipeline-model-parallel-layout E((((t|)*9999)*9999)*9999)L",
        "more layers than any model has",
    ),
    "many repeats": (
        f"--pipeline-model-parallel-layout {'t*99999' * 100_000}",
        "more layers than any model has",
    ),
    "repeats of a long list": (
        f"--num-experts 8 --moe-layer-freq [{'1,' * 400_000}1]*99999",
        "more layers than any model has",
    ),
    "a long pattern": (f"--hybrid-layer-pattern {'M*-' * 300_000}", "of 900000 layers"),
    "10^15 ranks": (
        f"--pipeline-model-parallel-size {10**15} --decoder-first-pipeline-num-layers 2",
        "stages for 12 layers",
    ),
    "a word of 900 kB": (f"--data-path {'x' * 900_000}", ""),
    "a flag of 900 kB": (f"--{'x' * 900_000}", ""),
    "many words": (f"--data-path '{'x ' * 450_000}'", ""),
    "an open quotation": (f"--data-path '{'x ' * 450_000}", "a `'` is not closed"),
    "a flag of 450,000 sections": (f"--{'a.' * 450_000}b 3", ""),
    "20,000 flags of data": (" ".join(f"--data-x{i} 1" for i in range(20_000)), ""),
    "100,000 flags": (" ".join(f"--z{i}" for i in range(100_000)), "100000 flags"),
}


@pytest.mark.parametrize("name", _LONG)
def test_input_that_took_minutes_and_gigabytes(name, tmp_path):
    words, said = _LONG[name]
    path = _file(tmp_path, f"{_LINE} {words}", "train.sh")
    seconds, most = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if said:
        assert len(refusal(lambda: import_job(path, 8), said)) < 600
    else:
        import_job(path, 8)
    assert time.process_time() - seconds < 5
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - most < 2**18  # In KiB.


def test_words_of_a_command_are_those_of_a_shell():
    text = r"""--a 'x y' --b "say \"no\"" --c=d\ e --f g'h'"i"
--j \
  k # --l
"""
    assert parsed(text) == {"a": "x y", "b": 'say "no"', "c": "d e", "f": "ghi", "j": "k"}


_ANY = (
    *(True, False, None, 0, 1, 3, 8, -1, 0.5, 1e30, 10**15, 2**31, 10**400, "", "x", "\x00", "é"),
    *(
        "nan",
        "inf",
        "1e400",
        "true",
        "1,0",
        "(1, 0)",
        "[1]*12",
        "Et*3|t*9L",
        "M*-E",
        "rope",
        "full",
    ),
    *("selective", "flex", "mxfp8", [], [1, 2], {}, {"a": [1]}, ["full_attention"]),
)


@pytest.mark.parametrize("seed", range(60))
def test_random_input_makes_a_job_or_one_sentence(seed, tmp_path):
    draw = random.Random(seed)
    if seed % 3:
        flags = dict(_SMALL)
        for _ in range(draw.choice((1, 2, 4))):
            flags[draw.choice([*_TABLE])] = draw.choice(_ANY)
        text, name = "\n".join(f"--{flag}: {value}" for flag, value in flags.items()), "a.yaml"
        if seed % 3 == 1:
            text, name = text.replace(":", "").replace(" True", ""), "a.sh"
    else:
        config = copy.deepcopy(draw.choice([*CONFIGS.values()]))
        for _ in range(draw.choice((1, 2, 4))):
            inner = draw.choice((config, config.get("text_config")))
            inner = inner if isinstance(inner, dict) else config
            inner[draw.choice([*inner])] = draw.choice(_ANY)
        text, name = json.dumps(config), "config.json"
    try:
        found = import_job(_file(tmp_path, text, name), draw.choice((8, 64)), batch=64)
        memory(found.job)
    except ValueError as error:
        said = str(error)
        assert said.endswith(".")
        assert "\n" not in said
    else:
        assert all(note.endswith(".") for note in found.notes)


@pytest.mark.parametrize("name", ["c06_moe_layer_recompute.sh", "c06_capacity_factor.sh"])
def test_models_with_experts_that_ran_on_16_gpus_fit(shared, name):
    job = import_job(shared / "cases" / name, 16, cluster="hgx-h800").job
    assert memory(job).fits


@pytest.mark.parametrize(
    ("count", "attention", "mlp", "pattern"),
    # As `allocate_layers` of Megatron-LM (core 0.15) gives them.
    [(8, 0.25, 0.25, "MM*-M*M-"), (12, 0.08, 0.5, "M-M-M-*-M-M-"), (10, 0.0, 0.5, "M-M-M-M-M-")],
)
def test_layers_in_shares_are_spread_as_in_megatron(count, attention, mlp, pattern):
    sizes = {"hidden-size": 512, "num-attention-heads": 8, "max-position-embeddings": 512}
    shares = {"hybrid-attention-ratio": attention, "hybrid-mlp-ratio": mlp, "num-layers": count}
    further = {"bf16": True, "vocab-size": 1000, "mamba-num-heads": 16, "mamba-head-dim": 64}
    tables = [
        from_megatron(sizes | further | layers, 1)["model"]["layers"]
        for layers in (shares, {"hybrid-layer-pattern": pattern})
    ]
    assert tables[0] == tables[1]
