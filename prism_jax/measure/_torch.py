"""The kernels of PyTorch: matrix products and attention of a job, and the classes of kernels that
lists of operators name (`kernels/operators/`).
"""

import importlib
import time
from collections.abc import Callable, Iterator
from typing import Any

from ..data import Job
from ._calls import ATTENTION, KernelCall, compute_kernels


# Rows, values of each, and words, of tensors that fit into no cache; on a CPU smaller ones.
_SIZES = {True: (8192, 2048, 32768), False: (1024, 512, 4096)}
_WIDTHS = {True: (1024, 2048, 4096, 8192), False: (256, 512)}
_HEAD = 64
_LAUNCHES = 1000


class Torch:
    """PyTorch on the first device that is there: a GPU, or else the CPU.

    **Attributes:**

    - `memory_bytes`: the memory of the device.
    - `context_bytes`: what of it a process takes that has allocated nothing; 0 on a CPU.
    - `where`: which PyTorch on which device.

    **Raises:**

    A `ValueError` of one sentence if PyTorch is not installed.
    """

    def __init__(self) -> None:
        try:
            self.torch: Any = importlib.import_module("torch")
        except ImportError:
            raise ValueError(
                "`--with torch` needs PyTorch, which is not installed here; install it, or leave "
                "the option out to measure through JAX."
            ) from None
        self.on_gpu: bool = self.torch.cuda.is_available()
        self.torch.set_default_device("cuda" if self.on_gpu else "cpu")
        name = "CPU"
        self.memory_bytes: float = 0.0
        self.context_bytes: float = 0.0
        if self.on_gpu:
            name, (free, most) = self.torch.cuda.get_device_name(), self.torch.cuda.mem_get_info()
            self.memory_bytes, self.context_bytes = float(most), float(most - free)
        self.where: str = f"PyTorch {self.torch.__version__} on {name}"

    def ended(self, run: Callable[[], Any]) -> Callable[[], Any]:
        """A call of kernels until they have ended."""

        def waited() -> tuple[()]:
            run()
            if self.on_gpu:
                self.torch.cuda.synchronize()
            return ()

        return waited

    def empty(self) -> Callable[[], Any]:
        """A call whose kernel does nothing, until it has ended."""
        tensor = self.torch.zeros(1)
        return self.ended(lambda: tensor.add_(1))

    def launch_s(self) -> float:
        """How long the host takes to launch one of many kernels, in seconds."""
        tensor = self.torch.zeros(1)
        begin = time.perf_counter()
        for _ in range(_LAUNCHES):
            tensor.add_(1)
        return (time.perf_counter() - begin) / _LAUNCHES

    def calls(self, job: Job | None) -> list[KernelCall]:
        """The calls to time: of each class of kernels, and the products and attention of a job, or
        square products.
        """
        moving = [KernelCall(kind, "", size, self.ended(run)) for kind, size, run in self._moving()]
        return [*moving, *self._computing(job)]

    def _computing(self, job: Job | None) -> Iterator[KernelCall]:
        torch = self.torch
        shapes = [(n, n, n) for n in _WIDTHS[self.on_gpu]] if job is None else []
        kernels = [] if job is None else compute_kernels(job)
        for kernel in kernels:
            if kernel.kind == "gemm" and kernel.size.split()[1].count("x") == 2:
                m, n, k = map(int, kernel.size.split()[1].split("x"))
                shapes.append((m, n, k))
        for m, n, k in dict.fromkeys(shapes):
            a, b = (self._random(*shape, dtype=torch.bfloat16) for shape in ((m, k), (n, k)))
            run = self.ended(lambda a=a, b=b: torch.nn.functional.linear(a, b))
            yield KernelCall("gemm", "bf16", 2.0 * m * n * k, run, {"m": m, "n": n, "k": k})
        for kernel in kernels:
            if (match := ATTENTION.fullmatch(kernel.size)) and not match[7]:
                batch, heads, rows, size = map(int, match.group(1, 2, 3, 5))
                yield self._attention(kernel.flop, (batch, heads, rows, size), match[9])

    def _attention(self, flop: float, shape: tuple[int, int, int, int], phase: str) -> KernelCall:
        attend = self.torch.nn.functional.scaled_dot_product_attention
        tensors = [self._random(*shape, dtype=self.torch.bfloat16) for _ in "qkv"]
        name = f"-{64 if shape[-1] <= 64 else 128}"
        if phase == "forward":
            run = self.ended(lambda: attend(*tensors, is_causal=True))
            return KernelCall(f"attention{name}", "bf16", flop, run)
        for tensor in tensors:
            tensor.requires_grad_()
        out = attend(*tensors, is_causal=True)
        cotangent = self.torch.ones_like(out)
        back = self.torch.autograd.grad
        run = self.ended(lambda: back(out, tensors, cotangent, retain_graph=True))
        return KernelCall(f"attention_backward{name}", "bf16", flop, run)

    def _random(self, *shape: int, dtype: Any = None) -> Any:
        return (0.02 * self.torch.randn(*shape)).to(dtype or self.torch.float32)

    def _moving(self) -> Iterator[tuple[str, float, Callable[[], Any]]]:
        """The class, the bytes and the call of each kernel that only moves bytes."""
        torch, (rows, width, words) = self.torch, _SIZES[self.on_gpu]
        narrow = torch.bfloat16
        x, y, row, column = (self._random(*n) for n in ((rows, width),) * 2 + ((width,), (rows, 1)))
        x16, row16 = x.to(narrow), row.to(narrow)
        heads = x16.view(1, rows, width // _HEAD, _HEAD).transpose(1, 2)
        wide, contiguous = heads.float(), heads.contiguous()
        cos, middle = self._random(1, 1, rows, _HEAD), _HEAD // 2
        values, logits = x.numel(), self._random(rows, words)
        log, table = logits.log_softmax(-1), self._random(words, width)
        ids = torch.randint(0, words, (rows,))
        back, zeros = (
            torch.ops.aten._log_softmax_backward_data,
            torch.zeros(rows + 1, width).to(narrow),
        )
        yield "copies", 8 * values, lambda: y.copy_(x)
        yield "vector", 12 * values, lambda: x * y
        yield "cast-down", 6 * values, lambda: x.to(narrow)
        yield "cast-up", 6 * values, x16.float
        yield "mixed", 10 * values, lambda: x + x16
        yield "reduce", 4 * values, lambda: x.mean(-1)
        yield "columns", 4 * values, lambda: x.sum(0)
        yield "broadcast", 8 * values, lambda: x * column
        yield "broadcast-16", 4 * values, lambda: row16 * x16
        yield "expand", 4 * values, lambda: column.expand(rows, width) / width
        yield "fill", 2 * values, lambda: x16.new_zeros(rows, width)
        yield "halves", 2 * values, lambda: -heads[..., middle:]
        yield (
            "concat",
            4 * values,
            lambda: torch.cat((heads[..., middle:], heads[..., :middle]), -1),
        )
        yield "rotary", 6 * values, lambda: heads * cos
        yield "rotary-second", 6 * values, lambda: contiguous * cos
        yield "rotary-16", 4 * values, lambda: heads * cos.to(narrow)
        yield "rotary-backward", 8 * values, lambda: wide * cos
        yield "vector-strided", 12 * values, lambda: wide + contiguous.float()
        yield "strided", 6 * values, lambda: heads + contiguous
        yield "transpose", 4 * values, lambda: contiguous.transpose(1, 2).contiguous()
        yield "slice", 4 * values, lambda: zeros[:-1].copy_(x16)
        yield (
            "fused-norm",
            8 * values,
            lambda: torch.nn.functional.layer_norm(x, (width,), row, row),
        )
        yield "gather", 8 * values, lambda: torch.nn.functional.embedding(ids, table)
        yield "softmax", 8 * logits.numel(), lambda: logits.log_softmax(-1)
        yield "softmax-backward", 12 * logits.numel(), lambda: back(logits, log, -1, torch.float32)
        for dtype, ending in ((torch.float32, ""), (narrow, "-16")):
            yield from self._optimizer(table.numel(), dtype, ending)

    def _optimizer(
        self, number: int, dtype: Any, ending: str
    ) -> Iterator[tuple[str, float, Callable[[], Any]]]:
        parameter = self.torch.nn.Parameter(self._random(number, dtype=dtype))
        parameter.grad = self._random(number, dtype=dtype)
        size, gradients = number * parameter.element_size(), [parameter.grad]
        update = self.torch.optim.AdamW([parameter], lr=1e-4, fused=True)
        yield f"optimizer-norm{ending}", size, lambda: self.torch._foreach_norm(gradients)
        yield f"optimizer-clip{ending}", 2 * size, lambda: self.torch._foreach_mul_(gradients, 1.0)
        yield f"optimizer-adam{ending}", 7 * size, update.step
