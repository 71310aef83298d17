"""Kernels of one job, priced."""

import msgspec

from ..cluster import (
    Group,
    between_nodes,
    collective_latency,
    compute_latency,
    cp_group,
    dp_group,
    find_send_link,
    send_recv_latency,
    tp_group,
)
from ..data import Cluster, Kernels, Layout, Model, Training
from ._block import Kernel


_DTYPE_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2, "fp8": 1}


class Costs(msgspec.Struct, frozen=True):
    """Prices the kernels of one job; sizes are those of one GPU and one microbatch.

    **Attributes:**

    - `model`, `layout`, `training`, `cluster`, `kernels`: of the job.
    """

    model: Model
    layout: Layout
    training: Training
    cluster: Cluster
    kernels: Kernels

    @property
    def tokens(self) -> int:
        """Tokens of a microbatch on one context-parallel rank."""
        return self.training.microbatch_size * self.training.sequence_length // self.layout.cp

    @property
    def norm_tokens(self) -> int:
        """Tokens where sequence parallelism has split them."""
        return self.tokens // self.layout.tp if self.splits_sequence else self.tokens

    @property
    def splits_sequence(self) -> bool:
        return self.training.sequence_parallel and self.layout.tp > 1

    @property
    def base_dtype(self) -> str:
        """The dtype of activations, and of what is not multiplied in fp8."""
        return "bf16" if self.training.dtype == "fp8" else self.training.dtype

    @property
    def tp(self) -> Group:
        return tp_group(self.layout)

    @property
    def cp(self) -> Group:
        return cp_group(self.layout)

    @property
    def dp(self) -> Group:
        return dp_group(self.layout)

    def gemm(self, m: int, n: int, k: int, dtype: str | None = None, batch: int = 1) -> Kernel:
        """`batch` products of an `(m, k)` with a `(k, n)` matrix; the result has two bytes."""
        dtype = self.training.dtype if dtype is None else dtype
        num_bytes = batch * (_DTYPE_BYTES[dtype] * (m * k + k * n) + 2 * m * n)
        return self._gemm(m, n, k, dtype, batch, num_bytes)

    def weight_gemm(self, m: int, n: int, k: int, dtype: str | None = None) -> Kernel:
        """As `gemm`, but the result is added to a gradient in float32."""
        dtype = self.training.dtype if dtype is None else dtype
        num_bytes = _DTYPE_BYTES[dtype] * (m * k + k * n) + 8 * m * n
        kernel = self._gemm(m, n, k, dtype, 1, num_bytes)
        return msgspec.structs.replace(kernel, size=f"{kernel.size} added")

    def attention(self, backward: bool) -> Kernel:
        """Fused causal attention. Of a context-parallel group, each rank has an equal share."""
        model, training, layout = self.model, self.training, self.layout
        heads, kv_heads = model.num_heads // layout.tp, model.kv_heads // layout.tp
        queries, keys = training.sequence_length // layout.cp, training.sequence_length
        phase = "backward" if backward else "forward"
        batch = training.microbatch_size
        size = f"{self.base_dtype} {batch}x{heads}x{queries}x{keys}x{model.head_dim}"
        # Two products forward, five backward; a causal mask leaves half of each.
        products = 5 if backward else 2
        flop = products * batch * heads * queries * keys * model.head_dim
        tensors = (2 * heads * queries + 2 * kv_heads * keys) * batch
        num_bytes = (2 if backward else 1) * 2 * tensors * model.head_dim
        kind = "attention_backward" if backward else "attention"
        found = self.kernels.find_efficiency(kind, self.base_dtype)
        mean = compute_latency(
            kind if found else "attention",
            self.base_dtype,
            flop,
            num_bytes,
            self.cluster.device,
            self.kernels,
        )
        return Kernel("attention", f"{size} {phase}", mean)

    def host(self) -> Kernel:
        """What a step takes besides its kernels."""
        return Kernel("host", "", self.kernels.constant_s)

    def move(self, kind: str, num_bytes: float) -> Kernel:
        """A kernel that only moves bytes."""
        num_bytes = round(num_bytes)
        mean = compute_latency(kind, "", 0, num_bytes, self.cluster.device, self.kernels)
        return Kernel(kind, f"{num_bytes}B", mean)

    def collective(self, kind: str, num_bytes: float, group: Group) -> Kernel:
        """A collective of `num_bytes`, the full tensor, that nothing hides."""
        transfer = collective_latency(kind, num_bytes, group, self.cluster, self.kernels)
        size = f"{round(num_bytes)}B {group.name}{group.size} {transfer.link}"
        return Kernel(kind, size, transfer.latency, transfer.link)

    def overlapped(self, collective: Kernel, beside: Kernel) -> Kernel:
        """What is left of a collective of a backward that may run beside a GEMM."""
        if not self.training.overlap_tp_backward:
            return collective
        hidden = min(collective.mean, beside.mean)
        left = collective.mean - hidden + self.kernels.overlap.contention * hidden
        size = f"{collective.size} beside {beside.size}"
        return msgspec.structs.replace(collective, size=size, mean=left)

    def pipelined(self, collective: Kernel, beside: Kernel) -> Kernel:
        """What is left of a tensor-parallel collective that runs in pieces beside a GEMM.

        The piece of one rank cannot be hidden: the first to come or the last to go.
        """
        if not self.training.tp_overlap:
            return collective
        pieces = self.layout.tp
        alone = collective.mean / pieces
        hidden = min(collective.mean - alone, beside.mean)
        left = collective.mean - hidden + self.kernels.overlap.contention * hidden
        size = f"{collective.size} in {pieces} pieces beside {beside.size}"
        return msgspec.structs.replace(collective, size=size, mean=left)

    def send_recv(self, sender: int, receiver: int) -> Kernel:
        """The activations, or their gradients, of a microbatch between two pipeline ranks."""
        num_bytes = 2 * self.norm_tokens * self.model.hidden_size
        link = find_send_link(self.cluster, self.layout, sender, receiver)
        transfer = send_recv_latency(num_bytes, link, self.kernels)
        mean = between_nodes(link, self.cluster, self.kernels) * transfer.latency
        return Kernel("send_recv", f"{num_bytes}B {link.name}", mean, link.name)

    def _gemm(self, m: int, n: int, k: int, dtype: str, batch: int, num_bytes: float) -> Kernel:
        flop = 2 * batch * m * n * k
        mean = compute_latency("gemm", dtype, flop, num_bytes, self.cluster.device, self.kernels)
        shape = f"{m}x{n}x{k}" if batch == 1 else f"{batch}x{m}x{n}x{k}"
        return Kernel("gemm", f"{dtype} {shape}", mean)
