"""Every mistake in a file or an override is one sentence that names the file and the key."""

import functools as ft

import pytest

import prism_jax as prism
from prism_jax import data
from prism_jax.data._shapes import read_shapes
from prism_jax.importers import import_job
from prism_jax.logs import read_log
from prism_jax.schedule import load_schedule
from prism_jax.trace import read_runs

from .helpers import refusal


_LAYOUT = "[layout]\ntp = 2\n[schedule]\nkind = '1f1b'\nnum_microbatches = 4\n"
_JOB = "kind = 'job'\n" + _LAYOUT
_FULL = (
    "kind = 'job'\nmodel = 'llama-3.1-8b'\ncluster = 'dgx-h100'\nnum_nodes = 8\n"
    + _LAYOUT
    + "[training]\nmicrobatch_size = 1\nsequence_length = 4096\n"
)
_SMALL = "{ hidden_size = 64, vocab_size = 10, layers = [{ modules = ['@'] }] }"
_CLUSTER = (
    "kind = 'cluster'\ndevice = 'h100-sxm'\nnum_nodes = 2\ndevices_per_node = 8\n"
    "[[links]]\nname = 'nvlink'\ngroup = 8\nbandwidth_bytes_per_s = 4e11\n"
    "[[links]]\nname = 'infiniband'\ngroup = 16\nbandwidth_bytes_per_s = 5e10\n"
)
_MEGATRON = (
    "prog --num-layers 12 --hidden-size 512 --num-attention-heads 8 --micro-batch-size 4 --bf16 "
    "--global-batch-size 32 --seq-length 1024 --max-position-embeddings 1024 --vocab-size 50257 "
)
_WALL = "Wall time,Step,Value\n5,1,1\n5,2,1\n"


def _popular(share):
    return f"model.modules.moe.load_popularity={[share] * 128}".replace(" ", "")


def predicted(job, overrides=()):
    return prism.predict(data.load_job(job, overrides))


def with_layers(path):
    return data.load_job("examples/job.toml", [f"layers={path}"])


def imported(path):
    return import_job(path, 8, batch=32)


def logged(path):
    return read_log(path, data.load_job("examples/job.toml"))


