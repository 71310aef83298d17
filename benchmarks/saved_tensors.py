"""What autograd keeps of a layer, and how many operators run, by PyTorch and Transformers on a CPU:
`python benchmarks/saved_tensors.py [--family NAME]`, which needs both.

`saved_tensors.toml` has the configurations, of a few thousand parameters, and what was measured,
with which the tests compare lists of operators.

A CPU stands for a GPU: attention is one operator that keeps what cuDNN's does, and what autocast
runs in float32 on a GPU alone (`aten/src/ATen/autocast_mode.h`) is cast by hand.
"""

import pathlib
import sys
import tomllib
from collections import Counter
from typing import Any


sys.path.insert(0, __file__.rpartition("/benchmarks/")[0])
from validation.tables import options, table


SEQUENCES, LENGTH = 2, 64
_FILE = pathlib.Path(__file__).with_name("saved_tensors.toml")
# Operators that move nothing.
_VIEWS = """
    view _unsafe_view t transpose permute expand detach slice unsqueeze squeeze select alias split
    split_with_sizes unbind empty empty_like new_empty empty_strided _reshape_alias normal_
    zeros_like as_strided
"""
_WIDE = "pow rsqrt exp log layer_norm softmax log_softmax cross_entropy __pow__ __rpow__"


def families() -> dict[str, dict[str, Any]]:
    """The families of models: the keys of their `config.json`, and by weights the bytes of a token
    that a layer keeps, and its operators forward and backward."""
    return tomllib.loads(_FILE.read_text())


def main() -> None:
    given = options(__doc__, family=("", "this family alone"))
    rows = [
        [name, weights, keys[weights], measured(keys["config"], weights)]
        for name, keys in families().items()
        for weights in ("fp32", "bf16")
        if weights in keys and given.family in ("", name)
    ]
    print(table(["family", "weights", "bytes, forward, backward", "now"], rows))


def measured(config: dict[str, Any], weights: str) -> list[float]:
    """The bytes that a further layer keeps of a token, and its operators, without those that stand
    for attention."""
    two, four = (_run({**config, "num_hidden_layers": n}, weights) for n in (2, 4))
    tokens = 2 * SEQUENCES * LENGTH
    return [
        (four[0] - two[0]) / tokens,
        *((b - a) / 2 for a, b in zip(two[1:], four[1:], strict=True)),
    ]


def _run(keys: dict[str, Any], weights: str) -> tuple[int, int, int]:
    import torch  # pyright: ignore
    import transformers  # pyright: ignore
    from torch.nn import functional  # pyright: ignore

    functional.scaled_dot_product_attention = _attention(torch)
    config = transformers.CONFIG_MAPPING[keys["model_type"]](**{**keys, "use_cache": False})
    make = transformers.AutoModelForCausalLM.from_config
    model = make(config, dtype=torch.float32, attn_implementation="sdpa").train()
    model = model.bfloat16() if weights == "bf16" else model
    held = {one.untyped_storage().data_ptr() for one in (*model.parameters(), *model.buffers())}
    saved: dict[int, Any] = {}

    def keep(tensor: Any) -> Any:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in held:
            saved[storage.data_ptr()] = storage
        return tensor

    words = torch.randint(0, 50, (SEQUENCES, LENGTH))
    count, wide = _counting(torch), _wide(torch, functional)
    with count, wide, torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        with torch.autocast("cpu", torch.bfloat16, enabled=weights == "fp32"):
            logits = model(input_ids=words).logits
        loss = functional.cross_entropy(logits.float().flatten(0, 1), words.flatten())
        total, forward = sum(one.nbytes() for one in saved.values()), count.number.total()
    with count, wide:
        loss.backward()
    return total, forward, count.number.total() - forward


def _attention(torch: Any) -> Any:
    class Attention(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, q: Any, k: Any, v: Any, mask: Any) -> Any:
            out = torch.empty(*q.shape[:1], q.shape[2], q.shape[1], v.shape[3], dtype=q.dtype)
            out = out.normal_().transpose(1, 2)
            kept = () if mask is None else (mask,)
            ctx.save_for_backward(q, k, v, out, torch.empty(q.shape[:3]), *kept)
            return out

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            return (*map(torch.zeros_like, ctx.saved_tensors[:3]), None)

    def run(q: Any, k: Any, v: Any, attn_mask: Any = None, **_: Any) -> Any:
        if torch.is_autocast_enabled("cpu"):
            q, k, v = (one.bfloat16() for one in (q, k, v))
        if attn_mask is not None:  # aten/src/ATen/native/transformers: convert_boolean_attn_mask
            hidden = attn_mask.logical_not()
            attn_mask = q.new_empty(hidden.shape).masked_fill_(hidden, -float("inf"))
        return Attention.apply(q, k, v, attn_mask)

    return run


def _counting(torch: Any) -> Any:
    number: Counter[str] = Counter()

    class Counting(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(
            self, run: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            name = run.overloadpacket.__name__
            if name not in _VIEWS.split():
                number[name] += 1 + (name == "native_layer_norm_backward")  # Two kernels.
            return run(*args, **(kwargs or {}))

    counting: Any = Counting()
    counting.number = number
    return counting


def _wide(torch: Any, functional: Any) -> Any:
    places = (torch, torch.Tensor, functional)
    listed = {getattr(one, name) for one in places for name in _WIDE.split() if hasattr(one, name)}

    def cast(one: Any) -> Any:
        return one.float() if isinstance(one, torch.Tensor) and one.dtype == torch.bfloat16 else one

    class Wide(torch.overrides.TorchFunctionMode):
        def __torch_function__(
            self, run: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            kwargs = kwargs or {}
            if run in listed and torch.is_autocast_enabled("cpu"):
                args, kwargs = [*map(cast, args)], {key: cast(one) for key, one in kwargs.items()}
            return run(*args, **kwargs)

    return Wide()


if __name__ == "__main__":
    main()
