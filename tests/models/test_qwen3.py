"""Qwen3 against transformers: the same logits from the same checkpoint, folder and GGUF."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from atoll.models import load_model
from atoll.models.attention_layer import AttentionKind
from atoll.models.qwen3 import Qwen3Model
from tests.models.test_llama import TOKENS, expected, relative_error, run
from tests.models.tiny import make_folder
from tests.models.tiny_gguf import make_gguf

QWEN3: dict[str, Any] = {"model_type": "qwen3", "head_dim": 32}
CASES: dict[str, dict[str, Any]] = {
    "gqa": {},
    "mha_tied": {"num_key_value_heads": 4, "tie_word_embeddings": True},
    "narrow_heads": {"head_dim": 8},
    "window_named_but_unused": {"sliding_window": 9, "use_sliding_window": False},
}


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(case: str, tmp_path: Path) -> None:
    oracle = make_folder(tmp_path, **QWEN3 | CASES[case])
    loaded = load_model(str(tmp_path), dtype=torch.float32)
    wanted = expected(oracle, TOKENS)
    assert relative_error(run(loaded, TOKENS), wanted) < 1e-5
    assert relative_error(run(loaded, TOKENS, 31, 67, 68, 69), wanted) < 1e-5


def test_bf16_is_as_good_as_transformers_bf16(tmp_path: Path) -> None:
    oracle = make_folder(tmp_path, **QWEN3)
    exact = expected(oracle.double(), TOKENS)
    lowprec = expected(oracle.bfloat16(), TOKENS).double()
    logits = run(load_model(str(tmp_path), dtype=torch.bfloat16), TOKENS)
    assert (logits - exact).abs().max() <= 2 * (lowprec - exact).abs().max() + exact.abs().max() * 2**-8


def test_gguf_equals_the_folder(tmp_path: Path) -> None:
    oracle = make_folder(tmp_path, **QWEN3)
    make_gguf(tmp_path / "tiny.gguf", oracle)
    loaded = load_model(str(tmp_path / "tiny.gguf"), dtype=torch.float32)
    assert (loaded.config.model_type, loaded.config.head_dim) == ("qwen3", 32)
    assert relative_error(run(loaded, TOKENS), expected(oracle, TOKENS)) < 1e-5


def test_without_head_norms_the_logits_are_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    oracle = make_folder(tmp_path, **QWEN3)
    loaded = load_model(str(tmp_path), dtype=torch.float32)
    for layer in loaded.model.layers:  # type: ignore[attr-defined]
        monkeypatch.setattr(layer.mixer, "kind", AttentionKind())
    assert relative_error(run(loaded, TOKENS), expected(oracle, TOKENS)) > 1e-2


def test_keys_are_normed_by_their_own_scale(tmp_path: Path) -> None:
    oracle = make_folder(tmp_path, **QWEN3)
    loaded = load_model(str(tmp_path), dtype=torch.float32)
    for layer in loaded.model.layers:  # type: ignore[attr-defined]
        layer.mixer.head_scale = layer.mixer.head_scale[:1]
    assert relative_error(run(loaded, TOKENS), expected(oracle, TOKENS)) > 1e-2


def test_a_config_may_leave_out_what_hugging_face_assumes(tmp_path: Path) -> None:
    oracle = make_folder(tmp_path, **QWEN3 | {"head_dim": 128, "rms_norm_eps": 1e-6})
    path = tmp_path / "config.json"
    assumed = ("head_dim", "use_sliding_window", "sliding_window", "layer_types", "rms_norm_eps", "rope_parameters")
    path.write_text(json.dumps({key: value for key, value in json.loads(path.read_text()).items() if key not in assumed}))
    assert relative_error(run(load_model(str(tmp_path), dtype=torch.float32), TOKENS), expected(oracle, TOKENS)) < 1e-5


def test_every_tensor_is_asked_for(tmp_path: Path) -> None:
    oracle = make_folder(tmp_path, **QWEN3)
    shapes = Qwen3Model.tensor_shapes(load_model(str(tmp_path)).config)
    assert shapes == {name: tuple(parameter.shape) for name, parameter in oracle.named_parameters()}
