"""Foreign configurations: what they say is in the job, and what a job cannot say is named."""

import json
import pathlib

import pytest

from prism_jax.cli import main
from prism_jax.data import load_job, make_job
from prism_jax.importers import from_megatron, import_job
from prism_jax.importers._job import parse_command, parse_model_config
from prism_jax.importers._megatron_layers import repeated
from prism_jax.importers._megatron_schedule import layers_of_layout
from prism_jax.workload import count_parameters


def _shape(kind, hidden, ffn, layers, heads, words, expert_ffn=None):
    """What all kinds that came after Llama say."""
    of_experts = {} if expert_ffn is None else {"moe_intermediate_size": expert_ffn}
    return of_experts | {
        "model_type": kind,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "vocab_size": words,
        "max_position_embeddings": 131072,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    }


_LLAMA = _shape("llama", 4096, 14336, 32, (32, 8), 128256)
_EXPERTS = {"num_local_experts": 8, "num_experts_per_tok": 2}
_LATENTS = {
    "moe_layer_freq": 1,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}

# The keys of the published files that say the shape, and how many parameters the published weights
# have (the tensors' total in each model's index on Hugging Face).
_PUBLISHED = {
    "llama-3.1-8b": (_LLAMA, 8_030_261_248),
    "mistral-7b": (
        _LLAMA | {"model_type": "mistral", "vocab_size": 32000, "sliding_window": 4096},
        7_241_732_096,
    ),
    "mixtral-8x7b": (
        _LLAMA | _EXPERTS | {"model_type": "mixtral", "vocab_size": 32000, "sliding_window": None},
        46_702_792_704,
    ),
    "qwen2-7b": (
        _shape("qwen2", 3584, 18944, 28, (28, 4), 152064)
        | {"sliding_window": 131072, "use_sliding_window": False},
        7_615_616_512,
    ),
    "qwen3-8b": (
        _shape("qwen3", 4096, 12288, 36, (32, 8), 151936)
        | {"head_dim": 128, "attention_bias": False, "layer_types": ["full_attention"] * 36},
        8_190_735_360,
    ),
    "qwen3-235b-a22b": (
        _shape("qwen3_moe", 4096, 14336, 94, (64, 4), 151936, 1536)
        | {"num_experts": 128, "num_experts_per_tok": 8, "head_dim": 128, "decoder_sparse_step": 1},
        235_093_634_560,
    ),
    "qwen1.5-moe-a2.7b": (
        _shape("qwen2_moe", 2048, 5632, 24, (16, 16), 151936, 1408)
        | {"num_experts": 60, "num_experts_per_tok": 4, "shared_expert_intermediate_size": 5632},
        14_315_784_192,
    ),
    "deepseek-v2": (
        _shape("deepseek_v2", 5120, 12288, 60, (128, 128), 102400, 1536)
        | _LATENTS
        | {"n_routed_experts": 160, "n_shared_experts": 2, "num_experts_per_tok": 6}
        | {"first_k_dense_replace": 1},
        235_741_434_880,
    ),
    "deepseek-v3": (
        _shape("deepseek_v3", 7168, 18432, 61, (128, 128), 129280, 2048)
        | _LATENTS
        | {"n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8}
        | {"first_k_dense_replace": 3, "num_nextn_predict_layers": 1},
        671_026_404_352,
    ),
    "gpt2": (
        {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257}
        | {"n_positions": 1024, "activation_function": "gelu_new", "resid_pdrop": 0.1},
        124_439_808,
    ),
    "gpt-neox-20b": (
        {"model_type": "gpt_neox", "hidden_size": 6144, "num_hidden_layers": 44}
        | {"num_attention_heads": 64, "intermediate_size": 24576, "vocab_size": 50432}
        | {"max_position_embeddings": 2048, "hidden_act": "gelu_fast"},
        20_554_567_680,
    ),
    "gemma-7b": (
        {"model_type": "gemma", "hidden_size": 3072, "num_hidden_layers": 28, "head_dim": 256}
        | {"num_attention_heads": 16, "num_key_value_heads": 16, "intermediate_size": 24576}
        | {"vocab_size": 256000, "max_position_embeddings": 8192, "hidden_act": "gelu"},
        8_537_680_896,
    ),
}


def _file(tmp_path, config, name="config.json"):
    path = tmp_path / name
    path.write_text(config if isinstance(config, str) else json.dumps(config))
    return path


@pytest.mark.parametrize("name", _PUBLISHED)
def test_models_of_hugging_face_have_their_parameters(name, tmp_path):
    config, parameters = _PUBLISHED[name]
    job = import_job(_file(tmp_path, config), 64, overrides=("layout.tp=4",))
    assert job.model is not None
    assert count_parameters(job.model) == parameters
    assert (job.layout.tp, job.layout.dp) == (4, 16)


def test_groups_of_experts_are_imported(tmp_path):
    config = _PUBLISHED["deepseek-v3"][0] | {"n_group": 8, "topk_group": 4}
    limits = []
    for more in ({}, {"topk_method": "greedy"}, {"n_group": 1, "topk_group": 1}):
        model = import_job(_file(tmp_path, config | more), 64, overrides=("layout.tp=4",)).model
        assert model is not None
        assert model.modules is not None
        limits.append(model.modules["moe"].get("top_k_groups"))
    assert limits == [4, None, None]
    experts = {"num-experts": 64, "moe-router-topk": 6, "moe-router-num-groups": 8}
    for topk, kept in ((None, 8), (3, 3)):
        raw = from_megatron(_SMALL | experts | {"moe-router-group-topk": topk}, 8, "here")
        assert raw["model"]["modules"]["moe"]["top_k_groups"] == kept
    one_group = _SMALL | {"num-experts": 64, "moe-router-topk": 6, "moe-router-group-topk": 1}
    assert "top_k_groups" not in from_megatron(one_group, 8, "here")["model"]["modules"]["moe"]


def test_an_imported_job_is_a_file_that_can_be_read(tmp_path, capsys):
    config, out = _file(tmp_path, _PUBLISHED["mixtral-8x7b"][0]), tmp_path / "mixtral.toml"
    options = ["--set", "layout.pp=4", "--set", "layout.ep=8", "--set", "layout.etp=1"]
    options += ["--set", "training.sequence_length=2048"]
    words = ["import", str(config), "--gpus", "64", "--out", str(out), "--json"]
    assert main([*words, *options, "--set", "schedule.num_microbatches=8"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["parameters"] == 46_702_792_704
    job = load_job(out)
    assert (job.layout.pp, job.layout.ep, job.layout.dp, job.layout.world_size) == (4, 8, 16, 64)
    assert main(["memory", str(out), "--json"]) == 0
    ranks = json.loads(capsys.readouterr().out)["ranks"]
    assert [rank["rank"] for rank in ranks] == [0, 1, 2, 3]
    for rank in ranks:
        assert rank["bytes"] == pytest.approx(sum(rank["parts"].values()))


_COMMAND = r"""#!/bin/bash
# A job of 32 GPUs.
MODEL_ARGS=(
    --num-layers 32 --hidden-size 4096 \
    --ffn-hidden-size=14336
    --num-attention-heads 32 --group-query-attention --num-query-groups 8
    --swiglu --normalization RMSNorm --disable-bias-linear
    --position-embedding-type rope --max-position-embeddings 8192
    --untie-embeddings-and-output-weights --vocab-size 128256
    --attention-dropout 0.0 --hidden-dropout 0.0
)
torchrun --nproc_per_node 8 pretrain_gpt.py --seq-length 8192 --micro-batch-size 1 \
    --global-batch-size 64 --tensor-model-parallel-size 4 --pipeline-model-parallel-size 2 \
    --num-layers-per-virtual-pipeline-stage 4 --sequence-parallel --bf16 \
    --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --lr 3e-4
"""


def test_a_command_of_megatron(tmp_path):
    job = import_job(_file(tmp_path, _COMMAND, "train.sh"), 32)
    assert job.model is not None
    assert job.training is not None
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
    """A line ends a flag, and a text of flags is read as a list of them is."""
    script = """
ARGS="--num-layers 4 --swiglu"
MORE=" --bf16
  --lr 1e-4"  # --fp8-format hybrid
LIST=(--sequence-parallel --hidden-size 64)
torchrun pretrain_gpt.py $ARGS --tp-comm-overlap
echo done
"""
    switches = dict.fromkeys(("swiglu", "bf16", "sequence-parallel", "tp-comm-overlap"), True)
    numbers = {"num-layers": "4", "lr": "1e-4", "hidden-size": "64"}
    assert parse_command(script) == switches | numbers


def test_defaults_of_megatron():
    grouped = from_megatron(_SMALL | {"group-query-attention": True}, 8, "here")
    assert grouped["model"]["num_kv_heads"] == 1
    half = _SMALL | {"bf16": False, "fp16": True, "perform-rl-step": False}
    assert from_megatron(half, 8, "here")["training"]["gradient_dtype"] == "fp16"
    half["accumulate-allreduce-grads-in-fp32"] = True
    assert from_megatron(half, 8, "here")["training"]["gradient_dtype"] == "fp32"
    assert "token_dispatcher" not in grouped["training"]
    sent = {"moe-token-dispatcher-type": "flex", "moe-shared-expert-overlap": True}
    training = from_megatron(_SMALL | sent, 8, "here")["training"]
    assert (training["token_dispatcher"], training["overlap_shared_experts"]) == ("flex", True)
    blockwise = {"fp8-format": "e4m3", "fp8-recipe": "blockwise"}
    assert from_megatron(_SMALL | blockwise, 8, "here")["training"]["dtype"] == "fp8"
    micro = blockwise | {"fp8-recipe": "mxfp8", "main-grads-dtype": "fp32"}
    assert from_megatron(_SMALL | micro, 8, "here")["training"]["dtype"] == "mxfp8"
    both = {"fp8-format": "hybrid", "fp8": "hybrid"}
    assert from_megatron(_SMALL | both, 8, "here")["training"]["dtype"] == "fp8"
    pipeline = {"no-overlap-p2p-communication": True, "pipeline-model-parallel-size": 4}
    assert from_megatron(_SMALL | pipeline, 8, "here")["schedule"]["blocking"]
    assert "blocking" not in grouped["schedule"]
    padded = from_megatron(_SMALL | {"padded-vocab-size": 50_260}, 8, "here")
    assert padded["model"]["vocab_size"] == 50_260


def test_a_file_says_what_a_command_says():
    flags = parse_command("--num-layers 4 --swiglu --lr 1e-4 --hidden-size=64")
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
    assert parse_model_config(text) == flags


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
    raw = from_megatron(more, 8, "here")
    assert raw["schedule"]["layers_per_stage"] == [2, 4, 4, 2]


def test_patterns_of_layers():
    pattern = {"hybrid-layer-pattern": "M-M*|E-M*", "pipeline-model-parallel-size": 2}
    raw = from_megatron(_SMALL | pattern | {"num-experts": 8}, 8, "here")
    kinds = [
        name for layer in raw["model"]["layers"] for name in layer["modules"] * layer["repeat"]
    ]
    assert kinds == ["mamba", "mlp", "mamba", "attention", "moe", "mlp", "mamba", "attention"]
    frequency = {"num-experts": 8, "moe-layer-freq": "([0]*2+[1]*10)", "moe-router-topk": 2}
    raw = from_megatron(_SMALL | frequency, 8, "here")
    assert [layer["repeat"] for layer in raw["model"]["layers"]] == [2, 10]
    assert raw["model"]["vocab_size"] == 50304


@pytest.mark.parametrize(
    ("config", "parts"),
    [
        (_LLAMA | {"model_type": "rwkv"}, ["`model_type` rwkv", "llama"]),
        ({"hidden_size": 64}, ["`model_type` is missing"]),
        (_LLAMA | {"num_attention_heads": 33}, ["`num_attention_heads` 33", "`hidden_size` 4096"]),
        (_LLAMA | {"num_key_value_heads": 5}, ["`num_key_value_heads` 5"]),
        (_LLAMA | {"hidden_size": None}, ["`hidden_size` is missing"]),
        (_LLAMA | {"vocab_size": "many"}, ["`vocab_size` is many"]),
        (_LLAMA | {"num_hidden_layers": 10**12}, ["num_layers", "repeat"]),
        (_LLAMA | {"num_local_experts": 8}, ["`num_local_experts`"]),
        (_LLAMA | {"hidden_act": "sine"}, ["`hidden_act` sine"]),
        (_PUBLISHED["mixtral-8x7b"][0] | {"num_experts_per_tok": 9}, ["`top_k` = 9"]),
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


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ({"use-megatron-fsdp": True, "data-parallel-sharding-strategy": "all"}, ["strategy` all"]),
        (
            {"use-megatron-fsdp": True, "outer-dp-sharding-strategy": "optim"},
            ["sharding-strategy` optim"],
        ),
        ({"rampup-batch-size": "8 8 100"}, ["a batch that grows"]),
        ({"moe-expert-capacity-factor": 1.0}, ["experts that drop tokens"]),
        ({"fp8-format": "hybrid", "no-fp8-wgrad": True}, ["`no-fp8-wgrad`", "another dtype"]),
        (
            {"fp8-format": "hybrid", "first-last-layers-bf16": True, "fp8-param-gather": True},
            ["`first-last-layers-bf16` (layers in", "gathered in fp8"],
        ),
        ({"fp8-format": "hybrid", "fp8-recipe": "custom"}, ["`fp8-recipe` custom"]),
        ({"main-grads-dtype": "bf16"}, ["`main-grads-dtype` bf16"]),
        (
            {
                "no-overlap-p2p-communication": True,
                "pipeline-model-parallel-size": 4,
                "num-virtual-stages-per-pipeline-rank": 3,
            },
            ["`no-overlap-p2p-communication` with several stages on a rank"],
        ),
        (
            _OVERLAPPED | {"pipeline-model-parallel-size": 4},
            ["`overlap-moe-expert-parallel-comm`", "one stage each"],
        ),
        (
            {"encoder-num-layers": 12, "pipeline-model-parallel-size": 2},
            ["first stages are an encoder"],
        ),
        ({"bf16": False}, ["float32"]),
        ({"optimizer": "muon"}, ["`optimizer` muon"]),
        ({"global-batch-size": 33}, ["`global-batch-size` 33"]),
        ({"tensor-model-parallel-size": 3}, ["3*1*1"]),
        ({"hidden-size": "wide"}, ["`hidden-size` is wide"]),
        ({"num-attention-heads": 7}, ["`num-attention-heads` 7 does not divide"]),
        ({"sequence-parallel": "echo"}, ["`sequence-parallel` is echo", "true or false"]),
        ({"hidden-dropout": "a"}, ["`hidden-dropout` is a", "from 0 to 1"]),
        ({"normalization": "ScaleNorm"}, ["`normalization` ScaleNorm"]),
        ({"moe-layer-freq": "os.system('x')", "num-experts": 8}, ["`moe-layer-freq`"]),
        ({"moe-layer-freq": "[1]*3", "num-experts": 8}, ["3 layers of 12"]),
        ({"pipeline-model-parallel-layout": "tE|L"}, ["ends"]),
        ({"hybrid-layer-pattern": "MX"}, ["with X"]),
    ],
)
def test_arguments_that_cannot_be_expressed_are_named(change, parts):
    with pytest.raises(ValueError, match="here: this cannot be expressed") as raised:
        from_megatron(_SMALL | change, 8, "here")
    assert "\n" not in str(raised.value)
    for part in parts:
        assert part in str(raised.value)


@pytest.mark.parametrize(("pp", "stages"), [(1, 1), (4, 3)])
def test_exchanges_beside_another_microbatch_are_imported(pp, stages):
    pipeline = {
        "pipeline-model-parallel-size": pp,
        "num-virtual-stages-per-pipeline-rank": stages,
    }
    schedule = from_megatron(_SMALL | _OVERLAPPED | pipeline, 8, "here")["schedule"]
    assert (schedule["kind"], schedule["virtual_stages"]) == ("overlapped-1f1b", stages)


@pytest.mark.parametrize(
    ("change", "of"),
    [
        ({"no-fp8-wgrad": True, "fp8-param-gather": True, "fp8-recipe": "tensorwise"}, {}),
        ({"overlap-moe-expert-parallel-comm": True}, _EXPERTS | {"expert-model-parallel-size": 1}),
        ({"no-overlap-p2p-communication": True}, _OVERLAPPED),
        ({"no-gradient-accumulation-fusion": True, "exp-avg-dtype": "fp32"}, {}),
    ],
)
def test_flags_of_what_is_not_there_change_nothing(change, of):
    tables = [from_megatron(_SMALL | of | more, 8, "here") for more in ({}, change)]
    assert tables[0] == tables[1]


@pytest.mark.parametrize(
    ("text", "name", "part"),
    [
        ("echo", "job.sh", "no flags"),
        ("--a 'b", "job.sh", "cannot be read"),
        ("MODEL_ARGS:\n  - --x\n", "job.yaml", "line 2"),
        ("", "job.yaml", "no flags"),
        ("x", "job.xml", "give a `.json`"),
    ],
)
def test_files_that_are_no_arguments(text, name, part, tmp_path):
    with pytest.raises(ValueError, match=r"job\.") as raised:
        import_job(_file(tmp_path, text, name), 8)
    assert part in str(raised.value)


def test_gpus_that_do_not_divide(tmp_path):
    with pytest.raises(ValueError, match=r"3\*1\*1 does not divide 8 GPUs"):
        import_job(_file(tmp_path, _LLAMA), 8, overrides=("layout.tp=3",))
    with pytest.raises(ValueError, match="makes 4 GPUs, not 8"):
        import_job(_file(tmp_path, _LLAMA), 8, overrides=("layout.tp=4", "layout.dp=1"))


def test_a_family_has_as_many_nodes_as_the_gpus_need(tmp_path):
    for family, nodes in (("dgx-h100", 3), ("gb200-nvl72", 5)):
        job = import_job(_file(tmp_path, _LLAMA), 20, cluster=family)
        assert job.cluster is not None
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
def test_what_replicas_share(flags, zero):
    assert from_megatron(_SMALL | flags, 8, "here")["training"]["zero"] == zero


_WORDS = {"vocab-file": "bert-large-cased-vocab.txt", "vocab-size": None}


def test_t5_is_an_encoder_and_a_decoder_that_reads_it():
    flags = {"encoder-num-layers": 3, "decoder-num-layers": 2, "vocab-extra-ids": 100}
    flags |= {"encoder-seq-length": 512, "decoder-seq-length": 128, "num-layers": None}
    raw = from_megatron(_SMALL | _WORDS | flags, 8, "here")
    assert raw["training"]["sequence_length"] == 128
    assert raw["model"]["vocab_size"] == 29_184  # 28,996 words and 100 more, padded.
    job = make_job(raw | {"cluster": "dgx-h100", "num_nodes": 1}, pathlib.Path("t5"))
    assert job.model is not None
    h, f = 512, 2048
    norm, bias = 2 * h, 4 * h
    attention, mlp = 4 * h * h + bias + norm, 2 * h * f + f + h + norm
    layers = 3 * (attention + mlp) + 2 * (2 * attention + mlp)
    ends = 29_184 * h + job.model.max_positions * h + norm
    assert count_parameters(job.model) == layers + ends


def test_bert_is_known_by_its_words():
    def model(**flags):
        raw = from_megatron(_SMALL | _WORDS | flags, 8, "here")
        return make_job(raw | {"cluster": "dgx-h100", "num_nodes": 1}, pathlib.Path("bert")).model

    both, one = model(), model(**{"bert-no-binary-head": True})
    assert both is not None
    assert one is not None
    assert both.modules is not None
    assert both.modules["attention"]["causal"] is False
    assert count_parameters(both) - count_parameters(one) == 512 * 513 + 2 * 512
