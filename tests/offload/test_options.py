"""What the options for tiers say, and what an identity tells apart."""

import subprocess
import sys
from dataclasses import fields, replace

import numpy as np
import pytest
import torch

from atoll.errors import ConfigError
from atoll.kv.layout import PageLayout
from atoll.models import load_model
from atoll.offload import identity
from atoll.offload.identity import StoreIdentity, fingerprint, make_identity, named_tensors
from atoll.offload.options import DEFAULT_HOST_BYTES, DiskOptions, HostOptions, OffloadOptions, parse_offload


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("host:8GiB", OffloadOptions(HostOptions(8 * 2**30))),
        ("host:/a/b:1.5GB", OffloadOptions(HostOptions(1_500_000_000, "/a/b"))),
        ("disk:/a:2TiB", OffloadOptions(HostOptions(DEFAULT_HOST_BYTES), DiskOptions("/a", 2 * 2**40))),
        (" host:100kb , disk:/odd:name:7MiB", OffloadOptions(HostOptions(100_000), DiskOptions("/odd:name", 7 * 2**20))),
        ("lmcache:/a.yaml", OffloadOptions(lmcache="/a.yaml")),
        ("lmcache", OffloadOptions(lmcache="")),
    ],
)
def test_options_are_read(text: str, options: OffloadOptions) -> None:
    assert parse_offload(text) == options


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "offload part '' is unknown; use host:8GiB"),
        ("ram:8GiB", "offload part 'ram:8GiB' is unknown"),
        ("host:8", "ends in '8', which is no size; give a number with B, KB"),
        ("host:-8GiB", "is no size"),
        (f"host:{'9' * 400}GiB", "is no size"),
        ("host:0B", "has a size of 0 bytes; give 1 or more"),
        ("disk:8GiB", "lacks a path or a size; give disk:PATH:SIZE"),
        ("host:1GiB,host:2GiB", "has two parts 'host', one is the limit"),
        ("lmcache:", "names no file"),
        ("host:1GiB,lmcache:/a", "one or the other"),
    ],
)
def test_options_that_are_none_are_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_offload(text)


def test_the_scheduler_side_runs_without_torch() -> None:
    code = "import sys, atoll.offload.connector, atoll.offload.options, atoll.offload.slab; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def identity_of(model: object) -> StoreIdentity:
    return make_identity(model, "config", PageLayout(1, 1, 64, 16), dtype=torch.bfloat16, device=torch.device("cpu"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("row", [0, 3, 4000, 8190])
@pytest.mark.parametrize("by_sums", [False, True], ids=["bytes", "sums"])
def test_one_row_of_an_embedding_makes_another_model(by_sums: bool, dtype: torch.dtype, row: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where only a new token's row was trained: pages of prompts with that token are not the other model's. By sums, as on a GPU."""
    if by_sums:
        content = identity._content
        monkeypatch.setattr(identity, "_content", lambda tensor: identity.block_sums(torch.from_numpy(np.asarray(content(tensor)))).numpy().data)
    weight = torch.randint(1, 100, (8191, 257)).to(dtype)
    before = fingerprint({"weight": weight})
    weight[row] += 1
    assert fingerprint({"weight": weight}) != before
    weight[row] -= 1
    assert fingerprint({"weight": weight}) == before


@pytest.mark.parametrize(
    "weight",
    [torch.zeros(0), torch.tensor(1.0), torch.zeros(3, dtype=torch.bool), torch.zeros(4).to(torch.float8_e4m3fn), torch.ones(4, 6)[:, ::2], torch.ones(3, 2).T],
    ids=["empty", "scalar", "bool", "float8", "strided", "transposed"],
)
def test_weights_of_any_form_have_a_fingerprint(weight: torch.Tensor) -> None:
    assert fingerprint({"weight": weight}) == fingerprint({"weight": weight.clone()})


def test_rows_in_another_order_make_another_model() -> None:
    weight = torch.randn(64, 2048)
    order = torch.arange(64)
    order[[8, 9]] = order[[9, 8]]
    assert fingerprint({"weight": weight}) != fingerprint({"weight": weight[order]})


def test_the_fingerprint_is_of_every_weight_and_the_same_each_time() -> None:
    # Packed for oneDNN where this CPU does so: what lies in the packing counts all the same.
    one, two = (load_model("demo", dtype=torch.float32).model for _ in range(2))
    assert fingerprint(one) == fingerprint(two)
    named = dict(named_tensors(two))
    assert len(named) > 50 and "model.embedding" in named
    before = fingerprint(two)
    for name in ("model.embedding", "model.final_norm.scale"):
        tensor = named[name]
        kept = tensor.clone()
        tensor.mul_(1.5)
        assert fingerprint(two) != before, name
        tensor.copy_(kept)
    assert fingerprint(two) == before


def test_a_packed_weight_counts() -> None:
    class Holder:
        def __init__(self, weight: torch.Tensor) -> None:
            self.deep = [{"weight": torch.ops.mkldnn._reorder_linear_weight(weight, 16) if torch.backends.mkldnn.is_available() else weight}]

    weight = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    assert fingerprint(Holder(weight)) == fingerprint(Holder(weight.clone())) != fingerprint(Holder(weight + 1))


def test_scales_shape_and_format_count() -> None:
    layout = PageLayout(1, 1, 64, 16, "fp8_tensor")
    model = {"weight": torch.ones(4)}

    def make(scale: float = 1.0, layout: PageLayout = layout, config: str = "a") -> StoreIdentity:
        return make_identity(model, config, layout, dtype=torch.bfloat16, device=torch.device("cpu"), scales=(torch.full((1,), scale), None))

    assert make() == make()
    for other in (make(2.0), make(layout=replace(layout, page_size=32)), make(layout=replace(layout, kv_format="bf16")), make(config="b")):
        assert other != make()
    assert set(make().as_dict()) == {field.name for field in fields(StoreIdentity)}
    assert all(isinstance(value, (str, int)) for value in make().as_dict().values())
