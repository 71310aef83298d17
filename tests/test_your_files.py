"""Scripts and configurations of frameworks: what a shell would make of them, and what a job has."""

import csv
import io
import json
import os
import pathlib
import random
import re
import shutil
import subprocess
import tomllib
from typing import Any

import pytest

from prism_jax.cli import main
from prism_jax.data import job_keys, load_job
from prism_jax.importers import GpusNotSaidError, NotImportableError, import_job
from prism_jax.importers._arithmetic import arithmetic
from prism_jax.importers._documents import document
from prism_jax.importers._formulas import keys_of
from prism_jax.importers._frameworks import framework, framework_names
from prism_jax.importers._shell import run_script
from prism_jax.importers._training_files import well_known
from prism_jax.workload import count_parameters

from .helpers import refusal


_SCRIPTS = pathlib.Path(__file__).parent / "data/scripts"

_SHOW = 'show() { printf "<"; [ $# = 0 ] || printf "%s|" "$@"; echo ">"; }\n'


def test_words_are_those_that_a_shell_makes():
    """Bash itself is the oracle of the words of commands `show`."""
    snippets = (_SCRIPTS.parent / "snippets.sh").read_text()
    assert _shown(snippets) == _shown_by_bash(snippets)


def _shown(text):
    """The words of each command `show`, in brackets."""
    found = [words[1:] for words in run_script(text).commands if words[0] == "show"]
    return ["<" + "".join(f"{word}|" for word in words) + ">" for words in found]


def _shown_by_bash(text):
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("there is no bash")
    words = [bash, "--norc", "-c", _SHOW + text]
    run = subprocess.run(words, capture_output=True, text=True, check=False)
    assert run.stderr == ""
    return run.stdout.splitlines()


_HERE = "read -r -d '' NAME <<EOF || true\n$Y q\nEOF\nBRANCH"
# Forms of scripts, of which each word in capitals is drawn anew.
_FORMS = {
    "VALUE": ("1", "2", "'a b'", '""', "x.sh"),
    "NAME": ("X", "Y", "Z"),
    "BLOCK": ("SIMPLE", "BRANCH", "BRANCH\nSIMPLE", "SIMPLE; BRANCH", "BRANCH; BRANCH", _HERE),
    "TEST": ("ONE", "! ONE", "ONE && ONE", "ONE ||\n! ONE"),
    "ONE": (
        *('[ "$NAME" = VALUE ]', "[[ $NAME != VALUE ]]", '[ -z "$NAME" ]', "true", "false"),
        *("[[ -n $NAME && $Y == x* ]]", "[[ ! -n $NAME || $Y == 1 ]]", "((N > 1))"),
        *('[ "$N" -gt 1 -o "$N" -lt 1 ]', "show NAME"),
    ),
    "SIMPLE": (
        *("NAME=VALUE", "show $NAME", "NAME+=1", "N=$((N + 1))", "export NAME=VALUE N=2"),
        *("show ${NAME:-z} ${NAME+y}", 'L+=(VALUE $NAME); show "${L[@]}"'),
    ),
    "BRANCH": (
        *("TEST && SIMPLE", "TEST || SIMPLE", "TEST && SIMPLE || show other"),
        *(
            "TEST && { BLOCK\n}",
            "TEST || {\nBLOCK\n} && show after",
            "for V in VALUE;do BLOCK\ndone",
        ),
        *(
            "if TEST;then BLOCK\nfi",
            "if TEST\nthen\nBLOCK\nelse\nBLOCK\nfi",
            "f() { BLOCK\n}; f; true",
        ),
        *(
            "if TEST; then BLOCK\nelif TEST;then BLOCK\nelse BLOCK\nfi",
            "function g {\n BLOCK\n}\ng\ntrue",
        ),
        *(
            "TEST && if true; then BLOCK\nfi",
            "while false;do BLOCK\ndone",
            "until true\ndo BLOCK\ndone",
        ),
        "case $NAME in VALUE|2) BLOCK\n;;\n x*) BLOCK\n;; *) BLOCK\nesac",
    ),
}


