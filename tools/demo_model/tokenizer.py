"""The demo model's tokenizer: byte-level BPE, every digit a token of its own, ChatML's special tokens; trained on generated problems."""

import json
import random
from collections.abc import Iterator
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from tools.demo_model.documents import SMALL_TALK, draw_document
from tools.demo_model.problems import draw_problem

VOCAB_SIZE = 1536
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
END_OF_TEXT, IM_START, IM_END = range(3)

# A word with the space before it, one digit, a run of signs, a run of space. No normalization: any text comes back byte for byte.
PATTERN = r" ?\p{L}[\p{L}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+|\s+"

# The model has never seen a tool: none is told to it, and calls and their results are spelled as Qwen's templates do.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] not in ('system', 'user', 'assistant', 'tool') %}{{ raise_exception('role must be system, user, assistant or tool') }}{% endif %}"
    "{% if message['role'] == 'tool' %}"
    "{{ '<|im_start|>user\\n<tool_response>\\n' + message['content'] + '\\n</tool_response><|im_end|>\\n' }}"
    "{% else %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] }}"
    "{% for call in message['tool_calls'] or [] %}"
    "{{ '\\n' if message['content'] or not loop.first }}"
    "{{ '<tool_call>\\n' + {'name': call['function']['name'], 'arguments': call['function']['arguments']} | tojson + '\\n</tool_call>' }}"
    "{% endfor %}"
    "{{ '<|im_end|>\\n' }}"
    "{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def train_tokenizer(num_texts: int = 30_000, seed: int = 1) -> Tokenizer:
    """Trained on training problems and small talk only: the words of held-out templates may fall into pieces, as anybody's words do."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(PATTERN), behavior="isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE, special_tokens=list(SPECIALS), initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(_texts(num_texts, seed), trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIALS])
    return tokenizer


def _texts(count: int, seed: int) -> Iterator[str]:
    rng = random.Random(seed)
    for _ in range(count):
        problem = draw_problem(rng, "training")
        yield f"Question: {problem.question}\nAnswer: {problem.answer}\n\n"
    for asked, said in SMALL_TALK * 20:
        yield f"{asked}\n{said}"
    for _ in range(count // 10):
        yield "".join(segment.text for segment in draw_document(rng))


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """tokenizer.json and tokenizer_config.json, as transformers' AutoTokenizer reads them."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": SPECIALS[IM_END],
        "pad_token": SPECIALS[END_OF_TEXT],
        "clean_up_tokenization_spaces": False,
        "model_max_length": 4096,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
