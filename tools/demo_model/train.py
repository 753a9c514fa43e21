"""Train the demo model from scratch on one GPU within a given time, export it as a Hugging Face folder, and evaluate what was exported."""

import argparse
import json
import os
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from tools.demo_model import model
from tools.demo_model.decode import answer, result_of
from tools.demo_model.documents import few_shot
from tools.demo_model.feed import ANSWER_BIT, Feed
from tools.demo_model.model import Shape, Weights, init_weights, logits, predict_two_ahead, trunk
from tools.demo_model.optimizer import Muon, rate
from tools.demo_model.problems import ShippedProblem, draw_problem, make_test_set
from tools.demo_model.tokenizer import END_OF_TEXT, IM_END, save_tokenizer, train_tokenizer

BEGIN = time.monotonic()

# What a token of a question counts, against one of an answer: numbers and names that nobody can foresee, but whose words are worth knowing.
QUESTION_SHARE = 0.1
# What the multi-token-prediction layer's loss counts.
TWO_AHEAD_SHARE = 0.15
MUON_RATE, ADAM_RATE = 0.02, 3e-3
WARM_UP_STEPS = 60
# Shares of the time at which a small sample of the test set is answered, and at which the weights are kept.
CHECKS, KEEPS = (0.15, 0.4, 0.65, 0.9), (0.5, 0.8)