def _script(rng, form, depth):
    def drawn(match):
        forms = _FORMS[match[0]]
        shallow = match[0] == "BLOCK" and not depth
        return _script(
            rng, "SIMPLE" if shallow else rng.choice(forms), depth - (match[0] == "BLOCK")
        )

    return re.sub("|".join(_FORMS), drawn, form)


@pytest.mark.parametrize(
    "seeds", [range(60), pytest.param(range(60, 1500), marks=pytest.mark.slow)]
)
def test_branches_are_those_that_a_shell_takes(seeds):
    """Of random scripts, with bash as the oracle."""
    for seed in seeds:
        rng = random.Random(seed)
        text = f"N=1\nX=1 Y= Z=x.sh\nL=(0)\n{_script(rng, 'BLOCK', 4)}\n"
        assert _shown(text) == _shown_by_bash(text), text


def test_arithmetic_is_that_of_whole_numbers():
    rng = random.Random(0)
    for _ in range(200):
        numbers = [str(rng.randrange(1, 90)) for _ in range(4)]
        text = f"({numbers[0]} + {numbers[1]}) * {numbers[2]} - x / {numbers[3]} % 7"
        number = (int(numbers[0]) + int(numbers[1])) * int(numbers[2])
        assert arithmetic(text, lambda name: "55") == number - 55 // int(numbers[3]) % 7


@pytest.mark.parametrize(
    "text",
    [
        "",
        "1 +",
        "(1",
        "1 / 0",
        "x",
        "2 ** 3",
        "9" * 30,
        f"{2**63 - 1} * 2",
        "f(1)",
        "(" * 99,
        "1 1",
    ],
)
def test_what_is_no_arithmetic_is_refused(text):
    refusal(lambda: arithmetic(text, lambda name: ""), "")


# By file: billions of parameters, GPUs, sequences in a step, and keys of the job.
_IMPORTED = {
    "megatron_llama3_8b.sh": (8.03, 8, 128, {"layout.cp": 2, "training.dtype": "fp8"}),
    "branches.sh": (7.47, 64, 512, {"layout.tp": 4, "training.recompute": "full"}),
    "slurm.sh": (12.8, 32, 128, {"layout.pp": 2, "training.sequence_length": 4096}),
    "sbatch_heredoc.sh": (0.355, 16, 64, {"training.dtype": "fp16"}),
    "dump.txt": (3.02, 16, 128, {"layout.tp": 2, "training.attention": "flash"}),
    "recipe.yaml": (0.89, 64, 256, {"layout.tp": 2}),
    "nested.yaml": (0.355, 64, 256, {"layout.pp": 2}),
    "nemo_15b.yaml": (15.6, 16, 64, {"layout.tp": 4, "training.software": "nemo-2024"}),
    "nemo_overrides.sh": (13.4, 16, 32, {"training.software": "nemo-2023"}),
    "megatron_bridge_llama3_70b.yaml": (70.6, 64, 256, {"schedule.virtual_stages": 5}),
    "torchtitan_llama3_8b.toml": (8.03, 8, 16, {"training.recompute": "by-op"}),
    "llm_foundry_mpt_70b.yaml": (64.9, 64, 1024, {"training.zero": 3}),
    "maxtext_llama3_70b.yml": (70.6, 128, 256, {"training.software": "maxtext"}),
    "gpt_neox_20b.yml": (20.6, 64, 1024, {"layout.pp": 4, "training.zero": 1}),
    "nanotron_1b.yaml": (1.24, 32, 64, {"training.sequence_parallel": True}),
    "float32.sh": (1.32, 16, 64, {"training.dtype": "tf32", "training.attention": "unfused"}),
    "trainer.sh": (6.74, 16, 128, {"training.recompute": "full", "training.zero": 3}),
    "llama_factory.yaml": (7.62, 64, 512, {"training.zero": 3}),
    "axolotl.yaml": (8.03, 64, 512, {"training.zero": 3}),
    "primus_llama3_8b.yaml": (8.03, 64, 128, {"training.loss": "fused"}),
    "sizes_alone.sh": (8.19, 64, 64, {"model.head_size": 128}),
}


