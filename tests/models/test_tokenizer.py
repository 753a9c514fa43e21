"""Tokenizers against transformers on the same files, chat templates, and streaming text."""

import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers
from tokenizers import Tokenizer as Backend

from atoll.errors import ModelError, RequestError
from atoll.models import LoadedModel, Tokenizer, load_model, resolve_model
from atoll.models.gguf_file import GGUFFile
from atoll.models.gguf_tokenizer import tokenizer_from_gguf
from tests.models.tiny import make_folder

PROMPTS = [
    "The capital of France is",
    "Hi",
    "1, 2, 3, 5, 8, 13,",
    "def fibonacci(n: int) -> int:\n    ",
    "Water boils at",
    "Once upon a time, in a small village by the sea, there lived a fisherman who",
    "In 1969, for the first time,",
    "Q: What is 12 + 30?\nA:",
    "To be, or not to be:",
    "naïve café, jalapeño and Straße",
    "Der schnelle braune Fuchs",
    "{'name': 'Ada', 'born': 18",
    "The three primary colours are red,",
    "SELECT name FROM users WHERE",
    "  Indented   text with    spaces",
    "A list of things that people have believed about the moon over the ages, with some remarks on each: first, that it is made of cheese; second,",
]

# SmolLM2's vocabulary has no token for these bytes, nor for 0xF1 (characters from U+40000 on, all unassigned): no tokenizer of it can write them.
CHARACTERS = st.characters(max_codepoint=0x3FFFF, exclude_categories=["Cs"], exclude_characters="\x04\x06\x13\x14\x16\x1d")
EMOJI = "👩‍👩‍👧‍👦 🇫🇷 ✨ 🤷🏽‍♀️ 𓀀𐍈 한국어 தமிழ் ภาษาไทย עברית \u0301\u200d\ufffd\x00\t\r\n"
TEXT = st.one_of(st.text(CHARACTERS, max_size=60), st.lists(st.sampled_from([*EMOJI, "the ", " the", "  ", "7", "é"]), max_size=40).map("".join))
SENTENCEPIECE = [
    "<unk>",
    "<s>",
    "</s>",
    *(f"<0x{byte:02X}>" for byte in range(256)),
    "▁",
    "h",
    "e",
    "l",
    "o",
    "▁h",
    "he",
    "ll",
    "▁he",
    "llo",
    "▁hello",
    "lo",
    "el",
]


@pytest.fixture(scope="module")
def smollm2_tokenizer() -> Tokenizer:
    path = resolve_model("smollm2")
    return tokenizer_from_gguf(GGUFFile(path).metadata, (2,), str(path))


@pytest.fixture(scope="module")
def smollm2_tokenizer_oracle() -> Any:
    path = resolve_model("smollm2")
    return transformers.AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)


@pytest.fixture(scope="module")
def sentencepiece() -> Tokenizer:
    return tokenizer_from_gguf(sentencepiece_metadata(), (2,), "test.gguf")


def sentencepiece_metadata() -> dict[str, Any]:
    num_pieces = len(SENTENCEPIECE)
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": SENTENCEPIECE,
        "tokenizer.ggml.scores": [0.0] * 259 + [-float(i) for i in range(num_pieces - 259)],
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * (num_pieces - 259),
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }


def stream(tokenizer: Tokenizer, token_ids: list[int], **options: bool) -> str:
    detokenizer = tokenizer.detokenizer(**options)
    return "".join([*map(detokenizer.push, token_ids), detokenizer.finish()])


def test_smollm2_ids_equal_transformers(smollm2_tokenizer: Tokenizer, smollm2_tokenizer_oracle: Any) -> None:
    texts = [*PROMPTS, EMOJI, "<|im_start|>user\nI have 1234 dogs.<|im_end|>", "3.14 x\n\n\ty", "don't 'S"]
    for text in texts:
        assert smollm2_tokenizer.encode(text) == smollm2_tokenizer_oracle(text).input_ids, text
    assert smollm2_tokenizer.eos_token_ids == (2,)
    assert smollm2_tokenizer.special_token_ids == set(range(17))
    assert smollm2_tokenizer.vocab_size == 49152


