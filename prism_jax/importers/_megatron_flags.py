"""Flags of Megatron-LM that change neither the time nor the memory of a step, as far as a job
models them, and flags that do so in a way that a job cannot express.

Switches that disable a fusion of elementwise kernels (`no-*-fusion`) cost a little time that no
kernel table has. `overlap-param-gather-with-optimizer-step` starts gathers a little earlier that
overlap with the next forward anyway. Both count as flags that change nothing.

Names are those of `megatron/training/arguments.py` of Megatron-LM (core 0.14 to 0.16) in its
recorded functional tests, and other common ones. A flag that is in neither list is unknown.
"""

from ._problems import Reader


# Flags about optimisation, input, output, logs and checks, and about numerics without a cost.
_NAMES = """
    accumulate-allreduce-grads-in-fp32 adam-beta1 adam-beta2 adam-eps adam-epsilon
    align-grad-reduce align-param-gather apply-layernorm-1p apply-query-key-layer-scaling
    async-save async-strategy attention-softmax-in-fp32 auto-detect-ckpt-format
    calculate-per-token-loss check-for-large-grads check-for-nan-in-loss-and-grad
    check-weight-hash-across-dp-replicas-interval ckpt-assume-constant-structure ckpt-format
    ckpt-fully-parallel-load ckpt-fully-parallel-save ckpt-step clip-grad
    cross-entropy-fusion-impl cross-entropy-loss-fusion cuda-graph-impl cuda-graph-modules
    cuda-graph-warmup-steps data-args-path data-cache-path data-parallel-random-init data-path
    dataloader-type ddp-average-in-collective ddp-num-buckets
    ddp-pad-buckets-for-high-nccl-busbw decoupled-lr decoupled-min-lr
    delay-grad-reduce deterministic-mode disable-gloo-process-groups
    disable-vision-class-token dist-ckpt-format dist-ckpt-strictness distributed-backend
    distributed-timeout-minutes empty-unused-memory-level enable-experimental enable-one-logger
    end-weight-decay eod-mask-loss eval-interval eval-iters exit-duration-in-mins exit-interval
    exit-on-missing-checkpoint exit-signal-handler
    export-te-mcore-model fim-data fim-rate fim-spm-rate finetune
    fp8-amax-compute-algo fp8-amax-history-len fp8-interval fp8-margin
    full-validation group-query-attention high-priority-stream-groups hysteresis
    inference-max-seq-length init-method-std init-method-xavier-uniform initial-loss-scale
    is-hybrid-model layernorm-epsilon load local-rank log-batch-size-to-tensorboard log-interval
    log-memory-to-tensorboard log-num-zeros-in-grad log-params-norm log-progress log-straggler
    log-throughput log-timers-to-tensorboard log-validation-ppl-to-tensorboard
    log-world-size-to-tensorboard loss-scale loss-scale-window lr lr-decay-iters lr-decay-samples
    lr-decay-style lr-warmup-fraction lr-warmup-init lr-warmup-iters lr-warmup-samples
    lr-wsd-decay-samples lr-wsd-decay-style manual-gc
    manual-gc-interval master-addr master-port max-restarts max-tokens-to-oom memory-snapshot-path
    merge-file min-loss-scale min-lr mock-data moe-aux-loss-coeff moe-flex-dispatcher-backend
    moe-flex-dispatcher-num-sms moe-grouped-gemm moe-hybridep-num-sms
    moe-pad-experts-for-cuda-graph-inference moe-per-layer-logging moe-permute-fusion
    moe-router-bias-update-rate moe-router-dtype moe-router-enable-expert-bias moe-router-fusion
    moe-router-load-balancing-type
    moe-router-padding-for-quantization moe-router-pre-softmax moe-router-score-function
    moe-router-topk-scaling-factor moe-token-drop-policy
    moe-use-legacy-grouped-gemm moe-z-loss-coeff mscale mscale-all-dim mtp-loss-scaling-factor
    nccl-communicator-config-path nnodes no-align-grad-reduce no-barrier-with-level-1-timing
    no-bias-dropout-fusion no-bias-gelu-fusion no-bias-swiglu-fusion
    no-check-for-nan-in-loss-and-grad no-create-attention-mask-in-dataloader
    no-gradient-accumulation-fusion no-initialization no-load-optim no-load-rng
    no-log-learnig-rate-to-tensorboard no-log-loss-scale-to-tensorboard no-masked-softmax-fusion
    no-mmap-bin-files no-persist-layer-norm no-rope-fusion
    no-save-optim no-save-rng no-use-layer-wise-param-layout
    no-use-tokenizer-model-from-checkpoint-args node-rank non-persistent-save-interval
    norm-epsilon nproc-per-node num-dataset-builder-threads num-layers-at-end-in-bf16
    num-layers-at-start-in-bf16
    num-workers one-logger-project one-logger-run-name
    overlap-p2p-communication
    overlap-p2p-communication-warmup-flush overlap-param-gather-with-optimizer-step
    override-opt-param-scheduler position-embedding-type pretrained-checkpoint profile
    profile-ranks profile-step-end profile-step-start rdzv-backend rdzv-endpoint
    record-memory-history rerun-mode reset-attention-mask reset-position-ids
    reuse-grad-buf-for-mxfp8-param-ag rope-scaling-factor rotary-base rotary-interleaved
    rotary-percent rotary-scaling-factor rotary-seq-len-interpolation-factor save save-interval
    seed sgd-momentum spec split start-weight-decay straggler-minmax-count te-rng-tracker
    tensorboard-dir tensorboard-log-interval tensorboard-queue-size test-data-path test-mode
    tiktoken-num-special-tokens tiktoken-pattern timing-log-level timing-log-option
    tokenizer-model tokenizer-type tp-comm-overlap-cfg train-data-path train-iters train-samples
    transformer-impl use-checkpoint-args use-checkpoint-opt-param-scheduler use-cpu-initialization
    use-dist-ckpt use-flash-attn use-fused-weighted-squared-relu use-legacy-models
    use-mcore-models use-pytorch-profiler use-rope-scaling use-tp-pp-dp-mapping valid-data-path
    verify-integrity vocab-extra-ids vocab-file wandb-exp-name wandb-project wandb-save-dir
    weight-decay weight-decay-incr-style wgrad-deferral-limit
"""
IGNORED = frozenset(_NAMES.split())