def _imported(*names, gpus=None, **options):
    files = [_SCRIPTS / name for name in names]
    try:
        return import_job(files, gpus, **options)
    except GpusNotSaidError:
        return import_job(files, 64, **options)


def _value(job, key):
    for name in key.split("."):
        job = getattr(job, name)
    return job


@pytest.mark.parametrize("name", _IMPORTED)
def test_files_say_a_job(name, monkeypatch):
    for variable in ("GBS", "NUM_NODES", "MODEL_SIZE"):
        monkeypatch.delenv(variable, raising=False)
    parameters, gpus, sequences, keys = _IMPORTED[name]
    if name == "trainer.sh":
        keys = {key: value for key, value in keys.items() if key != "training.zero"}
    imported = _imported(name)
    job: Any = imported.job
    assert count_parameters(job.model) / 1e9 == pytest.approx(parameters, rel=6e-3)
    assert (job.layout.world_size, job.batch_size) == (gpus, sequences)
    assert {key: _value(job, key) for key in keys} == keys
    assert imported.question == ""


def test_all_files_of_one_job_say_it_together():
    """A launcher, settings of a framework, and a model."""
    names = ("trainer.sh", "deepspeed.json", "accelerate_fsdp.yaml")
    training = _imported(*names).job.training
    assert (training.zero, training.recompute, training.microbatch_size) == (3, "full", 2)
    config = pathlib.Path(__file__).parents[1] / "examples/config.json"
    alone: Any = import_job(config, 16, batch=128).job
    both: Any = import_job([config, _SCRIPTS / "trainer.sh"]).job
    assert count_parameters(both.model) == count_parameters(alone.model)
    assert both.training.sequence_length == 2048
    refusal(lambda: import_job([config, config], 8), "are two models")


def test_printed_arguments_are_those_of_the_command(tmp_path):
    """A block that is printed gives the job that its arguments give."""
    values = document("dump.txt", (_SCRIPTS / "dump.txt").read_text()).keys
    words = [
        f"--{key.replace('_', '-')}" + ("" if value is True else f" {value}")
        for key, value in values.items()
        if value not in (None, False) and not key.startswith(("encoder", "exp", "main", "img"))
    ]
    text = " ".join(words).replace("AttnBackend.", "") + " --disable-bias-linear"
    (tmp_path / "args.txt").write_text(text)
    printed, given = import_job(_SCRIPTS / "dump.txt").job, import_job(tmp_path / "args.txt").job
    assert printed.training == given.training
    assert printed.layout == given.layout
    assert printed.model.layers == given.model.layers


def test_a_variable_is_that_of_the_script_of_an_option_or_of_the_environment(monkeypatch):
    monkeypatch.setenv("NUM_NODES", "2")
    assert _imported("megatron_llama3_8b.sh").job.layout.world_size == 16
    name = "megatron_llama3_8b.sh"
    assert _imported(name, variables=["NUM_NODES=4"]).job.layout.world_size == 32
    told = _imported(name, variables=["CP_SIZE=1"])
    assert told.job.layout.cp == 2
    assert any("`--var CP_SIZE` changes nothing" in note for note in told.notes)
    with pytest.raises(NotImportableError) as raised:
        _imported("refused_variable.sh")
    (reason,) = raised.value.reasons
    assert "`--var TENSOR_RANKS=...`" in reason
    assert "WHERE" not in str(raised.value)
    assert _imported("refused_variable.sh", variables=["TENSOR_RANKS=2"]).job.layout.tp == 2
    refusal(lambda: _imported(name, variables=["NUM_NODES"]), "`NAME=VALUE`")


