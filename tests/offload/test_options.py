"""What the options for tiers say, and what an identity tells apart."""

import subprocess
import sys
from dataclasses import fields, replace

import pytest
import torch

from atoll.errors import ConfigError
from atoll.kv.layout import PageLayout
from atoll.models import load_model
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
