"""Questions to a server: what is sent, what is read, a server that is busy, fails or is no such server."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from atoll.cli import app
from atoll.engine.sampling import SamplingParams
from atoll.errors import ConfigError
from atoll.eval.endpoint import Endpoint, error_text, find_endpoint, http
from atoll.eval.prompts import Prompt
from atoll.eval.server_target import MAX_TRIES, ServerTarget, read_answer, sampling_body
from tests.kit.fake_server import FakeServer, fake_server

GREEDY = SamplingParams(max_tokens=8, temperature=0.0, seed=3, stop=("Question:",))


def ask(server: FakeServer, prompts: list[Prompt], params: SamplingParams = GREEDY, **options: Any) -> list[Any]:
    target = ServerTarget(find_endpoint(server.url, api_key=options.pop("api_key", None)), wait=lambda seconds: None, **options)
    return sorted(target.ask(prompts, [params] * len(prompts)), key=lambda answer: answer.index)


def test_text_goes_to_completions() -> None:
    with fake_server(say=lambda body: [" I", " heard ", body["prompt"]]) as server:
        [first, second] = ask(server, ["a", "b"], concurrency=2, api_key="secret", extra_body={"return_token_ids": True})
    assert (first.text, second.text, first.finish_reason) == (" I heard a", " I heard b", "stop")
    assert (first.token_ids, first.num_prompt_tokens, first.num_output_tokens, first.num_cached_tokens) == ([0, 1, 2], 7, 3, 4)
    assert server.paths == ["/v1/completions"] * 2 and server.keys == ["Bearer secret"] * 2
    expected = {"model": "fake", "max_tokens": 8, "temperature": 0.0, "top_p": 1.0, "stop": ["Question:"], "seed": 3, "return_token_ids": True}
    assert [{name: value for name, value in body.items() if name != "prompt"} for body in server.bodies] == [expected] * 2


def test_conversations_go_to_chat_completions() -> None:
    messages = [{"role": "user", "content": "hello"}]
    with fake_server(usage=False) as server:
        [answer] = ask(server, [messages])
    assert (answer.text, answer.token_ids, answer.num_output_tokens) == (" one two three", None, None)
    assert server.paths == ["/v1/chat/completions"] and server.bodies[0]["messages"] == messages


def test_fields_beyond_openais_go_only_where_they_do_something() -> None:
    assert {"top_k", "min_p", "ignore_eos", "min_tokens"}.isdisjoint(sampling_body(GREEDY))
    assert sampling_body(SamplingParams(top_k=5, ignore_eos=True)).items() >= {"top_k": 5, "ignore_eos": True}.items()


def test_no_more_at_a_time_than_asked_for() -> None:
    with fake_server(piece_delay_s=0.02) as server:
        ask(server, [str(i) for i in range(12)], concurrency=3)
    assert server.most_at_once == 3


def test_a_busy_server_is_asked_again() -> None:
    with fake_server(refusals=[429, 503]) as server:
        [answer] = ask(server, ["a"])
    assert (answer.error, answer.text, len(server.bodies)) == (None, " one two three", 3)


def test_a_server_that_stays_busy_or_refuses_is_told_in_the_answer() -> None:
    with fake_server(refusals=[429] * MAX_TRIES) as server:
        [answer] = ask(server, ["a"])
    assert (answer.finish_reason, answer.error, len(server.bodies)) == ("error", "429: not now", MAX_TRIES)
    with fake_server(refusals=[400]) as server:
        first, second = ask(server, ["a", "b"], concurrency=1)
    assert (first.error, second.error, len(server.bodies)) == ("400: not now", None, 2)


def test_a_response_of_another_form_is_told_in_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_server() as server:
        monkeypatch.setattr("tests.kit.fake_server._Handler._whole", lambda self, body: self._send(200, {"choices": []}))
        [answer] = ask(server, ["a"])
    assert answer.finish_reason == "error" and answer.error.startswith("the response is not as in OpenAI's API: IndexError")


def test_what_breaks_on_the_way_has_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def time_out(*_: Any, **__: Any) -> None:
        raise http.ReadTimeout("")

    with fake_server() as server:
        target = ServerTarget(find_endpoint(server.url))
        monkeypatch.setattr(http.Client, "post", time_out)
        [answer] = target.ask(["a"], [GREEDY])
    assert (answer.finish_reason, answer.error) == ("error", "no answer: ReadTimeout")
    broken = read_answer(0, {"choices": [{"text": "so", "finish_reason": "error"}]})
    assert (broken.text, broken.error) == ("so", "the server broke it off and gave no reason")


def test_an_address_without_a_server_is_refused() -> None:
    with fake_server() as server:
        assert find_endpoint(server.url + "/v1/") == Endpoint(server.url, "fake")
        with pytest.raises(ConfigError, match=r"model 'other' is not served at .* use one of fake"):
            find_endpoint(server.url, model="other")
        with pytest.raises(ConfigError, match=r"says to /v1/models 404: no such path; check the address"):
            find_endpoint(server.url + "/elsewhere")
    with pytest.raises(ConfigError, match=r"does not answer: .*; start the server"):
        find_endpoint(server.url)


def test_errors_are_read_in_any_form() -> None:
    assert error_text(400, b'{"error": {"message": "too long"}}') == "400: too long"
    assert error_text(422, b'{"detail": "x"}') == "422: {'detail': 'x'}"
    assert error_text(502, b"<html>") == "502: <html>"
    assert error_text(500, b"[1]") == "500: [1]"


# The command


def answer_right(body: dict[str, Any]) -> list[str]:
    """The sum that the last question asks for; wrong for odd ones."""
    a, b = (int(number) for number in body["prompt"].rpartition("Question: ")[2].partition("?")[0].split(" + "))
    return [" It is ", "so.\n#### ", str(a + b if a % 2 == 0 else 0)]


def data_file(folder: Path) -> Path:
    path = folder / "data.jsonl"
    path.write_text("".join(json.dumps({"question": f"{i} + {2 * i}?", "answer": f"#### {3 * i}"}) + "\n" for i in range(2, 12)))
    return path


def test_the_command_over_http(tmp_path: Path) -> None:
    out = tmp_path / "run.jsonl"
    with fake_server(say=answer_right) as server:
        command = ["eval", "gsm8k", "--base-url", server.url, "--data", str(data_file(tmp_path)), "--num-fewshot", "2", "--limit", "9"]
        result = CliRunner().invoke(app, [*command, "--passes", "2", "--out", str(out)])
        assert result.exit_code == 0, result.output
        assert "strict-match      0.5556 ± 0.1757   (9 questions, 2 passes)" in result.stdout
        assert "errors 0" in result.stdout and "cached prompt tokens 72" in result.stdout
        again = CliRunner().invoke(app, [*command, "--out", str(out)])
        assert again.exit_code == 2 and "holds something already" in again.stderr
    header, *rows = (json.loads(line) for line in out.read_text().splitlines())
    assert header["run"].items() >= {"num_fewshot": 2, "passes": 2, "limit": 9, "shots": str(tmp_path / "data.jsonl")}.items()
    assert header["run"]["target"].items() >= {"kind": "server", "model": "fake", "server_version": {"version": "1.2"}}.items()
    assert len(rows) == 18 and {row["seed"] for row in rows} == set(range(18))
    assert server.bodies[0]["prompt"].count("Question: ") == 3


def test_worked_questions_come_from_the_training_file_beside(tmp_path: Path) -> None:
    data_file(tmp_path)
    (tmp_path / "train.jsonl").write_text("".join(json.dumps({"question": f"t{i}", "answer": f"#### {i}"}) + "\n" for i in range(6)))
    with fake_server(say=answer_right) as server:
        result = CliRunner().invoke(app, ["eval", "gsm8k", "--base-url", server.url, "--data", str(tmp_path / "data.jsonl"), "--limit", "1", "--json"])
    assert (result.exit_code, json.loads(result.stdout)["strict"]) == (0, {"value": 1.0, "stderr": None})
    assert server.bodies[0]["prompt"].startswith("Question: t0\nAnswer: #### 0\n\nQuestion: t1")
    assert server.bodies[0]["prompt"].count("Question: t") == 5


def test_the_command_replays_over_http(tmp_path: Path) -> None:
    with fake_server(say=answer_right) as server:
        command = ["eval", "replay", "--base-url", server.url, "--data", str(data_file(tmp_path)), "--num-fewshot", "1", "--segment", "4"]
        result = CliRunner().invoke(app, command)
        assert result.exit_code == 0, result.output
        assert server.paths[:2] == ["/reset_prefix_cache", "/v1/completions"] and server.paths.count("/reset_prefix_cache") == 1
        assert "questions 8 to 9: 0 differ; prompt tokens from the cache: filling 8, reading back 8, of 14" in result.stdout
        assert result.stdout.endswith("the same tokens\n")
        server.say = lambda body: [str(len(server.bodies))]
        different = CliRunner().invoke(app, [*command, "--limit", "4"])
    assert different.exit_code == 1 and "4 of 4 answers differ" in different.stdout


def test_answers_that_failed_end_the_command_with_1(tmp_path: Path) -> None:
    with fake_server(say=answer_right, refusals=[400]) as server:
        result = CliRunner().invoke(app, ["eval", "gsm8k", "--base-url", server.url, "--data", str(data_file(tmp_path)), "--num-fewshot", "0"])
    assert result.exit_code == 1 and result.stderr == "error: 1 answer ended in an error:\n  1 x 400: not now\n" and "errors 1" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--base-url", "http://127.0.0.1:1", "--dtype", "float32"), "--dtype is an option of an engine in this process"),
        (("--base-url", "http://127.0.0.1:1", "--offload", "host:1GiB"), "--offload is an option of an engine in this process"),
        (("--api-key", "x"), "--extra-body and --api-key are for a server"),
        (("--base-url", "http://127.0.0.1:1"), "does not answer"),
        (("--option", "colour=red"), "option 'colour' is unknown"),
        (("--num-fewshot", "1319"), "1319 worked questions asked for out of 1319"),
        (("--data", "none.jsonl"), "'none.jsonl' cannot be read"),
        (("--temperature", "-1"), "temperature -1"),
    ],
)
def test_the_command_refuses_what_it_cannot_do(arguments: tuple[str, ...], message: str) -> None:
    result = CliRunner().invoke(app, ["eval", "gsm8k", *arguments])
    assert result.exit_code == 2, result.output
    assert message in result.stderr


@pytest.mark.parametrize(("given", "message"), [("{", "is no JSON"), ("[1]", "is a list; give a JSON object")])
def test_an_extra_body_that_is_no_object_is_refused(given: str, message: str) -> None:
    with fake_server() as server:
        result = CliRunner().invoke(app, ["eval", "gsm8k", "--base-url", server.url, "--extra-body", given])
    assert result.exit_code == 2 and message in result.stderr