# Overrides by the job that they are of, and what the sentence says, in this order.
_OVERRIDES = {
    "gpt3-175b-h100-4096": [
        ("layout.dp", "`layout.dp` ... layout.dp=64"),
        ("=3", "`=3`"),
        ("layout.dp=", "`layout.dp=`"),
        ("layout..dp=3", "`layout..dp=3`"),
        ("layout.dq=3", "`layout.dq` ... did you mean"),
        ("lay=3", "`lay` ... did you mean `layout`"),
        ("layout.dp=abc", "override `layout.dp=abc` ... int"),
        ("layout.dp=true", "override `layout.dp=true` ... bool"),
        ("layout.dp=1.5", "override `layout.dp=1.5` ... float"),
        ("layout.dp=-4", "override `layout.dp=-4` ... >= 1"),
        ("layout.dp.x=3", "`layout.dp` is a value"),
        ("layout=3", "`layout` is 3"),
        ("name=3", "`name` is 3"),
        ("training.microbatch_size=nan", "microbatch_size=nan"),
        ("cluster.device.memory_bytes=inf", "`cluster.device.memory_bytes` is inf"),
        ("cluster.links.nvlink.group=0", "override `cluster.links.nvlink.group=0` ... >= 1"),
        ("cluster.links.nvlonk.group=3", "nvlonk ... nvlink"),
        ("cluster.links.nvlink=3", "`cluster.links.nvlink` is a table"),
        ("cluster=dgx", "No cluster `dgx`"),
        ("model=7", "`model` is 7"),
        ("layout.dp=1000", "32,000 ranks ... 4,096 devices"),
        ("kernels.all_gathr.sigma=0.1", "all_gathr ... did you mean `all_gather`"),
        ("kernels.all_gather.sigmo=0.1", "sigmo ... did you mean `sigma`"),
        ("kernels.all_gather=0.1", "kernels.all_gather.sigma=0.1"),
        ("kernels.rank.sigma=-0.1", "not negative"),
        ("kernels.rank.sigma=nan", "finite"),
        ("kernels.rank.sigma=wide", "'wide' ... number"),
        ("kernels.rank.sigma=true", "True ... number"),
        # Layouts that do not fit the model.
        ("num_nodes=9999 layout.tp=64", "`layout.tp` = 64 ... `model.num_heads` = 96"),
        ("model.num_kv_heads=2", "`layout.tp` = 4 ... `model.num_kv_heads` = 2"),
        ("schedule.virtual_stages=13", "8*13 = 104 ... `model.num_layers` = 96"),
        ("num_nodes=9999 layout.ep=2", "`layout.ep` is 2 ... dense"),
        ("training.sequence_length=2049", "2049 ... tp*cp = 4"),
        ("training.sequence_length=2049 layout.cp=2 layout.dp=64", "tp*cp = 8"),
        ("model.hidden_size=12289", "`model.hidden_size` = 12289"),
        ("schedule.head_counts_as_layer=true", "head counted: 97"),
        (
            "schedule.virtual_stages=1 schedule.layers_per_stage=[12,12,12,12,12,12,12,13]",
            "adds up to 97 ... `model.num_layers` is 96",
        ),
    ],
    "gpt3-175b-h100-768": [
        (
            "cluster=dgx-1 training.dtype=bf16",
            "`v100-32g` has no ... for 'bf16'; it has fp16, fp32",
        ),
        ("cluster=dgx-1 training.dtype=tf32", "`peak_flop_per_s` for 'tf32'; it has fp16, fp32"),
    ],
    "examples/job.toml": [
        ("layers=true", "override `layers=true`: it does not name a file; give"),
        ("layers=3", "override `layers=3`: it does not name a file; give"),
        ('layers=""', "does not name a file; give"),
        ("layers.x=3", "override `layers.x=3`: `layers` names a file and has no keys"),
        ("layers=a.toml layers=b.toml", "`layers=b.toml`: `layers=a.toml` was given, too"),
        ("cluster.device.power.limit_w=100", "not more than the 212 W that the device draws"),
        ("cluster.device.power.limit_w=-1", "`cluster.device.power.limit_w` is -1"),
        ("kernels.rank=powers", "write `kernels.<kind>.<parameter>"),
        ("cluster.network=shard", "`shared`"),
    ],
    "examples/trace_job.toml": [
        ("layers=examples/hybrid_layers.toml", "the job has no model; leave `layers` out")
    ],
    "megatron-22b-a100-8": [
        (
            "cluster.device.power.limit_w=300",
            "`a100-80g-sxm` draws is not known; take b200, gb200, h100-sxm, h200-sxm, or add",
        ),
        (
            "cluster.device.host.link_bytes_per_s=55.6",
            "`cluster.device.host.link_bytes_per_s` = 55.6 ... 55.6e9",
        ),
        ("cluster.device.memory_bytes=80", "memory_bytes` = 80 is far ... did you mean 80e9?"),
        ("training.software=megatron", "No software stack `megatron`; did you mean"),
        ("training.host_forward_s=34", "`training.host_forward_s` is 34: expected"),
        ("training.dtype=bf17", "'fp32', 'tf32', 'bf16', 'fp16', 'fp8', 'mxfp8', 'fp4'"),
        ('training.recompute_modules=["atn"]', "give one of 'core_attn', 'layernorm'"),
        (
            'cluster.device=tpu-v5p training.dtype=bf16 training.offload=["activations"] '
            "training.recompute=none",
            "needs a host, ... `tpu-v5p` is not known; add `[host]`",
        ),
    ],
    "megatron-175b-a100-64": [
        (
            "layout.dp=8 cluster=dgx-a100 num_nodes=64 training.optimizer_instances=3",
            "optimizer_instances` = 3 does not divide",
        )
    ],
    "examples/one_device.toml training.software=pytorch-2026": [
        ("layout.tp=2", "lists kernels of whole matrices and sequences"),
        ("layout.cp=2", "lists kernels of whole matrices and sequences"),
        ("training.recompute=selective", "lists what whole layers run; use 'full' or 'none'"),
        ("training.recompute=by-op", "lists what whole layers run; use 'full' or 'none'"),
        ("given.keys=[]", "No key `given"),
    ],
    "llama-3.1-405b-h100-65536": [
        (
            "schedule.virtual_stages=4 schedule.embedding_counts_as_layer=false "
            "schedule.head_counts_as_layer=false",
            "set `schedule.embedding_counts_as_layer = true` and",
        )
    ],
    "latte-xl-2-a100-8": [
        ("layout.cp=2 layout.dp=4", "`layout.cp` = 2 would split"),
        ("training.sequence_length=4000", "`span` = 256 parts"),
    ],
    "dit-xl-2-a100-8": [
        ("model.last=head", "`vocab_size` is missing"),
        ("model.last=hat", "No module `hat`"),
        ("model.modules.patches.context_size=64", "belong together"),
        ("training.adapters.rank=8", "leave `training.adapters` out"),
    ],
    "deepseek-v3-h800-2048": [
        ('training.adapters.modules=["linear_qkv"]', "use linear_fc1, linear_fc2, linear_proj.")
    ],
    "llama-3-70b-h100-512": [
        ("training.adapters.rank=0", "training.adapters"),
        ('training.adapters.modules=["q_proj"]', "training.adapters"),
        ("training.packed.lengths.sigma=1", "training.packed"),
        ("training.packed.lengths.mean=0.5", "training.packed"),
    ],
    "stable-diffusion-2-a100-8": [
        ("layout.dp=4 layout.tp=2", "tp*pp*cp = 2*1*1, but"),
        ("layout.dp=4 layout.pp=2", "`resnet-block` is data parallel"),
        (
            'model.layers=[{modules=["halve"]}] model.num_layers=1 layout.dp=4 layout.cp=2',
            "`convolution` is data parallel",
        ),
        ("model.modules.self_320.context_size=9", "give `context_length`"),
        ("model.modules.halve.kernel_size=0", "halve.kernel_size"),
        ("model.modules.halve.upsample=true", "`upsample` and `stride` = 2"),
        ("model.layers=[]", "`layers` is empty"),
        ("model.layers=[] model.num_layers=4", "`layers` is empty"),
        ("model.modules.halve.kind=[1]", "No module `[1]`"),
    ],
    "flux1-gb300-72": [
        ("layout.dp=36 layout.tp=2", "`stream-block` is data parallel"),
        ("model.modules.double.text_length=512", "a text of 512 of 512 tokens"),
        ("model.num_heads=7", "7 heads, which do not divide `hidden_size` = 3072;"),
    ],
    "dlrm-dcnv2-gb300-64": [
        ("layout.tp=2 layout.dp=32 layout.ep=32", "of `layout` only `dp` and `ep`"),
        ("training.sequence_length=2", "`training.sequence_length` = 1"),
        ("layout.ep=32", "`layout.ep` = 32 of 64 GPUs"),
        ("layout.ep=1", "`layout.ep` = 1 of 64 GPUs"),
        ('model.modules.features.tables=[{rows=9,sharding="row_wise",shards=65}]', "65 `sh"),
        ('model.modules.features.tables=[{rows=9,sharding="by_row"}]', "by_row"),
        ("model.modules.features.tables=[{pooling_factor=9}]", "features.tables[0].rows"),
        ("model.modules.features.tables=[{rows=9,x=1}]", "features.tables[0].x"),
        ("model.modules.features.bottom.x=1", "features.bottom.x"),
    ],
    "qwen3-235b-h100-256": [
        ('model.layers=[{modules=["atention"]}] model.num_layers=1', "`atention` ... `attention`"),
        ("model.modules.moe.load_concentration=0", "load_concentration ... > 0"),
        ("model.modules.moe.load_concentration=-3", "load_concentration ... > 0"),
        ("model.modules.moe.load_concentration=nan", "load_concentration"),
        ("model.modules.moe.load_concentration=even", "load_concentration ... got `str`"),
        ("model.modules.moe.capacity_factor=0.9", "capacity_factor ... >= 1"),
        ("model.modules.moe.capacity_factor=1.5", "capacity_factor ... load_concentration"),
        ("model.modules.moe.num_groups=3", "`num_groups` = 3 ... divides it"),
        ("model.modules.moe.top_k_groups=2", "`top_k_groups` = 2 ... at most as many"),
        (
            "model.modules.moe.num_groups=64 model.modules.moe.top_k_groups=1",
            "`top_k_groups` = 1 ... fewer than `top_k` = 8",
        ),
        ("model.modules.moe.load_concentrations=1", "load_concentrations ... load_concentration"),
        ("model.modules.moe.load_seed=1", "`load_seed` = 1 ... `load_concentration`"),
        (
            "model.modules.moe.load_concentration=9 model.modules.moe.load_seed=-1",
            "load_seed ... >= 0",
        ),
        ("model.modules.moe.load_popularity=[1,2]", "2 entries ... `num_experts` = 128"),
        (_popular(0), "zero for all"),
        (_popular(-1), "load_popularity ... >= 0"),
        (f"{_popular(1)} model.modules.moe.load_concentration=9", "leave one of them out"),
        (f"{_popular(1)} model.modules.moe.load_seed=1", "`load_seed` draws ... leave one"),
        ("model.modules.moe.num_expert=8", "`model.modules.moe.num_expert` ... num_experts"),
        ("model.modules.moe.num_experts=0", "model.modules.moe ... >= 1"),
        ("model.modules.moe.num_experts=12", "`layout.ep` = 32 ... `num_experts` = 12"),
        ("layout.dp=1 num_nodes=99", "ep*etp = "),
        (
            "layout.tp=2 training.sequence_parallel=false num_nodes=99",
            "`layout.tp` = 2 ... all tokens",
        ),
        ("layout.etp=1024 layout.dp=8192 num_nodes=99999", "`layout.etp` ... `expert_ffn_size` = "),
    ],
}

