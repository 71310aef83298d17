"""Flags of Megatron-LM that change neither what a step computes nor what it holds, as far as a job
says it, and flags that do so in a way that a job cannot say.

Names as in `megatron/training/arguments.py` of Megatron-LM (core 0.14 to 0.16), those of its
recorded functional tests among them; a beginning stands for all flags that begin so.
"""

import re


# What is optimised, read, written, logged and checked; numerics that cost nothing.
_IGNORED = re.compile(
    r"(?x)"
    r"(lr|min-lr|decoupled|weight-decay|start-weight-decay|end-weight-decay|adam|sgd|clip-grad"
    r"|init-method|seed|loss-scale|initial-loss-scale|min-loss-scale|hysteresis|override-opt"
    r"|use-checkpoint|train|exit|eval|full-validation|test-mode|data|split|mock-data|tokenizer"
    r"|vocab-file|merge-file|tiktoken|num-workers|reset|eod|fim|no-mmap|no-create|num-dataset"
    r"|save|load|no-save|no-load|finetune|ckpt|dist-ckpt|use-dist-ckpt|auto-detect|async|verify"
    r"|pretrained|non-persistent|log|tensorboard|wandb|timing|no-barrier|profile|record-memory"
    r"|one-logger|enable-one-logger|disable-one-logger|distributed-(backend|timeout)|local-rank"
    r"|use-cpu-initialization|perform-initialization|no-initialization|rank|world-size"
    r"|disable-gloo|enable-gloo|use-tp-pp-dp-mapping|nccl|use-sharp|high-priority"
    r"|deterministic|rerun|error-injection|check-(for|weight)|no-check|straggler|inprocess"
    r"|manual-gc|empty-unused|te-rng|enable-experimental|use-(mcore|legacy|flash-attn)|no-use-token"
    r"|norm-epsilon|rotary-(base|percent|interleaved|scaling|seq)|no-rope|use-rope|mscale|beta-"
    r"|attention-softmax|no-masked|masked-softmax|apply-query|apply-residual|apply-layernorm-1p"
    r"|no-bias|bias-|no-(gradient-acc|persist|async)|swiglu-|clamp|no-fp8|calculate-per-token"
    r"|moe-(aux|z-loss|router-(score|pre|dtype|topk-scaling|num-groups|group|enable|bias|load"
    r"|force|fusion|padding)|grouped-gemm|permute|token-(dispatcher|drop)|flex|hybridep|pad"
    r"|per-layer|use-legacy|deepep|expert-capacity|input-jitter|extended|enable-deepep)"
    r"|mtp-loss|export|refit|ddp|overlap-p2p|no-overlap-p2p|align|delay|defer|wgrad"
    r"|num-layers-at|first-last-layers|use-packed|step-batch-size|rampup|langrl|position-embedding-"
    r"|group-query-attention|max-tokens|inference-max|use-ring|tp-comm-(?!overlap$)|fp8-(?!format)"
    r"|mamba-(?!num|head|state)|spec$|is-hybrid|main-|exp-avg|store-param|use-precision-aware"
    r"|cross-entropy|transformer-impl|keep-|barrier|hierarchical|no-weight|lazy|s3|onnx|replication"
    r"|reuse-grad|mlp-chunks|cuda-graph|cp-comm|enable-cuda-graph|external-cuda|standalone"
    r"|nproc|nnodes|node-rank|master|rdzv|max-restarts|local-addr"
    r"|accumulate-allreduce|use-fused|distribute-saved|bert-|ckpt-|dataloader|cyclic"
    r"|overlap-(param-gather-with|moe)|account-for(?!-)|max-seqlen|untie(?!-)|attention-output-gate(?!$)"
    r"|disable-(mamba|straggler|jit|vision)|no-(data|shared|query|one|scatter|use|disable))"
)

REFUSED = {
    "encoder-num-layers": "a model with an encoder",
    "decoder-num-layers": "a model with an encoder",
    "encoder-seq-length": "a model with an encoder",
    "patch-dim": "images",
    "img-h": "images",
    "perform-rl-step": "reinforcement learning, which also generates",
    "use-megatron-fsdp": "parameters that are sharded over replicas",
    "use-torch-fsdp2": "parameters that are sharded over replicas",
    "moe-latent-size": "experts of another width than the model's",
    "optimizer-cpu-offload": "an optimizer in the memory of the host",
    "cpu-offloading": "activations in the memory of the host",
    "export-kd-cfg": "a second model that teaches",
    "bert-no-binary-head": "a bidirectional model",
    "experimental-attention-variant": "attention of another kind",
    "heterogeneous-layers-config-path": "layers that another file describes",
}


def is_ignored(flag: str) -> bool:
    """Whether a flag says nothing that a job would say."""
    return _IGNORED.match(flag) is not None