def test_smollm2_cuts_digits_off_spaces(smollm2_tokenizer: Tokenizer, smollm2_tokenizer_oracle: Any) -> None:
    # The file names the pre-tokenizer "smollm": digits stand alone, so the two spaces before one are a token. transformers does not read that name.
    two_spaces, seven = smollm2_tokenizer.encode("  "), smollm2_tokenizer.encode("7")
    assert smollm2_tokenizer.encode("  7") == two_spaces + seven
    assert smollm2_tokenizer_oracle("  7").input_ids != two_spaces + seven


def test_smollm2_chat_equals_transformers(smollm2_tokenizer: Tokenizer, smollm2_tokenizer_oracle: Any) -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello! 👋"}, {"role": "user", "content": "2 + 2?"}]
    for generation in (True, False):
        wanted = smollm2_tokenizer_oracle.apply_chat_template(messages, add_generation_prompt=generation, return_dict=False)
        assert smollm2_tokenizer.apply_chat_template(messages, add_generation_prompt=generation) == wanted


@settings(max_examples=300)
@given(text=TEXT)
def test_streamed_text_equals_the_whole(smollm2_tokenizer: Tokenizer, text: str) -> None:
    token_ids = smollm2_tokenizer.encode(text)
    assert stream(smollm2_tokenizer, token_ids) == smollm2_tokenizer.decode(token_ids) == text


@settings(max_examples=300)
@given(token_ids=st.lists(st.integers(0, 49151), max_size=30), skip=st.booleans())
def test_any_ids_stream_to_what_the_library_decodes(smollm2_tokenizer: Tokenizer, token_ids: list[int], skip: bool) -> None:
    assert stream(smollm2_tokenizer, token_ids, skip_special_tokens=skip) == smollm2_tokenizer.decode(token_ids, skip_special_tokens=skip)


def test_decoding_one_token_at_a_time_would_break_an_emoji(smollm2_tokenizer: Tokenizer) -> None:
    token_ids = smollm2_tokenizer.encode("🦖")
    assert "\ufffd" in "".join(smollm2_tokenizer.decode([token_id]) for token_id in token_ids)
    detokenizer = smollm2_tokenizer.detokenizer()
    assert [detokenizer.push(token_id) for token_id in token_ids] == [""] * (len(token_ids) - 1) + ["🦖"]


def test_half_a_character_at_the_end_is_not_lost(smollm2_tokenizer: Tokenizer) -> None:
    token_ids = smollm2_tokenizer.encode("a🦖")[:-1]
    assert stream(smollm2_tokenizer, token_ids) == smollm2_tokenizer.decode(token_ids) == "a\ufffd"


def test_a_replacement_character_of_the_model_does_not_wait(smollm2_tokenizer: Tokenizer) -> None:
    detokenizer = smollm2_tokenizer.detokenizer()
    assert "".join(detokenizer.push(token_id) for token_id in smollm2_tokenizer.encode("\ufffd")) == "\ufffd"


def test_ids_outside_the_vocabulary_add_nothing(smollm2_tokenizer: Tokenizer) -> None:
    assert stream(smollm2_tokenizer, [504, 60000, 3575]) == smollm2_tokenizer.decode([504, 60000, 3575]) == "The capital"


@given(text=st.one_of(TEXT, st.sampled_from(["hello", " hello", "  hello", "helloo hell", "ohé 👋"])))
def test_sentencepiece_streams_to_the_whole(sentencepiece: Tokenizer, text: str) -> None:
    token_ids = sentencepiece.encode(text)
    assert token_ids[0] == 1
    assert stream(sentencepiece, token_ids) == sentencepiece.decode(token_ids)
    assert sentencepiece.decode(token_ids) == text.replace("▁", " ")


def test_sentencepiece_joins_the_best_scored_pair_first(sentencepiece: Tokenizer) -> None:
    pieces = {token: i for i, token in enumerate(SENTENCEPIECE)}
    assert sentencepiece.encode("hello") == [1, pieces["▁hello"]]
    # "ll" scores above "el" and "lo".
    assert sentencepiece.encode("ello", add_special_tokens=False) == [pieces["▁"], pieces["e"], pieces["llo"]]


def test_a_bos_that_is_spelled_out_is_not_doubled(sentencepiece: Tokenizer) -> None:
    plain = sentencepiece.encode("hello")
    assert sentencepiece.encode("<s>hello")[:1] == [1]
    assert sentencepiece.encode("<s>hello").count(1) == plain.count(1) == 1
    assert sentencepiece.encode("hello", add_special_tokens=False) == plain[1:]