def test_all_that_is_in_the_way_is_listed_by_its_cost(answered, capsys, tmp_path):
    """And a value that could not be read is named alone, not what another in its place would do."""
    path, out = _SCRIPTS / "refused_costs.sh", tmp_path / "job.toml"
    with pytest.raises(NotImportableError) as raised:
        import_job(path)
    reasons = raised.value.reasons
    assert raised.value.kind == "megatron"
    assert "`global-batch-size` is many" in reasons[0]
    percents = [float(re.findall(r"up to (\d+) %", reason)[0]) for reason in reasons[1:]]
    assert len(percents) == 3
    assert percents == sorted(percents, reverse=True)
    assert not any("does not divide" in reason for reason in reasons)
    words = ["import", str(path), "--out", str(out)]
    keys = ("skip-train", "heterogeneous-layers-config-path", "moe-extended-tp")
    for key in (*keys, "global-batch-size"):
        words += ["--leave-out", key]
    said = answered([*words, "--json"])
    assert sum("is left out, as asked" in note for note in said["notes"]) == 4
    with pytest.raises(NotImportableError, match="a key that no file has"):
        import_job(path, leave_out=["no-such-key"])
    many = " ".join(f"--decoder-{i}-num-layer 3" for i in range(40))
    (tmp_path / "many.sh").write_text(path.read_text().rstrip() + f" {many} --hidden-sizes 3\n")
    words = ["import", str(tmp_path / "many.sh"), "--out", str(out), "--force", "--strict"]
    assert main(words) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert len(said) > 600
    assert "`decoder-39-num-layer`" in said


def test_a_job_has_what_the_files_say_and_where_it_is_from(tmp_path, answered):
    out = tmp_path / "job.toml"
    path = _SCRIPTS / "torchtitan_llama3_8b.toml"
    assert answered(["import", str(path), "--out", str(out), "--json"])["kind"] == "torchtitan"
    text = out.read_text()
    training = text.partition("[training]")[2].splitlines()
    lines = {line.split(" = ")[0]: line for line in training if line}
    assert "`training.seq_len` in torchtitan_llama3_8b.toml" in lines["sequence_length"]
    assert "zero" not in lines  # It is that of the stack.
    said = tomllib.loads(text)["training"]
    assert [key for key in said if "#" not in lines[key]] == ["global_batch_size", "software"]
    assert load_job(out).training == import_job(path).job.training
    notes = import_job(path).notes
    assert sum("data, tokenizers or logs" in note for note in notes) == 1


_READ_BY_THE_CODE = (
    "shards-in-a-node",
    "tf32",
    "attention-in-float32",
    "model-name",
    "model-flavor",
)


def test_tables_of_frameworks_are_in_terms_of_what_is_known():
    flags = framework("megatron").meanings
    keys = {key.key for key in job_keys()}
    for name in framework_names():
        table = framework(name).table
        assert {"title", "marks"} <= {*table}
        targets = [*table.get("defaults", {}), *table.get("same", {}).values()]
        targets += table.get("opposite", {}).values()
        for options in table.get("values", {}).values():
            for values in options.values():
                targets += [] if isinstance(values, str) else [*values]
        targets += [*table.get("job", {}), *table["computed"]]
        read = {name for formula in table["computed"].values() for name in keys_of(formula)}
        own = {*(name.replace("_", "-") for name in read)}
        inherited = {meaning.what for meaning in framework(name).meanings.values()}
        inherited |= {"deepspeed", "training"}  # Also by values of keys.
        assert own <= {*targets, *flags, *inherited}, name
        for target in targets:
            known = (
                target in keys if "." in target else target in {*flags, *own, *_READ_BY_THE_CODE}
            )
            assert known, f"{name}: {target}"
        for kind in ("costs", "costs_in_fp8"):
            for cost in table.get(kind, {}).values():
                assert cost["percent"] >= 0
                assert cost["source"]


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("meta-llama/Llama-3.1-8B", 8.03),
        ("NousResearch/Meta-Llama-3-8B-Instruct", 8.03),
        ("llama3 70B", 70.55),
        ("llama2_7B.yaml", 6.74),
        ("Qwen/Qwen2.5-7B-Instruct", 7.62),
        ("Qwen/Qwen3-30B-A3B", 30.53),
        ("mistralai/Mixtral-8x7B-v0.1", 46.7),
        ("deepseek_v3 671B", 671.0),
        ("google/gemma-2-2b-it", 2.614),
        ("microsoft/phi-4", 14.66),
        ("EleutherAI/pythia-6.9b", 6.857),
    ],
)
def test_models_are_known_by_their_names(name, billions, tmp_path):
    config = well_known(name)
    (tmp_path / "config.json").write_text(json.dumps(config))
    model: Any = import_job(tmp_path, 64, batch=64).job.model
    assert count_parameters(model) / 1e9 == pytest.approx(billions, rel=2e-3)