REFUSED = {
    "patch-dim": "images",
    "img-h": "images",
    "perform-rl-step": "reinforcement learning, which also generates",
    "moe-latent-size": "experts of another width than the model's",
    "optimizer-cpu-offload": "an optimizer in the memory of the host",
    "cpu-offloading": "activations in the memory of the host",
    "export-kd-cfg": "a second model that teaches",
    "experimental-attention-variant": "attention of another kind",
    "heterogeneous-layers-config-path": "layers that another file describes",
    "use-packed-sequence": "sequences that are packed",
    "step-batch-size-schedule": "a batch that grows during the run",
    "rampup-batch-size": "a batch that grows during the run",
    "moe-expert-capacity-factor": "experts that drop tokens",
    "langrl-env-config": "reinforcement learning, which also generates",
    "refit-method": "reinforcement learning, which also generates",
    "defer-embedding-wgrad-compute": "gradients of the head that are computed after the pipeline",
    "hierarchical-context-parallel-sizes": "context parallelism in several levels",
}

# Flags that cost or save time only if matrix multiplications are in fp8.
REFUSED_IN_FP8 = {
    "no-fp8-wgrad": "gradients of weights in another dtype than the rest",
    "first-last-layers-bf16": "layers in another dtype than the rest",
    "fp8-param-gather": "parameters that are gathered in fp8",
}
# Of the optimizer, on which everything else counts.
_IN_FLOAT32 = ("exp-avg-dtype", "exp-avg-sq-dtype", "main-grads-dtype", "main-params-dtype")


def check_flags(read: Reader, dtype: str) -> None:
    """Adds all unread flags to the problems, except those that change nothing if matrix
    multiplications are in `dtype`.
    """
    in_fp8 = "fp8" in dtype
    refused = REFUSED | (REFUSED_IN_FP8 if in_fp8 else {})
    ignored = IGNORED | (frozenset() if in_fp8 else REFUSED_IN_FP8.keys())
    for flag in _IN_FLOAT32:
        read.choice(flag, "fp32", ("fp32",))
    for key in read.unread():
        if key in refused and read.get(key) not in (None, False):
            read.problems.append(f"`{key}` ({refused[key]})")
        elif key not in refused and key not in ignored:
            read.problems.append(f"`{key}`, a flag that is not known here")