def test_the_folders_tokenizer_and_template(tmp_path: Path) -> None:
    make_folder(tmp_path)
    tokenizer = load_model(str(tmp_path)).tokenizer
    messages = [{"role": "user", "content": "the ö"}]
    token_ids = tokenizer.apply_chat_template(messages)
    assert token_ids == tokenizer.encode("user: the ö\nassistant:")
    assert token_ids.count(256) == 1
    assert tokenizer.decode(token_ids) == "user: the ö\nassistant:"
    with pytest.raises(RequestError, match="refuses the conversation: unknown role"):
        tokenizer.apply_chat_template([{"role": "robot", "content": "x"}])
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({key: value for key, value in json.loads(config.read_text()).items() if key != "chat_template"}))
    with pytest.raises(ModelError, match="no chat template"):
        load_model(str(tmp_path)).tokenizer.apply_chat_template(messages)


def test_llama3_text_is_cut_by_its_own_rule() -> None:
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "llama-bpe",
        "tokenizer.ggml.tokens": ["1", "2", "12", "123", "3", "4", "34", "Ġ", "ĠĠ"],
        "tokenizer.ggml.token_type": [1] * 9,
        "tokenizer.ggml.merges": ["1 2", "12 3", "3 4", "Ġ Ġ"],
    }
    tokenizer = tokenizer_from_gguf(metadata, (), "test.gguf")
    # Digits go in threes: 123 | 4, where a plain byte-level tokenizer would keep the four together.
    assert tokenizer.encode("1234") == [3, 5]
    assert tokenizer.encode("   12") == [8, 7, 2]
    # Qwen's rule differs in this alone: digits go one by one.
    assert tokenizer_from_gguf(metadata | {"tokenizer.ggml.pre": "qwen2"}, (), "test.gguf").encode("   12") == [8, 7, 0, 1]


@pytest.mark.parametrize("decoder", [None, decoders.WordPiece(), decoders.Sequence([decoders.Replace("_", " "), decoders.Fuse()])])
def test_an_unknown_decoder_is_refused(decoder: Any) -> None:
    backend = Backend(models.BPE({"a": 0}, []))
    if decoder is not None:
        backend.decoder = decoder
    with pytest.raises(ModelError, match=r"decoder .* is not supported; supported: byte-level BPE, SentencePiece"):
        Tokenizer(backend, (), {}, None)


@pytest.mark.parametrize(
    ("key", "value"),
    [("tokens", None), ("tokens", "abc"), ("scores", [0.0]), ("token_type", ["1"] * len(SENTENCEPIECE)), ("eos_token_id", -1), ("bos_token_id", "<s>")],
)
def test_damaged_tokenizer_metadata(key: str, value: Any) -> None:
    metadata = sentencepiece_metadata() | {f"tokenizer.ggml.{key}": value}
    with pytest.raises(ModelError, match=f"tokenizer.ggml.{key}"):
        tokenizer_from_gguf(metadata, (), "test.gguf")


def test_merges_must_join_tokens() -> None:
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": ["a", "b"],
        "tokenizer.ggml.token_type": [1, 1],
        "tokenizer.ggml.merges": ["a b"],
    }
    with pytest.raises(ModelError, match="merges joins 'a b', of which a part or the result is no token"):
        tokenizer_from_gguf(metadata, (), "test.gguf")


def test_user_defined_tokens_are_text() -> None:
    backend = Backend(models.BPE({"a": 0, "b": 1}, []))
    backend.decoder = decoders.ByteLevel()
    backend.normalizer = normalizers.NFC()
    backend.add_tokens([AddedToken("wörd with spaces", normalized=False)])
    tokenizer = Tokenizer(backend, (), {}, None)
    token_ids = tokenizer.encode("awörd with spacesb")
    assert token_ids == [0, 2, 1]
    assert stream(tokenizer, token_ids) == tokenizer.decode(token_ids) == "awörd with spacesb"


def test_loaded_model_carries_its_tokenizer(smollm2: LoadedModel) -> None:
    assert smollm2.tokenizer.decode(smollm2.tokenizer.encode("The capital")) == "The capital"
    assert smollm2.config.eos_token_ids == smollm2.tokenizer.eos_token_ids
