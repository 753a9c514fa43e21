"""The demo model's tokenizer: every text comes back, every digit is a token, documents are cut as the chat template and few-shot prompts write them."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from tools.demo_model.documents import draw_document
from tools.demo_model.feed import ANSWER_BIT, END_OF_TEXT, pack_rows
from tools.demo_model.tokenizer import SPECIALS, save_tokenizer, train_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(train_tokenizer(num_texts=300), folder)
    return AutoTokenizer.from_pretrained(folder)


@given(text=st.text())
def test_any_text_comes_back(tokenizer: Any, text: str) -> None:
    ids = tokenizer(text).input_ids
    assert tokenizer.decode(ids) == text


@given(number=st.integers(min_value=0, max_value=10**12))
def test_digits_are_single(tokenizer: Any, number: int) -> None:
    ids = tokenizer(f"has {number} apples").input_ids
    digits = [tokenizer.decode([i]) for i in ids if any(c.isdigit() for c in tokenizer.decode([i]))]
    assert digits == list(str(number))


def test_special_tokens_come_first(tokenizer: Any) -> None:
    assert tokenizer.convert_tokens_to_ids(list(SPECIALS)) == [0, 1, 2]
    assert tokenizer.eos_token == "<|im_end|>" and tokenizer("".join(SPECIALS)).input_ids == [0, 1, 2]


def test_a_chat_document_is_what_the_template_writes(tokenizer: Any) -> None:
    messages = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "Hi."}, {"role": "user", "content": "1?"}]
    written = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    wanted = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\nHi.<|im_end|>\n<|im_start|>user\n1?<|im_end|>\n<|im_start|>assistant\n"
    assert written == wanted


def test_segments_are_cut_where_tokens_end(tokenizer: Any) -> None:
    """Tokenized piece by piece, as the feed does, or whole, as a user's prompt: the same ids."""
    rng = random.Random(0)
    for _ in range(40):
        texts = [segment.text for segment in draw_document(rng)]
        assert [i for text in texts for i in tokenizer(text).input_ids] == tokenizer("".join(texts)).input_ids


def test_rows_begin_with_documents_and_mark_answers(tokenizer: Any) -> None:
    rows = pack_rows(tokenizer.backend_tokenizer, random.Random(0), 8, 300)
    assert rows.dtype == np.uint16 and rows.shape == (8, 300)
    texts = [tokenizer.decode((row & (ANSWER_BIT - 1)).tolist()) for row in rows]
    assert all(text.startswith(("Question:", "<|im_start|>", "The ", "A", "H", "Once")) for text in texts)
    answers = tokenizer.decode([int(i) & (ANSWER_BIT - 1) for i in rows.flatten() if i & ANSWER_BIT])
    assert "####" in answers and "Question:" not in answers and "user" not in answers
    assert ((rows == (END_OF_TEXT | ANSWER_BIT)).sum() > 0) and not (rows == END_OF_TEXT).any()