# Texts of files by what reads them, a name, and the text around them.
_TEXTS = {
    (predicted, "mine.toml", "@"): [
        ("kind = 'job'\n[layout", "not valid TOML"),
        ('{"hidden_size": 4096}', "this is JSON ... `prism-jax import`"),
        ("", "`kind` is missing"),
        ("kind = 'cluster'", "`kind` is 'cluster' ... \"job\""),
        ("kind = 3", "`kind` is 3"),
        ("kind = 'job'", "`layout` is missing"),
        ("kind = 'job'\nlayout = 3", "`layout` is 3"),
        (_JOB.replace("num_microbatches = 4", ""), "`schedule.num_microbatches` is missing"),
        (_JOB.replace("kind = '1f1b'", "kind = ''"), "`schedule.kind` is ''"),
        (_JOB.replace("tp = 2", "tq = 2"), "`layout.tq` ... did you mean `layout.tp`"),
        (_JOB.replace("tp = 2", "tp = 0"), "`layout.tp` is 0 ... >= 1"),
        (_JOB.replace("tp = 2", "tp = -1"), "`layout.tp` is -1"),
        (_JOB.replace("tp = 2", "tp = 2.0"), "`layout.tp` is 2.0 ... int"),
        (_JOB.replace("tp = 2", "tp = true"), "`layout.tp` is True ... bool"),
        (_JOB.replace("tp = 2", "tp = '2'"), "`layout.tp` is '2' ... str"),
        (_JOB.replace("= 4", "= 0"), "`schedule.num_microbatches` is 0"),
        (_JOB + "layers_per_stage = [1, 2]", "`schedule.layers_per_stage` has 2 entries"),
        (_JOB + "layers_per_stage = [-1]", "layers_per_stage"),
        (_JOB + "blocking = 1", "`schedule.blocking` is 1"),
        ("world_size = 3\n" + _JOB, "`world_size` is 3 ... tp*pp*cp = 2*1*1 = 2"),
        ("world_size = 3\n" + _JOB.replace("tp = 2", "dp = 2"), "`world_size` is 3 ... 2 ranks"),
        ("num_nodes = 2\n" + _JOB, "`num_nodes` belongs to a cluster, but there is none"),
        (_JOB + "[measured]\np50_s = 1.0", "`measured.source` is missing"),
        (_JOB + "[measured]\nsource = 'x'\np50_s = nan", "`measured.p50_s` is nan"),
        (_JOB + "[measured]\nsource = 'x'\np50_s = inf", "`measured.p50_s` is inf"),
        (_JOB + "[measured]\nsource = 'x'\np50_s = 0", "`measured.p50_s` is 0"),
        (_JOB + "[kernels]", "`kernels`"),
        (_JOB + "[given]\nkeys = []", "No key `given`"),
        ("model = 'gpt3'\n" + _JOB, "No model `gpt3` ... gpt3-175b"),
        ("model = 3\n" + _JOB, "`model` is 3"),
        ("model = 'gpt3-175b'\n" + _JOB, "`cluster` is missing"),
        ("cluster = 'no-such.toml'\n" + _JOB, "no-such.toml ... no such file"),
        ("model = { num_layers = 'x' }\n" + _JOB, "`model.num_layers` is 'x'"),
        ("model = { num_layers = 1 }\n" + _JOB, "`model.hidden_size` is missing"),
        ("model = { nun_layers = 1 }\n" + _JOB, "`model.nun_layers` ... `model.num_layers`"),
        (_FULL.replace("'llama-3.1-8b'", _SMALL.replace("@", "attention")), "`model.num_heads`"),
        (_FULL.replace("'llama-3.1-8b'", _SMALL.replace("@", "moe")), "missing"),
        (_FULL.replace("= 1\nseq", "= 0\nseq"), "`training.microbatch_size` is 0"),
        (_FULL + "dtype = 'fp4'", "`training.dtype` is 'fp4'"),
        (_FULL + "zero = 4", "`training.zero` is 4"),
        (_FULL + "recompute = true", "`training.recompute` is True"),
        (_FULL.replace("tp = 2", "tp = 2\ndp = 999"), "1,998 ranks ... 64 devices"),
        (_FULL.replace("h100", "a100") + "dtype = 'fp8'", "`training.dtype` is 'fp8' ... bf16"),
    ],
    (data.load_cluster, "machine.toml", "@"): [
        (_CLUSTER.replace("num_nodes = 2", "num_nodes = 0"), "`num_nodes` is 0"),
        (_CLUSTER.replace("group = 8", "group = 99"), "`infiniband` is 16 ... innermost first"),
        (_CLUSTER.replace("infiniband", "nvlink"), "two links with one name"),
        (_CLUSTER.replace("per_s = 5e10", "per_s = -1"), "links[1].bandwidth"),
        (_CLUSTER.replace("bytes_per_s = 5e10", "gb_s = 50"), "links[1].bandwidth_gb_s"),
        (_CLUSTER.replace("h100-sxm", "h100"), "No device `h100`"),
        (_CLUSTER.replace("'h100-sxm'", "3"), "`device` is 3"),
    ],
    (data.load_model, "model.toml", "kind = 'model'\nhidden_size = 64\nvocab_size = 10\n@\n"): [
        ("num_layers = 3\n[[layers]]\nrepeat = 2\nmodules = ['mlp']", "`num_layers` is 3"),
        ("[[layers]]\nrepeat = 2\nmodules = []", "without `modules`"),
        ("num_layers = 3\n[modules.mlp]\nffn_size = 3", "`layers`, which is missing"),
        ("", "`num_layers` is missing"),
        ("[[layers]]\nrepeats = 2\nmodules = ['mlp']", "layers[0].repeat"),
    ],
    (with_layers, "layers.toml", "kind = 'layers'\n@"): [
        ("layers = [{ modules = ['mlp'], repeat = 3 }]\nnum_layers = 4", "of 3 layers"),
        ("layers = [{ modules = ['mlp'] }]\nhidden_size = 4", "No key `hidden_size"),
        ("", "the key `layers` is missing"),
        ("layers = []", "`layers` is empty; give at least one"),
        ("layers = []\nnum_layers = 4", "`layers` is empty; give at least one"),
        ("layers = [{ modules = [] }]", "an entry without `modules`"),
        (
            "layers = [{ modules = ['mlp'], repeat = 1 }, { modules = ['mlp'], repeat = 100000 }]",
            "has 100,001 layers; give at most 100,000",
        ),
    ],
    (with_layers, "layers.toml", "@"): [("kind = 'model'", 'must be "layers" here')],
    (data.load_software, "mine.toml", "kind = 'software'\nsource = 'me'\n[training]\n@\n"): [
        ("zero = 7", "`training.zero`"),
        ("micro = 1", "training.micro"),
    ],
    (
        data.load_network,
        "network.toml",
        "kind = 'network'\nsource = 'x'\n[[laws]]\nsource = 'x'\n@",
    ): [("component = 'network'\nfamily = 'spells'\nparameters = {slowdown = 2}", "no `sigma`")],
    (read_shapes, "shapes.csv", "kernel,dtype,case,term,low,high,values\n@\n"): [
        ("gemm,bf16,,m n,,,1", "line 2 ... `m n` is not a product of columns"),
        ("gemm,bf16,,m*n*k,,,1 2", "line 2 ... is the work; give it one value"),
        ("gemm,bf16,,m,4,2,1 2", "line 2 ... at least two values"),
        ("gemm,bf16,,m,1,2,1 x", "line 2 ... could not convert"),
        ("gemm,bf16,,m,1,2,1 inf", "line 2 ... not finite"),
        ("gemm,bf16,,m,1,2,1 2", "line 2 ... has no row of its work"),
    ],
    (load_schedule, "schedule.csv", "@\n"): [
        ("", "The orders hold no op"),
        ("0F0,0X0", "Op 1 of rank 0 is '0X0', which is no token"),
        ("0F0,2F0", "no rank runs stage 1, but there is a stage 2"),
        ("0F0\n0B0", "`0B0` (stage 0, microbatch 0) on rank 1 is out of place"),
        (f"0F0,{9_000 * 'x'}", f"is '{77 * 'x'}...', which is no token"),
        ("0F0,0SEND_X0", "Op 1 of rank 0 is '0SEND_X0'"),
        (f"0F0,{200_000 * 'x'}", "line 1: this is not valid CSV: field larger than"),
    ],
    (read_runs, "steps.csv", "@\n"): [
        ("step_time_s", "it has no rows"),
        ("run,step,step_time_s", "it has no rows"),
        ("step_time_s\n1.5\n-1", "`step_time_s` is -1.0 in row 2"),
        ("step_time_s\n1.5\n2\ninf", "`step_time_s` is inf in row 3"),
        ("step_time_s\n0\n2", "`step_time_s` is 0 in row 1"),
        ("step_time_s\nabc\n2", "`step_time_s` is 'abc' in row 1"),
        ("step_time_s\ntrue\nfalse", "`step_time_s` holds Boolean"),
        ("run,step_time_s\na,1.5\n,2", "`run` is empty in row 2"),
        ("step,step_time_s\n1,1.5\n,2", "`step` is empty in row 2"),
        ("step,step_time_s\n1,1.5\n2,", "`step_time_s` is empty in row 2"),
        ("step,step_time_s\n1,1.5\n1,2", "step 1 has two rows"),
        ("run,step,step_time_s\na,1,1.5\nb,1,2\na,1,3", "step 1 of run a has two rows"),
        ("step,step_time_s\n1.5,1.5\n2,2", "1 row has a fractional `step`"),
        ("step_time_s,step_time_s\n1,2", "two columns `step_time_s`"),
    ],
    (logged, "steps.csv", "@\n"): [
        ("step,dt_ms\n1,3100\n2,oops\n3,3100", "`dt_ms` is `oops` in row 2, and no number"),
        ("step,dt_ms\n1,3,100.5\n2,999.5", "row 1 has 3 cells and the first line 2; numbers"),
        (_WALL, "its wall times do not rise; give `--unit`"),
        (f"{_WALL}9,3,1\n5,4,1\n5,5,1", "step ... took ... 0 s"),
        ("step,tps\n1,0\n2,100", "step 1 took inf s, where a positive time is needed; give"),
        (f'step,dt_ms\n1,"{200_000 * "x"}"', "field larger than field limit"),
    ],
    (logged, "trainer_state.json", "@"): [
        ('{"log_history": [{"loss": 2.0, "step": 1}]}', "has no `train_runtime`")
    ],
    (imported, "job.sh", "@"): [
        ("echo", "no flags"),
        ("--a 'b", "cannot be read"),
        ("", "no flags"),
        ("X=xxxxxxxx\n" + "X=$X$X\n" * 40 + "run --num-layers $X\n", "grow beyond"),
        ("source job.sh\n. ./job.sh\nrun --num-layers 3\n", "read each other"),
        (_MEGATRON.replace("--bf16", "--fp8-format e4m3"), "products in fp8 of float32"),
        ("prog --num-layers 2 --fine-grained-activation-offloading", "offloading"),
        ("prog --num-layers 2 --moe-expert-rank-capacity-factor 2", "rank-capacity-factor"),
        ("prog --num-layers 2 --fp8-format e4m3 --num-layers-at-end-in-bf16 4", "at-end-in-bf16"),
        ("prog --num-layers 2 --tp-comm-overlap --disable-tp-comm-overlap-ag", "overlap-ag"),
    ],
    (imported, "job.xml", "@"): [("x", "no flags")],
    (imported, "job.yaml", "@"): [
        ("MODEL_ARGS:\n  - --x\n", "no file has keys of a framework"),
        ("a: [", "line 2 is not YAML"),
    ],
    (imported, "job.sh", f"{_MEGATRON} @"): [
        ("--use-megatron-fsdp --data-parallel-sharding-strategy all", "strategy` all"),
        ("--use-megatron-fsdp --outer-dp-sharding-strategy optim", "sharding-strategy` optim"),
        ("--num-experts 8 --moe-expert-capacity-factor 0.9", "capacity-factor` 0.9"),
        (
            "--num-experts 8 --moe-expert-capacity-factor 1.25 --moe-pad-expert-input-to-capacity",
            "capacity-factor` 1.25",
        ),
        ("--fp8-format hybrid --no-fp8-wgrad", "`no-fp8-wgrad` ... another dtype"),
        (
            "--fp8-format hybrid --skip-train --no-fp8-wgrad",
            "`skip-train` (evaluation ... `no-fp8-wgrad` (gradients",
        ),
        ("--fp8-format hybrid --fp8-recipe custom", "`fp8-recipe` custom"),
        ("--main-grads-dtype fp16", "`main-grads-dtype` fp16"),
        ("--main-params-dtype fp16", "`main-params-dtype` fp16"),
        ("--exp-avg-dtype bf16", "moments in bf16 and fp32"),
        ("--cross-entropy-fusion-impl linear", "`cross-entropy-fusion-impl` linear"),
        (
            "--no-overlap-p2p-communication --pipeline-model-parallel-size 4 "
            "--num-virtual-stages-per-pipeline-rank 3",
            "`no-overlap-p2p-communication` with several stages on a rank",
        ),
        (
            "--num-experts 8 --expert-model-parallel-size 2 --overlap-moe-expert-parallel-comm "
            "--pipeline-model-parallel-size 4",
            "`overlap-moe-expert-parallel-comm` ... one stage each",
        ),
        ("--encoder-num-layers 12 --pipeline-model-parallel-size 2", "first stages are an encoder"),
        ("--optimizer muon", "`optimizer` muon"),
        ("--global-batch-size 33", "`global-batch-size` 33"),
        ("--tensor-model-parallel-size 3", "3*1*1"),
        ("--hidden-size wide", "`hidden-size` is wide"),
        ("--num-attention-heads 7", "`num-attention-heads` 7 does not divide"),
        ("--sequence-parallel echo", "`sequence-parallel` is echo ... true or false"),
        ("--hidden-dropout a", "`hidden-dropout` is a ... from 0 to 1"),
        ("--normalization ScaleNorm", "`normalization` ScaleNorm"),
        ("--num-experts 8 --moe-layer-freq os.system('x')", "`moe-layer-freq`"),
        ("--num-experts 8 --moe-layer-freq [1]*3", "3 layers of 12"),
        ("--pipeline-model-parallel-layout 'tE|L'", "ends"),
        ("--hybrid-layer-pattern MX", "with X"),
        ("--experimental-attention-variant gdn2", "gdn2"),
        ("--experimental-attention-variant dsa --multi-latent-attention", "topk"),
        (
            "--experimental-attention-variant gdn --linear-attention-freq 4 "
            "--hybrid-layer-pattern M-M*",
            "without a layer of it",
        ),
        ("--window-size 3,x", "`window-size` 3 x"),
        # A misspelt flag is refused with the known one.
        ("--num-layer 4", "`num-layer` ... did you mean `num-layers`"),
        ("--hiden-size 4", "`hiden-size` ... did you mean `hidden-size`"),
        ("--hidden-sizes 4", "`hidden-sizes` ... did you mean `hidden-size`"),
        ("--swigul 4", "`swigul` ... did you mean `swiglu`"),
        (
            "--pipeline-model-paralell-size 4",
            "`pipeline-model-paralell-size` ... did you mean `pipeline-model-parallel-size`",
        ),
        ("--microbatch-size 4", "`microbatch-size` ... did you mean `micro-batch-size`"),
        ("--tensor-parallel-size 4", "did you mean `tensor-model-parallel-size`"),
        (" ".join(f"--flag-of-{i}-others" for i in range(5000)), "5000 flags that are not known"),
    ],
}