def test_a_model_that_is_not_known_is_asked_for(tmp_path):
    text = (_SCRIPTS / "axolotl.yaml").read_text().replace("Meta-Llama-3.1-8B", "Unheard-of-9B")
    (tmp_path / "a.yaml").write_text(text)
    with pytest.raises(NotImportableError, match=r"give its `config\.json` as another FILE"):
        import_job(tmp_path / "a.yaml", 8)


def test_gpus_that_no_file_says_are_asked_for(tmp_path):
    with pytest.raises(GpusNotSaidError, match="--gpus") as raised:
        import_job(_SCRIPTS / "gpt_neox_20b.yml")
    assert raised.value.multiple == 8
    text = (_SCRIPTS / "refused_variable.sh").read_text().replace("$TENSOR_RANKS", "1")
    (tmp_path / "a.sh").write_text(text.replace("torchrun", "torchrun --nnodes $MY_NODES"))
    refusal(lambda: import_job(tmp_path / "a.sh"), "`--var MY_NODES=", GpusNotSaidError)
    assert import_job(tmp_path / "a.sh", variables=["MY_NODES=3"]).job.layout.world_size == 24
    assert import_job(tmp_path / "a.sh", 8).job.layout.world_size == 8


@pytest.mark.parametrize(
    "text",
    [
        "a: &a [1, 1]\n"
        + "".join(
            f"{c}: &{c} [{', '.join(f'*{b}' for _ in range(9))}]\n"
            for b, c in zip("abcdefgh", "bcdefghi", strict=True)
        ),
        "a: &a {x: 1}\n"
        + "".join(
            f"{c}: &{c} {{p: *{b}, q: *{b}}}\n"
            for b, c in zip("abcdefghijklmnopqrstu", "bcdefghijklmnopqrstuv", strict=True)
        ),
        "a: " + "[" * 3000 + "]" * 3000,
        "a: &a\n  b: *a\n",
        "hidden_size: ${b}\nb: ${hidden_size}\nnum_layers: ${num_layers}\n",
        "".join(f"{a}: {('${' + b + '}') * 2000}\n" for a, b in ("ab", "bc", "cd", "de"))
        + "hidden_size: ${a}\nnum_layers: 3\ne: eeeeeee\n",
    ],
)
def test_yaml_that_grows_is_refused_soon(text, tmp_path):
    (tmp_path / "a.yaml").write_text(text)
    with pytest.raises(ValueError, match=r"a\.yaml") as raised:
        import_job(tmp_path / "a.yaml", 8)
    assert len(str(raised.value)) < 700


def test_a_script_reads_only_what_is_beside_it(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "sizes.sh").write_text("LAYERS=7\n")
    text = (_SCRIPTS / "refused_variable.sh").read_text().replace("24", "$LAYERS")
    text = text.replace("$TENSOR_RANKS", "1")
    for where in ("../sizes.sh", "/etc/passwd", "./sizes.sh"):
        (tmp_path / "in/a.sh").write_text(f"source {where}\n{text}")
        with pytest.raises(NotImportableError, match="LAYERS") as raised:
            import_job(tmp_path / "in/a.sh")
        assert f"a.sh reads `{where}`, which is not here" in raised.value.reasons[-1]
    files = [tmp_path / "in/a.sh", tmp_path / "sizes.sh"]
    model = import_job(files[:1], variables=["LAYERS=7"]).job.model
    assert model.num_layers == 7
    shutil.copy(tmp_path / "sizes.sh", tmp_path / "in/sizes.sh")
    assert import_job(files[:1]).job.model == model


def test_the_listed_steps_are_measured(shared):
    """Each published step is that of a row in the collected data."""
    folder = shared / "data"
    listed = pathlib.Path(__file__).parents[1] / "benchmarks/scripts.toml"
    files = ("published/measured_steps.csv", "steps/step_means.csv")
    rows = [
        row for file in files for row in csv.DictReader(io.StringIO((folder / file).read_text()))
    ]
    for step in tomllib.loads(listed.read_text())["steps"]:
        words = re.findall(r"[\w./-]+(?:md|MD)", step["source"])
        same = [r for r in rows if r["step_time_s"] and float(r["step_time_s"]) == step["seconds"]]
        assert any(
            words[0].rpartition("/")[2].lower() in row["source"].lower() for row in same
        ) or (same and "torchtitan" in step["source"])


