"""Models with random weights by their name: loaded like any other, with a text for every token."""

import pytest
import torch

from atoll import LLM, SamplingParams
from atoll.errors import ModelError, RequestError
from atoll.models import load_model
from atoll.models.loader import load_config
from atoll.models.random_model import SHAPES, NumberTokenizer

GREEDY = SamplingParams(temperature=0, max_tokens=6)


def test_a_random_model_generates_and_says_its_tokens() -> None:
    llm = LLM("random:tiny", device="cpu", dtype="float32", kv_format="fp32", num_pages=64, max_model_len=128)
    pieces = list(llm.generate_stream([[5, 9, 200], "5 9 200"], GREEDY))
    one, other = (piece.output for piece in sorted(pieces, key=lambda piece: piece.index) if piece.output is not None)
    assert one.token_ids == other.token_ids and other.prompt_token_ids == [5, 9, 200] and len(one.token_ids) == 6
    assert one.text == "".join(f" {token_id}" for token_id in one.token_ids)
    assert all(piece.text == f" {piece.token_ids[0]}" for piece in pieces)
    with pytest.raises(RequestError, match="token id 512 is outside the vocabulary's 0 to 511"):
        llm.generate([512], GREEDY)
    with pytest.raises(ModelError, match="no chat template"):
        llm.chat([{"role": "user", "content": "hello"}])


def test_the_weights_are_the_same_each_time() -> None:
    a, b = (load_model("random:tiny", dtype=torch.float32).model for _ in range(2))
    hidden = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    assert torch.equal(a.logits(hidden), b.logits(hidden))


def test_numbers_are_tokens_and_words_are_some() -> None:
    tokenizer = NumberTokenizer(1000)
    assert tokenizer.encode(tokenizer.decode([0, 7, 999])) == [0, 7, 999] and tokenizer.vocab_size == 1000
    words = tokenizer.encode("the cat and the dog 1000 -1 ² 00000000000000007 caf\u00e9")
    assert words == tokenizer.encode("the cat and the dog 1000 -1 ² 00000000000000007 caf\u00e9") and words[0] == words[3] != words[1]
    assert len(words) == 10 and all(0 <= word < 1000 for word in words)
    assert tokenizer.eos_token_ids == () and tokenizer.bos_token_id is None


def test_what_cannot_be_made_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_config("random:tiny") == SHAPES["tiny"]
    for load in (load_model, load_config):
        with pytest.raises(ModelError, match=r"model 'random:huge' has an unknown shape; use one of random:qwen3\.5-35b-a3b, random:tiny"):
            load("random:huge")
    monkeypatch.setattr("atoll.models.random_model._memory_bytes", lambda device: 10**9)
    with pytest.raises(ModelError, match=r"'random:qwen3\.5-35b-a3b' has 69\.3 GB of weights, cpu has 1\.0 GB"):
        load_model("random:qwen3.5-35b-a3b", dtype=torch.bfloat16)