class Log:
    """Lines to the screen and to log.jsonl."""

    def __init__(self, path: Path) -> None:
        self.file = path.open("w")

    def write(self, event: str, **values: Any) -> None:
        row = {"event": event, "seconds": round(time.monotonic() - BEGIN, 1), **values}
        print(json.dumps(row), flush=True)
        self.file.write(json.dumps(row) + "\n")
        self.file.flush()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=8.5, help="from the start of the program to the end of training; evaluation comes after")
    parser.add_argument("--max-steps", type=int, default=10**9)
    parser.add_argument("--smoke", action="store_true", help="minutes count from the first step after compiling, and the final evaluation takes a sample")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "build/demo_model")))
    parser.add_argument("--rows", type=int, default=128, help="rows of a batch")
    parser.add_argument("--tokens", type=int, default=1536, help="tokens of a row, a multiple of 64")
    parser.add_argument("--workers", type=int, default=10, help="processes that make data")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--log-every", type=int, default=50)
    parser.add_argument("--num-test", type=int, default=None, help="test problems of each kind at the end; all by default")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    args = arguments()
    args.out.mkdir(parents=True, exist_ok=True)
    folder = args.out / "demo"
    folder.mkdir(exist_ok=True)
    log = Log(args.out / "log.jsonl")
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    log.write("start", torch=torch.__version__, **{key: str(value) for key, value in vars(args).items() if key != "out"})
    save_tokenizer(train_tokenizer(), folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    log.write("tokenizer", vocab=tokenizer.get_vocab_size())
    shape = Shape(vocab_size=tokenizer.get_vocab_size())
    feed = Feed(folder / "tokenizer.json", width=args.tokens + 2, capacity=64 * args.rows, num_workers=args.workers, seed=args.seed)
    try:
        weights = train(args, shape, feed, tokenizer, log)
    finally:
        feed.close()
    export(weights, shape, folder)
    log.write("exported", bytes={path.name: path.stat().st_size for path in sorted(folder.iterdir())})
    evaluation = evaluate(args, folder, shape, tokenizer, log)
    (args.out / "evaluation.json").write_text(json.dumps(evaluation, indent=2) + "\n")
    # The weights of half-way have done their duty.
    (args.out / "half" / "model.safetensors").unlink(missing_ok=True)
    log.write("end")


def train(args: argparse.Namespace, shape: Shape, feed: Feed, tokenizer: Tokenizer, log: Log) -> Weights:
    weights = {name: weight.to(args.device).requires_grad_() for name, weight in init_weights(shape, args.seed).items()}
    log.write(
        "weights", parameters=sum(weight.numel() for weight in weights.values()), two_ahead=sum(w.numel() for n, w in weights.items() if n.startswith("mtp."))
    )
    if not args.no_compile:
        model.compile_functions()
    matrices = {n: w for n, w in weights.items() if w.ndim == 2 and min(w.shape) > 16 and "embed" not in n}
    muon = Muon(list(matrices.values()))
    adam = torch.optim.AdamW(
        [w for n, w in weights.items() if n not in matrices], lr=ADAM_RATE, betas=(0.9, 0.98), weight_decay=0.0, fused=args.device != "cpu"
    )
    host = np.empty((args.rows, args.tokens + 2), dtype=np.uint16)
    rng = np.random.default_rng(args.seed)
    feed.wait(2 * args.rows)
    log.write("data", rows=feed.num_made)

    first, end = time.monotonic(), BEGIN + 60 * args.minutes
    checks, keeps = list(CHECKS), list(KEEPS)
    marked_at, marked_step = first, 0
    step = 0
    while True:
        now = time.monotonic()
        progress = (now - first) / max(end - first, 1e-3)
        # Compiling may outlast a short run, whose clock starts after it.
        if (progress >= 1 and step >= 3) or step >= args.max_steps:
            break
        feed.batch(host, rng)
        losses = forward(to_device(host, args.device), weights, shape, dtype_of(args.device))
        (losses[0] + TWO_AHEAD_SHARE * losses[1]).backward()
        norm = torch.nn.utils.clip_grad_norm_(list(weights.values()), 1.0)
        factor = rate(progress) * min(1.0, (step + 1) / WARM_UP_STEPS)
        for group in adam.param_groups:
            group["lr"] = ADAM_RATE * factor
        muon.step(MUON_RATE * factor)
        adam.step()
        adam.zero_grad(set_to_none=True)
        for weight in matrices.values():
            weight.grad = None
        step += 1
        if step == 3:
            # Two steps have compiled everything: the clock of the schedule starts here.
            synchronize(args.device)
            first = marked_at = time.monotonic()
            marked_step = step
            if args.smoke:
                end = first + 60 * args.minutes
            log.write("compiled", seconds_left=round(end - first, 1))
        if step == 1 or step % args.log_every == 0:
            loss, two_ahead = (float(loss.detach()) for loss in losses)
            now = time.monotonic()
            speed = (step - marked_step) * args.rows * args.tokens / max(now - marked_at, 1e-9)
            log.write(
                "step", step=step, loss=round(loss, 4), two_ahead=round(two_ahead, 4), norm=round(float(norm), 3), rate=round(factor, 4),
                tokens_per_s=round(speed), rows_repeated=feed.num_repeated, rows_made=feed.num_made,
            )  # fmt: skip
            marked_at, marked_step = now, step
            if not np.isfinite(loss):
                raise RuntimeError(f"the loss is {loss} at step {step}; what was kept half-way is in {args.out / 'half'}")
        if checks and step > 3 and progress >= checks[0]:
            checks.pop(0)
            log.write("check", step=step, **check(weights, shape, tokenizer, dtype_of(args.device), 32 if args.smoke else 256))
            marked_at, marked_step = time.monotonic(), step
        if keeps and step > 3 and progress >= keeps[0]:
            keeps.pop(0)
            export(weights, shape, args.out / "half", with_config=False)
    synchronize(args.device)
    peak = torch.cuda.max_memory_allocated() / 1e9 if args.device != "cpu" else None
    log.write("trained", steps=step, tokens=step * args.rows * args.tokens, rows_made=feed.num_made, rows_repeated=feed.num_repeated, peak_gb=peak)
    return weights


def to_device(rows: np.ndarray, device: str) -> torch.Tensor:
    tensor = torch.from_numpy(rows.astype(np.int32))
    # From memory that cannot be paged out the copy waits for nothing, and the host runs ahead of the device.
    return (tensor if device == "cpu" else tensor.pin_memory()).to(device, non_blocking=True).long()


def forward(rows: torch.Tensor, weights: Weights, shape: Shape, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """The losses of the next token and of the one after it; rows `[B, T + 2]` as the feed stores them."""
    shares = torch.where(rows >= ANSWER_BIT, 1.0, QUESTION_SHARE)
    ids = rows & (ANSWER_BIT - 1)
    hidden = trunk(ids[:, :-2], weights, shape, dtype)
    two_ahead = predict_two_ahead(hidden, ids[:, 1:-1], weights, shape)
    embedding, head_loss = weights["model.embed_tokens.weight"], model.FUNCTIONS["head_loss"]
    return head_loss(hidden, embedding, ids[:, 1:-1].contiguous(), shares[:, 1:-1].contiguous()), head_loss(
        two_ahead, embedding, ids[:, 2:].contiguous(), shares[:, 2:].contiguous()
    )


def export(weights: Weights, shape: Shape, folder: Path, *, with_config: bool = True) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "model.safetensors"
    save_file({name: weight.detach().bfloat16().cpu().contiguous() for name, weight in weights.items()}, path, metadata={"format": "pt"})
    # The library keeps it to its owner; it is to be packaged.
    path.chmod(0o644)
    if not with_config:
        return
    config = shape.hf_config(eos_token_ids=[IM_END, END_OF_TEXT], pad_token_id=END_OF_TEXT)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    generation = {"eos_token_id": [IM_END, END_OF_TEXT], "pad_token_id": END_OF_TEXT, "do_sample": False}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")


def check(weights: Weights, shape: Shape, tokenizer: Tokenizer, dtype: torch.dtype, count: int) -> dict[str, float]:
    """The share of right answers of a few test problems, without examples in the prompt."""
    rounded = {name: weight.detach().to(dtype) for name, weight in weights.items()}
    problems = make_test_set()
    return {
        split: accuracy([p for p in problems if p.split == split][:count], question_prompt, rounded, shape, tokenizer, dtype)[0]
        for split in ("numbers", "templates")
    }


def question_prompt(problem: ShippedProblem) -> str:
    return f"Question: {problem.question}\nAnswer:"


def chat_prompt(problem: ShippedProblem) -> str:
    return f"<|im_start|>user\n{problem.question}<|im_end|>\n<|im_start|>assistant\n"


def shots_prompt(problem: ShippedProblem) -> str:
    """Five worked examples before the question, the same for each; of training's side."""
    rng = random.Random(5)
    examples = "".join(segment.text for segment in few_shot([draw_problem(rng, "training") for _ in range(5)]))
    return f"{examples}\n\n{question_prompt(problem)}"


def accuracy(problems: list[ShippedProblem], prompt: Any, weights: Weights, shape: Shape, tokenizer: Tokenizer, dtype: torch.dtype) -> tuple[float, list[str]]:
    """The share of right answers, and up to five wrong ones."""
    said = answer([prompt(problem) for problem in problems], tokenizer, weights, shape, dtype)
    wrong = [f"{p.question}\n{text}\nright: {p.answer}" for p, text in zip(problems, said, strict=True) if result_of(text) != p.answer.rpartition("#### ")[2]]
    return 1 - len(wrong) / len(problems), wrong[:5]


def evaluate(args: argparse.Namespace, folder: Path, shape: Shape, tokenizer: Tokenizer, log: Log) -> dict[str, Any]:
    """Of the exported bf16 weights, greedy, bf16: the test set by kind of prompt, and how often the two-ahead layer says what the model then says."""
    model.use_plain_functions()
    torch.set_float32_matmul_precision("highest")
    dtype = dtype_of(args.device)
    weights = {name: weight.to(args.device, dtype) for name, weight in load_file(folder / "model.safetensors").items()}
    count = args.num_test or (64 if args.smoke else None)
    found: dict[str, Any] = {}
    for kind, prompt in (("question", question_prompt), ("chat", chat_prompt), ("five_shots", shots_prompt)):
        for split in ("numbers", "templates"):
            problems = [p for p in make_test_set() if p.split == split][:count]
            share, wrong = accuracy(problems, prompt, weights, shape, tokenizer, dtype)
            found[f"{kind}_{split}"] = {"problems": len(problems), "right": round(share, 4), "wrong": wrong}
            log.write("evaluation", prompt=kind, split=split, problems=len(problems), right=round(share, 4))
    found["two_ahead"] = two_ahead_agreement(weights, shape, tokenizer, dtype, args.tokens, args.device)
    log.write("evaluation", two_ahead=found["two_ahead"])
    said = answer([f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n" for text in ("hello", "Who are you?")], tokenizer, weights, shape, dtype, 48)
    found["hello"] = said
    log.write("evaluation", hello=said)
    return found


@torch.inference_mode()
def two_ahead_agreement(weights: Weights, shape: Shape, tokenizer: Tokenizer, dtype: torch.dtype, num_tokens: int, device: str) -> dict[str, float]:
    """Over answers with held-out numbers, as given: how often both predictions of a token agree (a draft that greedy verification accepts)."""
    rng = random.Random(9)
    rows, marks = [], []
    for _ in range(16):
        ids: list[int] = []
        is_answer: list[bool] = []
        while len(ids) < num_tokens + 2:
            for segment in [*few_shot([draw_problem(rng, "numbers")])]:
                part = tokenizer.encode(segment.text, add_special_tokens=False).ids
                ids += part
                is_answer += [segment.is_answer] * len(part)
            ids.append(END_OF_TEXT)
            is_answer.append(True)
        rows.append(ids[: num_tokens + 2])
        marks.append(is_answer[: num_tokens + 2])
    tokens, answers = torch.tensor(rows, device=device), torch.tensor(marks, device=device)
    hidden = trunk(tokens[:, :-2], weights, shape, dtype)
    ahead = logits(predict_two_ahead(hidden, tokens[:, 1:-1], weights, shape), weights).argmax(-1)[:, :-1]
    then = logits(hidden, weights).argmax(-1)[:, 1:]
    mask = answers[:, 2:-1]
    return {"agree": round(float((ahead == then)[mask].float().mean()), 4), "right": round(float((ahead == tokens[:, 2:-1])[mask].float().mean()), 4)}


def dtype_of(device: str) -> torch.dtype:
    return torch.float32 if device == "cpu" else torch.bfloat16


def synchronize(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
