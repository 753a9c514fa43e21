"""lm-eval's `local-completions` on the shipped problems: its answers and scores are those of `atoll eval gsm8k`, its log-likelihoods the engine's own."""

import json
from dataclasses import dataclass
from typing import Any

import pytest
from typer.testing import CliRunner

from atoll import LLM, SamplingParams
from atoll.cli import app
from atoll.eval.questions import DEMO_PROBLEMS
from tests.server.programs import needs_clients, run_client
from tests.server.running import ENGINE, Running, demo

pytestmark = [*needs_clients, pytest.mark.slow]

MAX_TOKENS = 128
# The last ones are of templates that the model has not seen, so that some answers are wrong.
ASKED = [0, 1, 2, 3, 1000, 1001, 1002, 1003]
# lm-eval finds the server's tokenizer by itself and sends token ids, or it has one of its own and sends text, several at a time.
WAYS = {
    "token ids": (["num_concurrent=8"], []),
    "text": (["tokenizer=atoll/models/demo", "tokenizer_backend=huggingface", "tokenized_requests=False"], ["--batch_size", "4"]),
}
# lm-eval's command without its index of the 14,000 tasks that come with it, which is half of the time of a run.
LM_EVAL = """
import lm_eval.tasks

class OwnTasks(lm_eval.tasks.TaskManager):
    def __init__(self, **options):
        super().__init__(**options, include_defaults=False)

lm_eval.tasks.TaskManager = OwnTasks
from lm_eval.__main__ import cli_evaluate
cli_evaluate()
"""


@dataclass(frozen=True)
class Found:
    """What one run of lm-eval wrote: a score per task and metric, and per task and filter what was asked and answered, in the order of ASKED."""

    scores: dict[str, dict[str, float]]
    samples: dict[tuple[str, str], list[dict[str, Any]]]


@pytest.fixture(scope="module", params=WAYS)
def found(request: pytest.FixtureRequest, server: Running, tmp_path_factory: pytest.TempPathFactory) -> Found:
    folder = tmp_path_factory.mktemp("lm_eval")
    model_args, options = WAYS[request.param]
    model = ["model=demo", f"base_url={server.url}/v1/completions", f"max_gen_toks={MAX_TOKENS}", "max_length=512", *model_args]
    tasks = {"problems": ASKED, "choices": ASKED}
    command = ["run", "--model", "local-completions", "--model_args", ",".join(model), "--include_path", "tests/server/lm_eval_tasks"]
    command += ["--tasks", ",".join(tasks), "--samples", json.dumps(tasks), "--log_samples", "--output_path", str(folder), *options]
    run_client("python", "-c", LM_EVAL, *command, home=folder)
    [results] = folder.glob("demo/results_*.json")
    samples: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for path in folder.glob("demo/samples_*.jsonl"):
        for line in path.read_text().splitlines():
            entry = json.loads(line)
            samples.setdefault((path.name.split("_")[1], entry["filter"]), []).append(entry)
    return Found(json.loads(results.read_text())["results"], samples)


@pytest.fixture(scope="module")
def asked_by_atoll(server: Running, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Rows of `atoll eval gsm8k` over the same questions, in that order."""
    folder = tmp_path_factory.mktemp("atoll_eval")
    lines = DEMO_PROBLEMS.read_text().splitlines()
    (folder / "asked.jsonl").write_text("".join(lines[index] + "\n" for index in ASKED))
    command = ["eval", "gsm8k", "--base-url", server.url, "--data", str(folder / "asked.jsonl"), "--num-fewshot", "0", "--max-tokens", str(MAX_TOKENS)]
    result = CliRunner().invoke(app, [*command, "--out", str(folder / "run.jsonl")])
    assert result.exit_code == 0, result.output
    return sorted(map(json.loads, (folder / "run.jsonl").read_text().splitlines()[1:]), key=lambda row: row["index"])


def test_answers_and_scores_are_those_of_atoll_eval(found: Found, asked_by_atoll: list[dict[str, Any]]) -> None:
    for name, score in (("strict-match", "strict"), ("flexible-extract", "flexible")):
        samples = found.samples["problems", name]
        assert [sample["resps"] for sample in samples] == [[[row["text"]]] for row in asked_by_atoll]
        assert [sample["exact_match"] for sample in samples] == [row[score] for row in asked_by_atoll]
        share = sum(row[score] for row in asked_by_atoll) / len(ASKED)
        assert found.scores["problems"][f"exact_match,{name}"] == pytest.approx(share)
        assert 0 < share < 1


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM.from_loaded(demo(), **{name: value for name, value in ENGINE.items() if name != "device"})


def score(llm: LLM, context: str, continuation: str) -> tuple[float, bool]:
    """The engine's own log-likelihood of a continuation, and whether it is what greedy decoding says."""
    tokenizer = demo().tokenizer
    start = len(tokenizer.encode(context))
    [output] = llm.generate([tokenizer.encode(context + continuation)], SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1))
    scored = [token for token in (output.prompt_logprobs or [])[start:] if token is not None]
    return sum(token.logprob for token in scored), all(token.token_id == token.top[0][0] for token in scored)


def test_loglikelihoods_are_the_engines_own(found: Found, llm: LLM) -> None:
    samples = found.samples["choices", "none"]
    assert len(samples) == len(ASKED)
    right = 0
    for sample in samples:
        own = [score(llm, asked["arg_0"], asked["arg_1"]) for asked in sample["arguments"].values()]
        told = [(float(logprob), greedy == "True") for [[logprob, greedy]] in sample["resps"]]
        assert [logprob for logprob, _ in told] == pytest.approx([logprob for logprob, _ in own], abs=1e-3)
        assert [greedy for _, greedy in told] == [greedy for _, greedy in own]
        right += own[0][0] > own[1][0]
    assert found.scores["choices"]["acc,none"] == pytest.approx(right / len(ASKED))