@pytest.mark.parametrize(
    ("job", "overrides", "words"), [(job, *row) for job, rows in _OVERRIDES.items() for row in rows]
)
def test_a_bad_override_is_one_sentence(job, overrides, words):
    name, *changes = job.split()
    refusal(lambda: predicted(name, [*changes, *overrides.split()]), words)


@pytest.mark.parametrize(
    ("read", "name", "text", "words"),
    [
        (read, name, frame.replace("@", text), words)
        for (read, name, frame), rows in _TEXTS.items()
        for text, words in rows
    ],
    ids=lambda x: str(x)[:40] if isinstance(x, str) else x.__name__,
)
def test_a_bad_file_is_one_sentence_that_names_it(read, name, text, words, written):
    path = written(name, text)
    message = refusal(lambda: read(path), words)
    assert any(said in message for said in (str(path), "Job `mine`", "no-such", "No model"))


def _sentence(call, words: str) -> str:
    """One sentence, or one and the list of what is known, that refuses a call."""
    message = refusal(call, words)
    assert message.endswith(".")
    assert message.replace(" Known: ", " ").count(". ") <= 1
    return message


def test_an_override_of_kernels_needs_a_cluster(written):
    path = written("mine.toml", _JOB)
    _sentence(lambda: data.load_job(path, ("kernels.rank.sigma=0.1",)), "names no cluster")


