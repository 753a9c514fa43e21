"""Greedy answers of a batch, token by token through the recurrent form: the second, independent way through the same weights."""

import re
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer

from tools.demo_model.model import (
    Shape,
    Weights,
    attention_inputs,
    delta_projections,
    gated_out,
    linear,
    logits,
    mlp,
    norm,
    rotation,
    split_heads,
    under,
)

RESULT = re.compile(r"#### (-?[\d.,]+)")


class Decoder:
    """States and caches of B sequences, all at the same position."""

    def __init__(self, weights: Weights, shape: Shape, num_sequences: int, max_len: int, dtype: torch.dtype) -> None:
        self.weights, self.shape, self.dtype = weights, shape, dtype
        self.layers = [under(weights, f"model.layers.{i}.") for i in range(shape.num_layers)]
        device = weights["model.norm.weight"].device
        value_dim = shape.num_v_heads * shape.v_head_dim
        conv_dim = 2 * shape.num_k_heads * shape.k_head_dim + value_dim
        self.convs = [torch.zeros(num_sequences, shape.conv_width, conv_dim, dtype=dtype, device=device) for _ in self.layers]
        self.states = [torch.zeros(num_sequences, shape.num_v_heads, shape.k_head_dim, shape.v_head_dim, device=device) for _ in self.layers]
        cache = (num_sequences, max_len, shape.num_kv_heads, shape.head_dim)
        self.caches = [None if shape.is_linear(i) else torch.zeros(2, *cache, dtype=dtype, device=device) for i in range(shape.num_layers)]
        self.position = 0

    @torch.inference_mode()
    def step(self, ids: torch.Tensor) -> torch.Tensor:
        """Logits `[B, V]` after one more token `[B]` each."""
        x = F.embedding(ids[:, None], self.weights["model.embed_tokens.weight"]).to(self.dtype)
        cos, sin = rotation(torch.tensor([self.position], device=ids.device), self.shape)
        for i, w in enumerate(self.layers):
            x = self._delta(i, x, w) if self.shape.is_linear(i) else self._attention(i, x, w, cos, sin)
        self.position += 1
        return logits(norm(x, self.weights["model.norm.weight"], self.shape.rms_eps)[:, 0], self.weights)

    def _attention(self, i: int, x: torch.Tensor, w: Weights, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        shape, cache = self.shape, self.caches[i]
        assert cache is not None
        q, k, v, gate = attention_inputs(norm(x, w["input_layernorm.weight"], shape.rms_eps), w, cos, sin, shape)
        cache[0, :, self.position], cache[1, :, self.position] = k[:, 0], v[:, 0]
        keys, values = cache[:, :, : self.position + 1].transpose(2, 3)
        q = q[:, 0].unflatten(1, (shape.num_kv_heads, -1))  # [B, HKV, G, D]
        scores = (q @ keys.transpose(-1, -2)).float() * shape.head_dim**-0.5
        out = (scores.softmax(-1).to(x.dtype) @ values).flatten(1)[:, None]
        return mlp(x + linear(out * torch.sigmoid(gate), w["self_attn.o_proj.weight"]), w, shape)

    def _delta(self, i: int, x: torch.Tensor, w: Weights) -> torch.Tensor:
        shape = self.shape
        mixed, z, g, beta = delta_projections(x, w, shape)
        self.convs[i] = torch.cat((self.convs[i][:, 1:], mixed), 1)
        taps = w["linear_attn.conv1d.weight"][:, 0].T.to(x.dtype)  # [W, channels]
        q, k, v = split_heads(F.silu((self.convs[i] * taps).sum(1)), shape)
        group = shape.num_v_heads // shape.num_k_heads
        q, k = q.repeat_interleave(group, 1), k.repeat_interleave(group, 1)
        state = self.states[i] * g[:, 0].exp()[..., None, None]
        change = (v - (k[:, :, None] @ state)[:, :, 0]) * beta[:, 0][..., None]
        self.states[i] = state + k[..., None] * change[:, :, None]
        out = (q[:, :, None] @ self.states[i])[:, :, 0]
        return mlp(x + gated_out(out[:, None], z, w, shape), w, shape)


def answer(prompts: Sequence[str], tokenizer: Tokenizer, weights: Weights, shape: Shape, dtype: torch.dtype, max_new: int = 256) -> list[str]:
    """The greedy continuation of each prompt, up to a token that ends an answer or a blank line."""
    device = weights["model.norm.weight"].device
    encoded = [tokenizer.encode(prompt, add_special_tokens=False).ids for prompt in prompts]
    lengths = torch.tensor([len(ids) for ids in encoded], device=device)
    longest = max(map(len, encoded))
    tokens = torch.zeros(len(prompts), longest + max_new, dtype=torch.int64, device=device)
    for row, ids in zip(tokens, encoded, strict=True):
        row[: len(ids)] = torch.tensor(ids, device=device)
    ends = torch.tensor(
        [tokenizer.token_to_id(token) for token in ("<|endoftext|>", "<|im_end|>", "ĊĊ") if tokenizer.token_to_id(token) is not None], device=device
    )
    decoder = Decoder(weights, shape, len(prompts), tokens.shape[1], dtype)
    is_done = torch.zeros(len(prompts), dtype=torch.bool, device=device)
    for i in range(tokens.shape[1] - 1):
        chosen = decoder.step(tokens[:, i]).argmax(-1)
        is_own = i + 1 >= lengths
        tokens[:, i + 1] = torch.where(is_own, torch.where(is_done, ends[0], chosen), tokens[:, i + 1])
        is_done |= is_own & torch.isin(chosen, ends)
        # Asking the device costs a wait: now and then is enough.
        if i >= longest and i % 16 == 0 and bool(is_done.all()):
            break
    rows, answers = tokens.tolist(), []
    for row, ids in zip(rows, encoded, strict=True):
        own = row[len(ids) :]
        cut = next((j for j, token in enumerate(own) if token in ends.tolist()), len(own))
        answers.append(tokenizer.decode(own[:cut], skip_special_tokens=False))
    return answers


def result_of(text: str) -> str | None:
    """What the text gives as its result; the first, as lm-eval's strict match takes it."""
    found = RESULT.search(text)
    return found.group(1).replace(",", "").rstrip(".") if found else None