def test_values_that_name_others_have_theirs(monkeypatch):
    """As of OmegaConf: keys beside a key and above it, the environment, defaults, and `???`."""
    monkeypatch.setenv("A_NUMBER_OF_MINE", "7")
    text = """
top: 4
model:
  length: 2048
  positions: ${.length}
  inner: {width: "${..length}", depth: "${top}", text: "a${top}b"}
  other: ${oc.env:A_NUMBER_OF_MINE,3}
  usual: ${oc.env:NO_SUCH_NAME,3}
  team: ${NO_SUCH_NAME:amd}
  wanted: ???
  again: ${model.positions}
"""
    keys = document("a.yaml", text, ({}, os.environ)).keys
    found = {key.rpartition(".")[2]: value for key, value in keys.items()}
    assert found == {
        "top": "4",
        "length": "2048",
        "positions": "2048",
        "width": "2048",
        "depth": "4",
        "text": "a4b",
        "other": "7",
        "usual": "3",
        "team": "amd",
        "again": "2048",
        "wanted": None,
    }


_GPT = "num_layers: 2\nhidden_size: 768\nnum_attention_heads: 12\nseq_length: 1024\n"
_NEOX = f"pipe_parallel_size: 1\npos_emb: rotary\ntrain_micro_batch_size_per_gpu: 1\n{_GPT}"
_FOUNDRY = "model: {name: mpt_causal_lm, d_model: 256, n_heads: 4, n_layers: 2, vocab_size: 512}\n"
_FOUNDRY += "max_seq_len: 512\ndevice_train_microbatch_size: 1\n"
_FOUNDRY += "fsdp_config: {sharding_strategy: FULL_SHARD, mixed_precision: PURE}\n"
_NEMO = (
    "trainer: {devices: 8, num_nodes: 1}\nencoder_seq_length: 1024\n"
    f"{_GPT}max_position_embeddings: 1024\n"
)
_BRIDGE = (
    "mixed_precision: bf16_mixed\ntrain: {global_batch_size: 8, micro_batch_size: 1}\n"
    f"model: {{num_query_groups: 4}}\n{_GPT}"
)
_FACTORY = "model_name_or_path: Qwen/Qwen3-0.6B\ncutoff_len: 512\nper_device_train_batch_size: 1\n"
_AXOLOTL = "base_model: Qwen/Qwen3-0.6B\nsequence_len: 512\nmicro_batch_size: 1\nval_set_size: 0\n"
_TITAN = (
    '[model]\nname = "llama3"\nflavor = "8B"\n[training]\nlocal_batch_size = 1\nseq_len = 1024\n'
)
_MAXTEXT = (
    "base_emb_dim: 1024\nbase_num_query_heads: 4\nbase_num_kv_heads: 4\nbase_mlp_dim: 2048\n"
    "base_num_decoder_layers: 2\nper_device_batch_size: 1\nmax_target_length: 1024\n"
)
_FLAGS = (
    "--num-layers 2 --hidden-size 768 --num-attention-heads 12 --seq-length 1024 --bf16 "
    "--max-position-embeddings 1024 --micro-batch-size 1 --global-batch-size 8"
)
_NEMO_1 = f"{_NEMO}micro_batch_size: 1\n"
_TUNED, _DEALT = f"{_FACTORY}finetuning_type: full\n", f"{_TITAN}[parallelism]\ndata_parallel_"
_SHARDS, _FLOAT = f"{_AXOLOTL}dp_shard_size: 4\n", "prog " + _FLAGS.replace("--bf16", "")
_GATED, _RESHARD = f"{_NEOX}activation: swiglu\n", "fsdp_config: {reshard_after_forward: true}"
_TO_HOST = "zero_optimization: {stage: 1, offload_optimizer: {device: cpu}}"
_GROUPS, _ALONE = "dp_replicate_size: 2\n", "replicate_degree = 8\ndata_parallel_shard_degree = 1\n"
# By the text of a file, what a job of eight GPUs has of it.
_RIGHT = [
    (f"{_GATED}intermediate_size: 6144\nmlp_multiple_of: 256", "model.ffn_size", 2048),
    (f"{_GATED}mlp_multiple_of: 256", "model.ffn_size", 2048),
    (f"{_NEOX}precision: bfloat16", "training.dtype", "bf16"),
    (f"{_NEOX}tokenizer_type: HFTokenizer", "model.vocab_size", 50304),
    (f"{_NEOX}fp32_allreduce: true\nprecision: bfloat16", "training.gradient_dtype", "fp32"),
    (_NEOX + _TO_HOST, "training.offload", ("optimizer",)),
    (f"{_NEMO_1}precision: bf16\nfp8: false\nfp8_hybrid: true", "training.dtype", "bf16"),
    (f"{_NEMO_1}precision: bf16\nfp8: true\nfp8_hybrid: true", "training.dtype", "fp8"),
    (f"{_NEMO_1}num_query_groups: 4", "model.num_kv_heads", 4),
    (_BRIDGE, "model.num_kv_heads", 4),
    (_TUNED, "training.recompute", "full"),
    (f"{_TUNED}disable_gradient_checkpointing: true", "training.recompute", "none"),
    (f"{_TUNED}deepspeed: ds_z3_config.json", "training.gather_dtype", "bf16"),
    (f"{_TUNED}deepspeed: ds_z3_config.json", "training.gradient_dtype", "bf16"),
    (f"{_TUNED}deepspeed: ds_z3_config.json", "training.weights", "copied"),
    (f"{_SHARDS}expert_parallel_size: 2", "layout.dp", 8),
    (_SHARDS + _GROUPS + _RESHARD, "training.optimizer_instances", 2),
    (f"{_AXOLOTL}activation_offloading: true", "training.offload", ("activations",)),
    (f"{_DEALT}replicate_degree = 2\n", "training.optimizer_instances", 2),
    (_DEALT + _ALONE, "training.zero", 0),
    (f"{_TITAN}[float8]\nenable_float8_linear = true\n", "training.dtype", "fp8"),
    (f"{_TITAN}[float8]\nenable_fsdp_float8_all_gather = true\n", "training.gather_dtype", None),
    (f"{_TITAN}mixed_precision_param = 'float32'\n", "training.dtype", "fp32"),
    (_NEOX, "training.dtype", "tf32"),
    (f"{_NEOX}fp16: {{enabled: false}}", "training.dtype", "tf32"),
    (f"{_NEOX}bf16: {{enabled: true}}", "training.dtype", "bf16"),
    (f"{_FOUNDRY}precision: fp32", "training.gradient_dtype", "fp32"),
    (f"{_FOUNDRY}precision: amp_fp16", "training.gradient_dtype", "fp16"),
    (_FOUNDRY, "training.gradient_dtype", "bf16"),
    (_FOUNDRY.replace("PURE", "FULL"), "training.gather_dtype", "fp32"),
    (f"{_TITAN}mixed_precision_param = 'float32'\n", "training.attention", "flash"),
    (f"{_FACTORY}bf16: false", "training.dtype", "fp32"),
    (f"{_FACTORY}bf16: false\ntf32: true", "training.dtype", "tf32"),
    (f"{_AXOLOTL}bf16: false", "training.dtype", "fp32"),
    (f"{_FACTORY}bf16: false\ndistributed_type: FSDP", "training.gather_dtype", "fp32"),
    (_NEMO_1.replace("devices: 8", "devices: 8, precision: 32"), "training.attention", "unfused"),
    (f"{_MAXTEXT}dtype: float32", "training.dtype", "tf32"),
    (_FLOAT, "training.dtype", "tf32"),
    (_FLOAT, "training.gradient_dtype", "fp32"),
    (f"{_MAXTEXT}ici_tensor_sequence_parallelism: 2", "layout.tp", 2),
    (_MAXTEXT, "model.head_size", 128),
    (_MAXTEXT, "model.vocab_size", 32_000),
    (f"{_MAXTEXT}dcn_sequence_parallelism: 1", "layout.tp", 1),
    (f"python x.py {_FLAGS} --vocab-file $1 --merge-file $2", "model.vocab_size", 50304),
]


