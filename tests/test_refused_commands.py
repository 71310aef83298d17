"""Every command line without an answer is refused in one sentence, before anything is written."""

import shlex

import pytest

from .documents import ROOT
from .helpers import has_in_order


_FLEET = ("steps", "spares", "repair")
_SLOW = "megatron-22b-a100-8 --set cluster"
_LAYERS, _NOT = "schedule.layers_per_stage", ("x", "None", "0")
_KEYS = ("layout", "schedule", "training", "model", "cluster", "name")
# Commands by their beginning, and what the sentence says, in this order.
_COMMANDS = {
    "": [("", "No command"), ("simulat megatron-22b-a100-8", "did you mean `simulate`")],
    "hardware": [("dgx-h10", "did you mean `dgx-h100`")],
    "explore": [
        ("dlrm-none", "No job `dlrm-none`"),
        ("megatron-22b-a100-8 --port 70000", "`70000`"),
        ("megatron-22b-a100-8 --port x", "`x`"),
    ],
    "calibrate gpt3-175b-h100-4096": [
        ("--to steps.csv --out job.csv", "must be a .toml file"),
        ("--to missing.csv --out job.toml", "no such file"),
        ("--to steps.csv --out job.toml --set layout.dp=0", "layout.dp"),
    ],
    "diagnose": [
        ("gpt3-175b-h100-768", "Give one of --log, --measured, --step-time, --trace and --ranks."),
        ("gpt3-175b-h100-768 --step-time 0", "a number of seconds from 1e-6"),
        ("gpt3-175b-h100-768 --measured none.csv", "no such file"),
        ("gpt3-175b-h100-768 --trace none", "no such file"),
        ("gpt3-175b-h100-768 --step-time 1 --trace x", "Give one of"),
        ("gpt3-175b-h100-768 --step-time 2 --unit ms", "`--column` and `--unit` are those of"),
        ("gpt3-175b-h100-768 --log steps.csv --batch 8", "describe the job of a --log; drop them"),
        ("--log steps.csv", "give JOB, or --config"),
        ("gpt3-175b-h100-768 --log .", "this is a folder"),
        *((f"gpt3-175b-h100-768 --step-time 1.2 --{word} 5", "give --ranks") for word in _FLEET),
    ],
    "improve megatron-22b-a100-8": [
        ("--cost gemm --budget 1", "positive number"),
        ("--cost gemm=1 --cost gemm=2 --budget 1", "twice"),
    ],
    "target megatron-22b-a100-8": [("--part gemm --at 1 --objective x", "must be mean")],
    "layouts megatron-22b-a100-8": [
        ("--gpus 13", "divides 13 GPUs"),
        ("--gpus 0", "at least 1"),
        ("--gpus 16 --objective speed", "must be mean"),
        ("--gpus 16 --objective std", "does not rank"),
        ("--gpus 16 --choose tp=3", "use `tp` of 1, 2, 4, 8, 16, or another"),
        ("--gpus 8 --budget 5x", "must be a time such as 60s, 2m or 90"),
        ("--gpus 8 --memory-margin 100%", "must be a share such as 10% or 0.1"),
        ("--gpus 16 --memory-margin 95%", "with a margin of 95 %"),
        ("--gpus 8 --batch 8k", "below 2^32, such as 8192"),
        ("--gpus 8 --choose xp=1", "No key `xp`"),
        ("--gpus 8 --choose tp=-1", "whole numbers"),
        ("--gpus 8 --choose tp=8,8", "twice"),
        ("--gpus 8 --choose zero=5", "cannot be used"),
        ("--gpus 8 --choose recompute=ful", "give one of 'none', 'selective', 'by-op', 'full'"),
        ("--gpus 8 --set layout.etp=1", "no effect"),
        ("--gpus 8 --ray nobody.invalid:6379", "No Ray cluster answers at `nobody.invalid:6379`"),
        ("--gpus 8 --worker-gpus 1", "give both"),
    ],
    "compare megatron-22b-a100-8": [
        ("", "nothing to compare it with"),
        ("--over layout.tp=1,x", "override `layout.tp=x`: the key `layout.tp` is 'x'"),
    ],
    "place megatron-175b-a100-64": [("--out no/such/folder.csv", "a folder that exists")],
    "predict": [
        ("gpt3-175b-h100-4096 more", "arguments: more; see `prism-jax predict --help`"),
        ("gpt3-175b-h100-40960", "gpt3-175b-h100-4096"),
        ("gpt3-175b-h100-4096 --set layout.tp=7", "7,168 ranks"),
        ("gpt3-175b-h100-4096 --set training.microbatch_size=64", "--allow-oom"),
        ("megatron-22b-a100-8 --samples=3", "No option `--samples`"),
        (f"{_SLOW}.links.nvlink.bandwidth_bytes_per_s=5e-324", "5e-324"),
        (f"{_SLOW}.device.memory_bandwidth_bytes_per_s=5e-324", "5e-324"),
    ],
    "memory megatron-22b-a100-8": [
        ("--set num_nodes=1.5", "`cluster.num_nodes` is 1.5"),
        ("--set num_nodes=x", "is 'x'"),
        ("--set num_nodes=1000000000", "devices that a"),
    ],
    "sensitivity megatron-22b-a100-8 --samples 100": [
        ("--objective p", "must be mean, std"),
        ("--objective p101", "at least 1 and below 100"),
        ("--shapley gem", "did you mean"),
        ("--shapley ,", "No part ``"),
    ],
    "report megatron-22b-a100-8": [
        ("", "--out"),
        ("--out page.txt", "must be a .html file"),
        ("--out nowhere/page.html", "folder that exists"),
        ("--out page.html --quantile 2", "must be a number from 0 to 1"),
        ("--out page.html --objective p100x", "--objective `p100x`"),
        ("--out page.html --set layout.tp=7", "does not divide"),
    ],
    "criticality megatron-22b-a100-8 --samples 100": [
        ("--band 0.9", "0.94:0.96"),
        ("--band p90:p80", "two rising quantiles"),
    ],
    "whatif megatron-22b-a100-8 --samples 31": [("", "`31` must be a whole number of at least 32")],
    "whatif megatron-22b-a100-8 --samples 100": [
        ("", "Nothing to compare"),
        ("--slow-rank 1:2", "stage=7:1.2"),
        ("--slow-rank stage=9:1.2", "no stage 9"),
        ("--slow-rank stage=0:1e300", "from 1e-06 to 1e+06"),
        ("--kernel gemm", "positive number"),
        ("--kernel gemm:1e300", "from 1e-06 to 1e+06"),
        ("--link nvlnk:2", "did you mean"),
        ("--link nvlink:1e-300", "from 1e-06 to 1e+06"),
        ("--change layout.tpp=2", "layout.tpp"),
    ],
    "run megatron-22b-a100-8 --steps 100000 --samples 64": [
        ("--deadline 0", "days above 0"),
        ("--deadline nan", "days above 0"),
        ("--level -1", "`-1` must be a share from 0 to 1"),
        ("--interval 20", "longer interval"),
        ("--interval 1e9 --restart 1e9", "save checkpoints more often"),
        ("--failures llama-33", "llama-3"),
        ("--spares -1", "at least 0"),
        ("--spares 0 --repair 1e9", "more spares"),
        ("--spares some", "at least 0"),
        ("--blocking 0", "give `--interval`"),
        ("--autocorrelation 0.5", "steps from 1"),
    ],
    "simulate megatron-22b-a100-8": [
        ("--quantiles 1.5", "`1.5` must be a number between 0 and 1"),
        ("--quantiles x99", "`x99` must be a number between 0 and 1"),
        ("--out law.csv", "must be a .npz file"),
        ("--quantiles q95", "0.999, or a percentage, such as p99.9"),
        ("--set model.num_layers=1000000000", "num_layers` is 1000000000"),
        ("--sample 3", "--sample"),
        ("--sampels 3", "No option `--sampels`; did you mean `--samples`"),
        *(
            (f"--samples={number}", f"`{number}` must be a whole number of at least 1")
            for number in ("0", "-5", "nan", "1.5")
        ),
        ("--samples -5", "-5"),
        ("--samples 8k", "`8k` must be a whole number ... such as 8192"),
        ("--seed x", "`x` must be a whole number"),
        ("--set layout.dq=4", "did you mean ` ... dp`"),
        ("--set layout.dp", "layout.dp"),
        ("--set layout.dp=x", "layout.dp"),
        ("--set layout.tp=7", "does not divide"),
        ("--set layout.tp=1 --set layout.pp=5", "do not divide"),
        ("--set layout.dp=2", "16"),
        ("--set layout.dp=8k", "a whole number such as 8192, got"),
        ("--set layout.dp=1 --set layout.dp=2", "`layout.dp` is given twice"),
        (f"--set layout.dp={3000 * '['}", "layout.dp"),
        ("--set schedule.num_microbatches=100000000", "microbatches"),
        ("--set schedule.kind=2f2b", "2f2b"),
        *((f"--set {_LAYERS}=[24,24] --set {_LAYERS}.{key}=3", f"{_LAYERS}.{key}") for key in _NOT),
        *((f"--set {key}={{}}", "the value is a table; set one of its keys") for key in _KEYS),
        ("--set kernels.gemm.sigma=1.2", "skewness"),
        ("--set kernels.gemm.sigma=3", "`gemm`, ... is 90 times its mean"),
        ("--set kernels.gemm.sigma=1e9", "gemm has ... over 1e15 times"),
        ("--set kernels.gemm.sigma=inf", "must be finite"),
        ("--set kernels.gemm.sigma=-0.1", "sigma"),
    ],
    "simulate": [
        ("", "JOB"),
        ("gpt3-175b-h100-4069", "did you mean `gpt3-175b-h100-4096`"),
        (300 * "x", "No job"),
        ("nowhere.toml", "nowhere.toml"),
        (".", "folder"),
    ],
    "sweep megatron-22b-a100-8 --samples 64": [
        ("--over kernels.gemm.sigma=0.01,0.05 --ray 127.0.0.1:1", "No Ray cluster answers at `127"),
        ("--over kernels.gemm.sigma=0.01,0.05 --ray somewhere", "this is not `host:port`"),
        ("--over layout.dp=1 --ray ''", "the address is empty"),
        ("--over kernels.gemm.sigma=0.01,0.05 --shard 4/3 --out x", "from 1/16 to 16/16"),
        ("--over kernels.gemm.sigma=0.01,0.05 --shard 1/3", "give the `--out`"),
        ("--over kernels.gemm.sigma=0.01,0.05 --worker-gpus 1", "give both"),
        ("--over schedule.orders=[1,2],[2,1]", "keys that have one number or word"),
        ("--over model.layers={attention=1}", "keys that have one number or word"),
        ("--over layout.dp=1:inf:2", "is not a range"),
        ("--over layout.tp=1,x", "override `layout.tp=x`: the key `layout.tp` is 'x'"),
        ("--over layout.tp=1:2:3", "override `layout.tp=1.5`: the key `layout.tp` is 1.5"),
        ("--over training.recompute=full,x", "give one of 'none', 'selective', 'by-op', 'full'"),
        ("--over kernels.gemm.sigma=0,x", "the value is 'x', but must be a number"),
    ],
    "fit-kernels --device mine --out out": [
        ("no.csv", "no such file"),
        ("x.txt", "give a"),
        ("gemm.csv --ask ''", "No kernel ``"),
        ("gemm.csv --ask 'gemm bf16 m=1 n=1'", "`gemm` needs a column `k`"),
        ("gemm.csv --ask 'gemm bf16 m=1 n=1 k=x'", "`x` is not a number"),
        ("gemm.csv --ask 'gemm bf16 m=1 n=1 k=1 z=1'", "No column `z`"),
        ("gemm.csv --ask 'gemm fp8 m=1 n=1 k=1'", "no table is fitted for `gemm fp8`"),
        ("gemm.csv --sms 0", "must be a whole number of at least 1"),
    ],
}
_KERNELS = "kernel,dtype,m,n,k,latency_s\n"
_FILES = {
    "steps.csv": "step_time_s\n" + "1.0\n" * 30,
    "gemm.csv": f"{_KERNELS}gemm,bf16,1024,1024,1024,1e-5\n",
}
_FAILURES = "kind = 'failures'\nsource = 'made'\ndevice_hours = 1000.0\nrestart_s = 10.0\n"
_STEPS = f"diagnose {ROOT}/examples/job.toml --json --measured"
_JOB = """
kind = "job"
model = "megatron-22b"
cluster = "dgx-a100"
num_nodes = 1
layout.tp = 8
schedule.kind = "1f1b"
schedule.num_microbatches = 2
training.microbatch_size = 4
training.sequence_length = 2048
"""
_NO_CLUSTER = _JOB.replace('cluster = "dgx-a100"\nnum_nodes = 1\n', "")
# Commands on a file, by what it holds, and what the sentence says, in this order.
_ON_FILES = {
    "simulate broken.toml": [
        ("kind = [", "broken.toml ... TOML"),
        ("{'json': 1}", "broken.toml ... TOML"),
        ("", "broken.toml ... kind"),
        ('kind = "device"\n', "broken.toml ... kind"),
        (_JOB.replace("tp = 8", "tp = -8"), "broken.toml ... tp"),
        (_JOB.replace("tp = 8", 'tp = "eight"'), "broken.toml ... tp"),
        (_JOB.replace("schedule.num_microbatches = 2", ""), "broken.toml ... num_microbatches"),
        (_JOB.replace("layout", "layuot"), "broken.toml ... layuot"),
    ],
    "predict bare.toml": [(_NO_CLUSTER, "the key `cluster` is missing in the job `bare`")],
    "whatif --link infiniband:1.5 bare.toml": [
        ("kind = 'job'\nlayout.tp = 2\nschedule.num_microbatches = 4", "names no cluster")
    ],
    "import --gpus 8 --out x.toml config.json": [
        ('{"model_type": "llama", "hidden_si', "the JSON ends early")
    ],
    "trace --format kineto rank0.json": [
        ('{"traceEvents": [{"ph": "X", "name": "a", "ts":', "ends early, before its first event")
    ],
    "fit --job megatron-22b-a100-8 --out p --time-unit ms ops.csv": [
        ("step_time_s\n1\n2\n3\n", "must be in seconds")
    ],
    "trace --ops a.parquet ops.csv": [("step_time_s\n1\n2\n3\n", "--ops needs a --job")],
    "score megatron-22b-a100-8 --steps 2: --against ops.csv": [
        ("step_time_s\n1\n2\n3\n", "1 step of 3 left to score")
    ],
    "place megatron-175b-a100-64 --factors factors.csv": [
        ("node,factor\n0,1\n0,1\n", "each once"),
        ("node,factor\nhost-1,1.0\nhost-2,1.1\n", "'host-1' ... whole numbers"),
        ("gpu,factor\nhost-1,1.0\nhost-2,1.1\n", "'host-1' ... whole numbers"),
        ("gpu,factor\n" + "".join(f"{i},1\n" for i in range(8)), "8 rows by `gpu`"),
        ("factor\n1\n-1\n", "positive number"),
        ("factor\n1\nslow\n", "positive number"),
        ("gpu,node,factor\n0,0,1\n", "keep one of them"),
        ("node\n1\n", "is missing"),
        ("gpu,factor\n,1\n", "`gpu` is empty"),
        ("factor\n", "no rows"),
        ("factor\n" + "1e300\n" * 64, "from 1e-06 to 1e+06"),
        ("factor\n" + "1e-300\n" * 64, "from 1e-06 to 1e+06"),
        ("factor\n" + "1e7\n" * 64, "from 1e-06 to 1e+06"),
    ],
    "run megatron-22b-a100-8 --steps 1000 --samples 64 --failures failures.toml": [
        (f"{_FAILURES}blocking_s = 1.0\ncauses = []", "causes"),
        (_FAILURES + "blocking_s = 0.0\ncauses = [{name = 'gpu', count = 3}]", "give an interval"),
    ],
    "fit-kernels --device mine --out out kernels.csv": [
        ("kernel,latency_s\n", "no rows"),
        (f"{_KERNELS}gem,bf16,1,1,1,1", "No kernel `gem`; did you mean `gemm`"),
        (f"{_KERNELS}gemm,fp9,1,1,1,1", "No dtype `fp9`"),
        ("q,kernel,dtype,m,n,k,latency_s\n1,gemm,bf16,1,1,1,1", "No column `q`"),
        ("kernel,dtype,m,n,latency_s\ngemm,bf16,1,1,1", "`gemm` needs a column `k`"),
        ("kernel,dtype,m,n,k\ngemm,bf16,1,1,1", "`latency_s` is missing"),
        (f"{_KERNELS}gemm,bf16,1,1,0,1", "`k` of row 1 (`gemm`) is 0, but must be a number from 1"),
        (f"{_KERNELS}gemm,bf16,1,1,,1", "`k` of row 1 (`gemm`) is no number"),
        (f"{_KERNELS}gemm,bf16,x,1,1,1", "`m` of row 1 (`gemm`) is no number"),
        (f"{_KERNELS}gemm,bf16,1,1,1,inf", "`latency_s` of row 1 (`gemm`) is inf"),
    ],
    f"{_STEPS} a.log": [("nothing here", "a.log")],
    f"{_STEPS} b.csv": [("Step,loss\n1,2.0\n", "b.csv"), ("", "b.csv")],
    f"{_STEPS} c.json": [('{"hidden_size": 4096}', "c.json"), ("[[1, 2", "c.json")],
    f"{_STEPS} events.out.tfevents.1": [
        ("\x05" * 64, "events.out.tfevents.1"),
        # An entry whose tag is a number.
        ("\x06" + 11 * "\0" + "\x2a\x04\x0a\x02\x08\x01" + 4 * "\0", "events.out.tfevents.1"),
    ],
}


@pytest.mark.parametrize(
    ("command", "name", "content", "words"),
    [
        *(
            (f"{begin} {end}", "", "", words)
            for begin, rows in _COMMANDS.items()
            for end, words in rows
        ),
        *(
            (command, command.split()[-1], content, words)
            for command, rows in _ON_FILES.items()
            for content, words in rows
        ),
    ],
)
def test_a_command_that_cannot_be_answered_is_one_sentence(
    command, name, content, words, tmp_path, refused, monkeypatch
):
    if "--ray" in command:
        pytest.importorskip("ray", reason="ray is not installed")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("prism_jax.report.gather", lambda *_, **__: pytest.fail("it was computed"))
    files = _FILES | ({name: content} if name else {})
    for file, text in files.items():
        (tmp_path / file).write_text(text)
    has_in_order(refused(shlex.split(command)), words)
    assert {path.name for path in tmp_path.iterdir()} == {*files}