def test_files_that_cannot_be_read(tmp_path, written):
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"\xff\xfe\x00\x01")
    null = tmp_path / "null.toml"
    null.write_bytes(b"kind = 'job'\x00\n")
    table = written("table.csv", "a,b\n1,2\n")
    for path, part in [
        (tmp_path, "folder"),
        (tmp_path / "absent.toml", "no such file"),
        (binary, "UTF-8"),
        (null, "not valid TOML"),
        (table, "not valid TOML"),
    ]:
        for load in (data.load_job, data.load_model, data.load_cluster, data.load_device):
            assert str(path) in _sentence(ft.partial(load, path), part)


def test_unknown_names_show_the_near_ones():
    for load, name, near in [
        (data.load_job, "gpt3-175b-h100", "gpt3-175b-h100-768"),
        (data.load_model, "llama-3.1-7b", "llama-3.1-8b"),
        (data.load_cluster, "dgx-h10", "dgx-h100"),
        (data.load_device, "h100", "h100-sxm"),
    ]:
        assert near in _sentence(ft.partial(load, name), f"`{name}`")


@pytest.fixture
def own_profile(tmp_path, monkeypatch):
    """A copy of the folder of kernels, which a test may spoil."""
    import shutil

    from prism_jax.data import _load_kernels, _read

    original = _read.data_folder

    def data_folder(kind):
        return tmp_path / "kernels" if kind == "kernels" else original(kind)

    shutil.copytree(original("kernels"), tmp_path / "kernels")
    monkeypatch.setattr(_read, "data_folder", data_folder)
    monkeypatch.setattr(_load_kernels, "data_folder", data_folder)
    return tmp_path / "kernels"


