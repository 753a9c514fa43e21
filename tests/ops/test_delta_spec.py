"""What a delta spec says of its layer, and the values that it refuses."""

import re
import subprocess
import sys

import pytest
import torch

from atoll.errors import SpecError
from atoll.ops.delta import DeltaSpec


def test_derived_sizes() -> None:
    spec = DeltaSpec(num_k_heads=16, num_v_heads=32, k_head_dim=128, v_head_dim=64)
    assert (spec.group_size, spec.key_dim, spec.value_dim, spec.conv_dim) == (2, 2048, 2048, 6144)
    assert spec.state_shape == (32, 128, 64)
    assert spec.conv_state_shape == (6144, 3)
    assert spec.scale == 128**-0.5
    assert hash(spec) == hash(DeltaSpec(16, 32, 128, 64))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_k_heads": 0}, "num_k_heads 0 is below 1; give the model's count of key heads"),
        ({"num_v_heads": 3}, "num_v_heads 3 is not a multiple of num_k_heads 2; each key head must serve the same number of value heads"),
        ({"num_v_heads": 0}, "num_v_heads 0 is not a multiple"),
        ({"k_head_dim": 0}, "k_head_dim 0 is outside 1 to 256"),
        ({"v_head_dim": 257}, "v_head_dim 257 is outside 1 to 256"),
        ({"conv_width": 1}, "conv_width 1 is outside 2 to 16"),
        ({"dtype": torch.float64}, "dtype torch.float64 is not supported; use torch.bfloat16, torch.float16 or torch.float32"),
        ({"l2_eps": 0.0}, "l2_eps 0.0 is outside 0 to 1; use 1e-6"),
    ],
)
def test_wrong_values_are_named(change: dict, message: str) -> None:
    with pytest.raises(SpecError, match=re.escape(message)):
        DeltaSpec(**({"num_k_heads": 2, "num_v_heads": 4, "k_head_dim": 16, "v_head_dim": 16} | change))


def test_the_package_needs_no_triton() -> None:
    program = "import sys; sys.modules['triton'] = None; import atoll.ops.delta; print('atoll.ops.delta.triton_step' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert (done.stdout, done.returncode) == ("False\n", 0), done.stderr