def test_values_are_as_their_frameworks_take_them(written):
    for text, key, value in _RIGHT:
        path = written("file", text)
        tables = import_job(path, 8, batch=8).job
        for name in key.split("."):
            tables = getattr(tables, name)
        assert tables == value, (text, key)
    path.write_text(_FACTORY)
    notes = import_job(path, 8, batch=8).notes
    assert any("the 512 tokens of `cutoff_len`" in note for note in notes)
    path.write_text(f"{_FACTORY}fsdp: hybrid_shard")
    training = import_job(path, 32, batch=32).job.training
    assert (training.zero, training.optimizer_instances) == (3, 4)  # Of eight ranks each.
    path.write_text(_TITAN)
    with pytest.raises(GpusNotSaidError):
        import_job(path)


# By the text of a file, the key that moves its step by more than a tenth.
_REFUSED = [
    (f"{_NEOX}train_impl: dpo", "train_impl"),
    (f"{_NEOX}zero_optimization: {{stage: 3, offload_param: {{device: cpu}}}}", "device"),
    (f"{_NEMO}mamba_ssm_ngroups: 8", "mamba_ssm_ngroups"),
    (f"{_NEMO}retro: {{retro_encoder_num_layers: 2}}", "retro_encoder_num_layers"),
    (f"{_NEMO}num_micro_batches_with_partial_activation_checkpoints: 2", "num_micro_batches"),
    (f"{_BRIDGE}dataset: {{packed_sequence_specs: {{packed_sequence_size: 4096}}}}", "packed_seq"),
    (f"{_FACTORY}quantization_bit: 4", "quantization_bit"),
    (f"{_FACTORY}use_unsloth: true", "use_unsloth"),
    (f"{_FACTORY}use_kt: true", "use_kt"),
    (f"{_FACTORY}zero_optimization: {{offload_param: {{device: cpu}}}}", "offload_param"),
    (f"{_FACTORY}fsdp_config: {{fsdp_offload_params: true}}", "fsdp_offload_params"),
    (f"{_AXOLOTL}adapter: qlora", "adapter"),
    (f"{_AXOLOTL}reward_model: true", "reward_model"),
    (f"{_AXOLOTL}unfrozen_parameters: [lm_head]", "unfrozen_parameters"),
    (f"{_MAXTEXT}use_dpo: true", "use_dpo"),
    (f"{_MAXTEXT}quantization: int8", "quantization"),
    (f"{_MAXTEXT}ici_sequence_parallelism: 2", "ici_sequence_parallelism"),
    (_AXOLOTL.replace("0.6B", "0.6B-AWQ"), "AWQ"),
]


def test_keys_that_move_a_step_are_refused(written):
    for text, key in _REFUSED:
        path = written("file", text)
        with pytest.raises(NotImportableError) as error:
            import_job(path, 8, batch=8)
        assert any(key in reason for reason in error.value.reasons), (text, error.value)


def test_brackets_that_are_too_deep_are_refused_in_a_sentence():
    for text in ("python x.py " + "$((" * 3000 + "1" + "))" * 3000, '{"a":' * 5000):
        with pytest.raises(ValueError, match="deeper ones, than any configuration has"):
            document("file.json" if text[0] == "{" else "file.sh", text)


def test_files_that_contradict_each_other_have_a_note(tmp_path):
    a, b = tmp_path / "a.yaml", tmp_path / "b.yaml"
    a.write_text(f"{_MAXTEXT}vocab_size: 100")
    b.write_text("vocab_size: 200\nper_device_batch_size: 1\n")
    found = import_job([a, b], 8, batch=8)
    assert found.job.model.vocab_size == 200
    note = "`vocab_size` in b.yaml is 200, and counts; `vocab_size` in a.yaml is 100."
    assert note in found.notes
    assert not any("and counts" in note for note in import_job(a, 8, batch=8).notes)