@pytest.mark.parametrize(
    ("file", "line", "parts"),
    [
        ("variability.csv", "gemm,nonsense,lognormal,sigma=1,x", ["`component`", "nonsense"]),
        ("variability.csv", "gemm,stall,lognormal,rate=1;sigma=1,x", ["no `median_s`"]),
        ("variability.csv", ",network,two-regimes,slow=1,x", ["`slow`", "`slowdown`"]),
        ("variability.csv", ",network,two-regimes,step=1,x", ["`step`", "`step_excess`"]),
        ("variability.csv", ",network,lognormal,sigma=1,x", ["takes `two-regimes`"]),
        ("variability.csv", "gemm,residual,lognormal,sigma=nan,x", ["`sigma=nan`", "finite"]),
        ("variability.csv", "gemm,residual,lognormal,sigma=-1,x", ["`sigma=-1`"]),
        ("variability.csv", "gemm,residual,lognormal,sigma,x", ["`sigma`", "name=value"]),
        ("variability.csv", "gemm,worker_step,lognormal,sigma=1,x", ["`worker_step`", "empty"]),
        ("variability.csv", "gemm,rank,normal,sigma=1,x", ["`rank`", "empty"]),
        ("variability.csv", ",residual,lognormal,sigma=1,x", ["`residual`", "needs a `kernel`"]),
        ("variability.csv", "gemm,residual,lognormal,sigma=1,", ["`source` is missing"]),
        ("variability.csv", "gemm,residual,normal", ["cells"]),
        ("variability.csv", "gemm,residual,lognormal,sigma=1,x", ["two rows"]),
        ("efficiency.csv", "gemm,bf16,-1,0.5,0", ["`size`", "-1"]),
        ("efficiency.csv", "gemm,bf16,1e9,many,0", ["`efficiency`", "many"]),
        ("efficiency.csv", "gemm,bf16,1e+09,0.5,0", ["two rows of one size"]),
        ("source.toml", "nonsense = 1", ["nonsense"]),
    ],
)
def test_mistakes_in_a_profile(own_profile, file, line, parts):
    path = own_profile / "h100-sxm" / file
    if file == "source.toml":
        path.write_text(path.read_text().replace("who =", f"{line}\nwho ="))
    else:
        path.write_text(path.read_text() + line + "\n")
    message = _sentence(lambda: data.load_kernels(data.load_cluster("dgx-h100", 1)), file)
    for part in parts:
        assert part in message


