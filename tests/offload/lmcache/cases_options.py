"""Configurations of LMCache that the connector refuses."""

from pathlib import Path

import pytest
import torch

from atoll.errors import ConfigError
from atoll.offload.lmcache import make_lmcache
from tests.offload.lmcache.pool import PAGE_BYTES, Pools


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("remote_url: lm://localhost:1", "remote_url"),
        ("gds_path: /somewhere", "gds_path"),
        ("local_cpu: false", "local_cpu"),
        ("max_local_cpu_size: 0", "max_local_cpu_size"),
        ("extra_config: {enable_nixl_storage: true, nixl_backend: POSIX, nixl_pool_size: 1}", "nixl"),
        ("local_disk: /proc/no/such/folder\nmax_local_disk_size: 1", "disk"),
        ("cache_policy: NONE", "NONE"),
        ("a: [", "cannot be used"),
        ("- a", "cannot be used"),
    ],
)
def test_configurations_that_do_not_fit_are_refused(tmp_path: Path, lines: str, message: str) -> None:
    path = tmp_path / "lmcache.yaml"
    path.write_text(("" if "max_local_cpu" in lines or lines.startswith("- ") else "max_local_cpu_size: 0.001\n") + lines + "\n")
    with pytest.raises(ConfigError, match=message):
        make_lmcache(str(path), "tests", torch.device("cpu"))


def test_a_missing_file_and_a_blob_too_large_are_refused(pools: Pools, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be used"):
        make_lmcache(str(tmp_path / "missing.yaml"), "tests", torch.device("cpu"))
    with pytest.raises(ConfigError, match="max_local_cpu_size of"):
        pools.make(cpu_bytes=11 * PAGE_BYTES)
