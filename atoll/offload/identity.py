"""Whose pages a store holds: model, weights, layout and format, so that no page is ever read by another model; knows no file."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

import torch
from xxhash import xxh3_128, xxh3_128_hexdigest

from atoll.kv.layout import PageLayout

# Values of a weight tensor on a GPU that enter one sum of the fingerprint; a row of most tensors has more, so models that differ in one row are two.
_BLOCK = 1024
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of a value


@dataclass(frozen=True)
class StoreIdentity:
    """What must be equal for a stored page to be read. Each field is one that an error can name."""

    model_type: str
    config: str  # fingerprint of everything that the model's config says
    weights: str  # fingerprint of all weights
    scales: str  # fingerprint of the scales that lie in no page (fp8_tensor)
    dtype: str
    device: str  # cpu or cuda: their sums differ in the last bits
    page_bytes: int
    page_size: int  # tokens
    kv_format: str
    v_layout: str
    num_layers: int  # attention layers
    num_kv_heads: int
    head_dim: int
    slot_bytes: int  # of a state; 0: the model keeps none
    image_pages: int  # of a state's image; 0: none is kept

    @property
    def namespace(self) -> str:
        """All of it in one short word, for stores that keep many models' pages under names."""
        return xxh3_128_hexdigest(repr(self).encode())

    def as_dict(self) -> dict[str, str | int]:
        return asdict(self)


def make_identity(
    model: object,  # whatever holds the weights; its attributes are walked
    config: object,  # the model's, with a repr that says all
    layout: PageLayout,
    *,
    dtype: torch.dtype,
    device: torch.device,
    scales: Sequence[torch.Tensor | None] = (),  # the pool's k_scales and v_scales
    slot_bytes: int = 0,
    image_pages: int = 0,
) -> StoreIdentity:
    """Reads every weight once, and waits for the device."""
    hasher = xxh3_128()
    for scale in scales:
        hasher.update(b"none" if scale is None else scale.detach().float().cpu().numpy().tobytes())
    return StoreIdentity(
        model_type=str(getattr(config, "model_type", type(model).__name__)),
        config=xxh3_128_hexdigest(repr(config).encode()),
        weights=fingerprint(model),
        scales=hasher.hexdigest(),
        dtype=str(dtype).removeprefix("torch."),
        device=device.type,
        page_bytes=layout.page_bytes,
        page_size=layout.page_size,
        kv_format=layout.kv_format,
        v_layout=layout.v_layout,
        num_layers=layout.num_layers,
        num_kv_heads=layout.num_kv_heads,
        head_dim=layout.head_dim,
        slot_bytes=slot_bytes,
        image_pages=image_pages,
    )


def fingerprint(model: object) -> str:
    """Of name, shape, dtype and all values of every tensor that the model holds."""
    hasher = xxh3_128()
    num_tensors = 0
    for name, tensor in named_tensors(model):
        num_tensors += 1
        hasher.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
        hasher.update(_content(tensor))
    assert num_tensors, "a model without a tensor has no fingerprint"
    return hasher.hexdigest()


def named_tensors(model: object) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor under an object's attributes, in the order of their making, each once, through objects of Atoll's and torch's, and plain containers."""
    seen: set[int] = set()

    def walk(name: str, value: object) -> Iterator[tuple[str, torch.Tensor]]:
        if id(value) in seen:
            return
        if isinstance(value, torch.Tensor):
            seen.add(id(value))
            yield name, value
        elif isinstance(value, Mapping):
            seen.add(id(value))
            for key, item in value.items():
                yield from walk(f"{name}.{key}", item)
        elif isinstance(value, (list, tuple)):
            seen.add(id(value))
            for i, item in enumerate(value):
                yield from walk(f"{name}.{i}", item)
        elif not isinstance(value, type) and isinstance(attributes := getattr(value, "__dict__", None), dict):
            seen.add(id(value))
            for key, item in attributes.items():
                yield from walk(f"{name}.{key}", item)

    yield from walk("model", model)


def _content(tensor: torch.Tensor) -> memoryview:
    """What changes with any value: the bytes where they are at hand, sums of them where they would have to come from a GPU."""
    if tensor.layout is not torch.strided:
        # oneDNN's packed layout: has no values by place.
        tensor = tensor.to_dense()
    values = tensor.detach().reshape(-1).contiguous().view(_INTEGERS[tensor.element_size()])
    at_hand = values if values.device.type == "cpu" else block_sums(values).cpu()
    return at_hand.numpy().data


def block_sums(values: torch.Tensor) -> torch.Tensor:
    """Sums of each block of integers, the last of what is left over: the same in whatever order a device adds."""
    num_whole = len(values) // _BLOCK * _BLOCK
    sums = values[:num_whole].view(-1, _BLOCK).sum(1, dtype=torch.int64)
    return torch.cat([sums, values[num_whole:].sum(dtype=torch.int64)[None]])