def test_constant_laws_have_no_parameters_to_override(own_profile):
    path = own_profile / "dgx-h100" / "variability.csv"
    rows = path.read_text().splitlines()
    rows = [row if ",network," not in row else ",network,constant,,for a test" for row in rows]
    path.write_text("\n".join(rows) + "\n")
    change = "kernels.network.probability=0.1"
    _sentence(lambda: data.load_job("gpt3-175b-h100-768", change), "`network` is constant here")


def test_a_name_that_is_known_twice_is_listed_once():
    from prism_jax._misc import plural, unknown_name

    said = unknown_name("op", "gemn", ["gemm", "copy", "gemm"])
    assert said == "No op `gemn`; did you mean `gemm`? Known: copy, gemm."
    assert (plural(1, "row"), plural(0, "row")) == ("1 row", "0 rows")


def test_a_stall_has_a_rate_and_a_size(own_profile):
    path = own_profile / "dgx-h100" / "variability.csv"
    row = "all_gather,stall,lognormal,rate=1e-6;median_s=0.3;sigma=1,chosen for a test\n"
    path.write_text(path.read_text() + row)
    job = data.load_job("gpt3-175b-h100-768", ("kernels.all_gather.stall.rate=2e-6",))
    stall = job.kernels.find_variation("stall", "all_gather")
    assert stall.parameters == {"rate": 2e-6, "median_s": 0.3, "sigma": 1.0}
    residual = job.kernels.find_variation("residual", "all_gather")
    assert residual.parameters == {"sigma": 0.02}
