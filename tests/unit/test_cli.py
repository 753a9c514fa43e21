"""The `atoll` command: what it prints, where, and how it ends; models are stood in for but where one must speak."""

import functools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, Self

import pytest
from typer.testing import CliRunner, Result

import atoll
from atoll import ModelError, RequestOutput, StreamPiece
from atoll.cli import app

ONE_CASE = "bf16 p16 d64 h3"  # a small one of the quick matrix, the only one of that name


def invoke(*arguments: str, stdin: str | None = None) -> Result:
    return CliRunner().invoke(app, list(arguments), input=stdin)


class FakeLLM:
    """Says the same three words to every prompt, one per step; the second prompt ends after one."""

    options: ClassVar[dict[str, Any]] = {}
    num_closed: ClassVar[int] = 0

    def __init__(self, model: str, **options: Any) -> None:
        if model == "missing":
            raise ModelError("model 'missing' does not exist here; give a folder")
        type(self).options = options
        self.interrupt = model == "interrupted"
        self.broken = model == "broken"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        type(self).num_closed += 1

    def chat_prompts(self, conversations: list[list[dict[str, str]]]) -> list[list[int]]:
        return [[len(messages[0]["content"])] for messages in conversations]

    def generate_stream(self, prompts: list[Any], params: Any) -> Iterator[StreamPiece]:
        if self.interrupt:
            raise KeyboardInterrupt
        words = {index: ["one", " two", " three"][: 1 if index == 1 else 3] for index in range(len(prompts))}
        for step in range(3):
            for index in words:
                if step < len(words[index]):
                    last = step == len(words[index]) - 1
                    yield StreamPiece(index, index, words[index][step], [step], self._output(index, words[index]) if last else None)

    def _output(self, index: int, words: list[str]) -> RequestOutput:
        error = "the logits hold NaN" if self.broken and index == 0 else None
        return RequestOutput(index, None, [7], "".join(words), list(range(len(words))), "error" if error else "length", error=error)


@pytest.fixture
def fake_llm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(atoll, "LLM", FakeLLM)


@pytest.mark.usefixtures("fake_llm")
def test_generate_hands_on_what_may_be_reused() -> None:
    assert invoke("generate", "a").exit_code == 0
    chosen = ("prefix_caching", "state_checkpoint_interval_tokens", "checkpoint_policy", "offload", "offload_timeout_s")
    assert [FakeLLM.options[name] for name in chosen] == [True, None, "all", None, 30.0]
    given = ("--no-prefix-caching", "--state-checkpoint-interval-tokens", "-1", "--checkpoint-policy", "prompt,end")
    assert invoke("generate", *given, "a").exit_code == 0
    assert [FakeLLM.options[name] for name in chosen[:3]] == [False, -1, "prompt,end"]
    assert invoke("generate", "--offload", "host:1GiB", "--offload-timeout-s", "2.5", "a").exit_code == 0
    assert [FakeLLM.options[name] for name in chosen[3:]] == ["host:1GiB", 2.5]
    assert "offload ' ' names no tier" in invoke("generate", "--offload", " ", "a").stderr
    assert "checkpoint_policy 'never' is unknown" in invoke("generate", "--checkpoint-policy", "never", "a").stderr


def test_help_lists_every_command() -> None:
    result = invoke("--help")
    assert result.exit_code == 0
    for command in ("generate", "probe", "bench", "info"):
        assert command in result.stdout
    for group, commands in {"probe": ("kernels", "engine", "fault"), "bench": ("decode", "engine", "model")}.items():
        text = invoke(group, "--help").stdout
        assert all(command in text for command in commands)


@pytest.mark.usefixtures("fake_llm")
def test_one_prompt_gives_its_text_alone() -> None:
    result = invoke("generate", "Count")
    assert (result.exit_code, result.stdout) == (0, "one two three\n")


@pytest.mark.usefixtures("fake_llm")
def test_several_prompts_are_labelled_and_in_order() -> None:
    result = invoke("generate", "First", "Second", "Third")
    assert result.stdout == "[1] First\none two three\n\n[2] Second\none\n\n[3] Third\none two three\n"


@pytest.mark.usefixtures("fake_llm")
def test_streaming_shows_the_first_unfinished_and_holds_the_others_back(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from atoll.cli.generate import _stream_text

    texts = ["First", "Second", "Third"]
    seen = []

    def pieces() -> Iterator[StreamPiece]:
        for piece in FakeLLM("fake").generate_stream(texts, None):
            yield piece
            seen.append(capsys.readouterr().out)

    outputs = _stream_text(pieces(), texts)
    assert [output.text for output in outputs] == ["one two three", "one", "one two three"]
    # Step by step: the first streams; when it ends, the second and what the third has said so far come at once.
    assert seen == ["[1] First\none", "", "", " two", "", " three\n\n[2] Second\none\n\n[3] Third\none two", " three\n"]


def test_texts_for_a_file_come_whole_and_in_order(capsys: pytest.CaptureFixture[str]) -> None:
    from atoll.cli.generate import _collect_text

    texts = ["First", "Second"]
    outputs = _collect_text(FakeLLM("fake").generate_stream(texts, None), texts)
    assert [output.text for output in outputs] == ["one two three", "one"]
    assert capsys.readouterr().out == "[1] First\none two three\n\n[2] Second\none\n"


@pytest.mark.usefixtures("fake_llm")
def test_json_gives_an_object_per_finished_prompt() -> None:
    result = invoke("generate", "--json", "First", "Second")
    objects = [json.loads(line) for line in result.stdout.splitlines()]
    assert [(o["index"], o["prompt"], o["text"], o["finish_reason"], o["token_ids"]) for o in objects] == [
        (1, "Second", "one", "length", [0]),
        (0, "First", "one two three", "length", [0, 1, 2]),
    ]


@pytest.mark.usefixtures("fake_llm")
def test_prompts_come_from_stdin_and_a_file(tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("From a file\n\nAnother line\n")
    result = invoke("generate", "-", "--file", str(file), stdin="From\nstdin\n")
    labels = [line for line in result.stdout.splitlines() if line.startswith("[")]
    assert labels == ["[1] From", "[2] From a file", "[3] Another line"]
    assert "[1] From\nstdin\none two three\n" in result.stdout


@pytest.mark.usefixtures("fake_llm")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "no prompt is given"),
        (("--model", "missing", "Hi"), "model 'missing' does not exist here; give a folder"),
        (("--top-p", "2", "Hi"), "top_p 2.0 is outside 0 (excluded) to 1"),
        (("--page-size", "24", "Hi"), "page_size 24 is not a power of two"),
        (("--kv-format", "int3", "Hi"), "int3"),
        (("--kv-fill", "mud", "Hi"), "mud"),
    ],
)
def test_a_mistake_ends_with_one_line_and_code_2(arguments: tuple[str, ...], message: str) -> None:
    result = invoke("generate", *arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    [line] = result.stderr.splitlines()
    assert line.startswith("error: ")
    assert message in line


@pytest.mark.usefixtures("fake_llm")
@pytest.mark.parametrize("raw", [b"\xff\xfe", b"fine\n\x80"])
def test_prompts_that_are_not_utf8_end_with_code_2(raw: bytes, tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_bytes(raw)
    for arguments, source in ((["--file", str(file)], f"--file {file}"), (["-"], "standard input"), ([os.fsdecode(raw)], "a prompt")):
        result = CliRunner().invoke(app, ["generate", *arguments], input=raw)
        assert result.exit_code == 2, result.exception
        assert result.stderr.startswith(f"error: {source} is not UTF-8 text: byte 0x")


@pytest.mark.usefixtures("fake_llm")
def test_prompt_files_lose_their_byte_order_mark_and_keep_odd_line_breaks(tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_bytes("\ufeffFirst\r\nSe\x0ccond\u2028\n".encode())
    result = invoke("generate", "--json", "--file", str(file))
    assert sorted(json.loads(line)["prompt"] for line in result.stdout.strip().split("\n")) == ["First", "Se\x0ccond\u2028"]


@pytest.mark.usefixtures("fake_llm")
def test_standard_input_is_one_prompt() -> None:
    result = invoke("generate", "-", "-", stdin="Hi")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "'-' is given 2 times" in result.stderr


@pytest.mark.usefixtures("fake_llm")
def test_a_terminal_without_the_characters_shows_escapes() -> None:
    runner = CliRunner(charset="ascii")
    text = runner.invoke(app, ["generate", "Où", "日"])
    assert text.exit_code == 0, text.exception
    assert "[1] O\\xf9\n" in text.stdout
    lines = runner.invoke(app, ["generate", "--json", "Où"])
    assert lines.exit_code == 0, lines.exception
    assert json.loads(lines.stdout)["prompt"] == "Où"


def test_a_full_disk_ends_with_one_line_and_code_2() -> None:
    with Path("/dev/full").open("w") as full:
        result = subprocess.run([sys.executable, "-m", "atoll", "info", "--device", "cpu", "--json"], stdout=full, stderr=subprocess.PIPE, text=True)
    assert (result.returncode, result.stderr) == (2, "error: the disk is full, the output is incomplete; free some space, or send it elsewhere\n")


@pytest.mark.usefixtures("fake_llm")
def test_a_failed_request_is_told_and_the_others_are_shown() -> None:
    result = invoke("generate", "--model", "broken", "First", "Second")
    assert result.exit_code == 1
    assert "[2] Second\none\n" in result.stdout
    assert result.stderr == "error: request 0: the logits hold NaN\n"


@pytest.mark.usefixtures("fake_llm")
def test_interrupt_ends_with_130() -> None:
    num_closed = FakeLLM.num_closed
    result = invoke("generate", "--model", "interrupted", "Hi")
    assert (result.exit_code, result.stderr) == (130, "interrupted\n")
    assert FakeLLM.num_closed == num_closed + 1


def test_ctrl_c_in_a_process_leaves_no_traceback() -> None:
    code = (
        "import atoll, os, signal, time\n"
        "class LLM:\n"
        "    def __init__(self, model, **options): pass\n"
        "    def __enter__(self): return self\n"
        "    def __exit__(self, *exc): print('closed')\n"
        "    def generate_stream(self, prompts, params):\n"
        "        os.kill(os.getpid(), signal.SIGINT); time.sleep(10)\n"
        "atoll.LLM = LLM\n"
        "from atoll.cli import app\n"
        "app(['generate', 'Hi'])\n"
    )
    # A shell that started the tests in the background has SIGINT ignored, and a child would inherit that.
    heed = functools.partial(signal.signal, signal.SIGINT, signal.default_int_handler)
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, preexec_fn=heed)
    assert (result.returncode, result.stdout, result.stderr) == (130, "closed\n", "interrupted\n")


def test_an_interrupt_ends_a_probe_in_several_processes_quietly() -> None:
    command = [sys.executable, "-m", "atoll", "probe", "kernels", "--backend", "reference", "--device", "cpu", "--matrix", "full", "--jobs", "2"]
    heed = functools.partial(signal.signal, signal.SIGINT, signal.default_int_handler)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True, preexec_fn=heed) as process:
        time.sleep(6)  # the workers are starting, or at their first cases; a terminal's Ctrl-C goes to them too
        os.killpg(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (130, "interrupted\n")


def test_info_tells_versions_and_why_a_backend_is_refused() -> None:
    found = json.loads(invoke("info", "--device", "cpu", "--json").stdout)
    assert found["versions"]["torch"]
    assert found["device"] == "cpu"
    assert set(found["attention_backends"]["reference"].values()) == {None}
    assert found["attention_backends"]["triton"]["fp32"] is not None
    text = invoke("info", "--device", "cpu").stdout
    assert "decode attention on cpu" in text
    assert "reference" in text


def test_info_says_what_computes_the_delta_rule_and_why() -> None:
    found = json.loads(invoke("info", "--device", "cpu", "--json").stdout)
    assert found["delta_prefill"] == {"fla": "its kernels need a GPU, the tensors are on cpu", "torch": None}
    assert "delta rule prefill: torch; fla: its kernels need a GPU" in invoke("info", "--device", "cpu").stdout


def test_info_tells_what_a_model_takes_in_memory(tmp_path: Path) -> None:
    hybrid = {"model_type": "qwen3_5", "num_hidden_layers": 4, "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "vocab_size": 300}
    (tmp_path / "config.json").write_text(json.dumps(hybrid | {"num_key_value_heads": 2, "head_dim": 64}))
    sizes = json.loads(invoke("info", "--device", "cpu", "--model", str(tmp_path), "--json").stdout)["model_sizes"]
    # One layer of K and V rows of two heads; three layers of 32 states of 128 x 128 in fp32, and of conv inputs.
    assert sizes["bytes_per_token"]["bf16"] == 2 * 2 * 64 * 2
    assert sizes["slot_bytes"] > 3 * 32 * 128 * 128 * 4 and sizes["slots_bytes"] == 64 * sizes["slot_bytes"]
    text = invoke("info", "--device", "cpu", "--model", str(tmp_path)).stdout
    assert "bytes of keys and values per token: fp32 1024, bf16 512" in text and f"a state slot, one for each sequence that runs: {sizes['slot_bytes']}" in text
    dense = json.loads(invoke("info", "--device", "cpu", "--model", "smollm2", "--json").stdout)["model_sizes"]
    assert dense["slot_bytes"] is None and dense["model_type"] == "llama"


def test_info_on_a_missing_gpu_says_so() -> None:
    result = invoke("info", "--device", "cuda:99")
    assert result.exit_code == 2
    assert "cuda:99" in result.stderr


def test_probe_is_clean_on_the_reference() -> None:
    result = invoke("probe", "kernels", "--backend", "reference", "--device", "cpu", "--filter", ONE_CASE)
    assert result.exit_code == 0, result.stdout
    assert "reference on cpu: 1 cases: 1 clean" in result.stdout


def test_probe_catches_the_leaky_control() -> None:
    result = invoke("probe", "kernels", "--adapter", "leaky_control", "--device", "cpu", "--filter", ONE_CASE, "--fills", "nan,max")
    assert result.exit_code == 1
    assert "what leaks through leaky_control" in result.stdout
    assert "null.v" in result.stdout


def test_probe_reports_the_old_contract_as_json() -> None:
    arguments = ("--backend", "reference", "--no-mask-unowned-kv", "--device", "cpu", "--filter", ONE_CASE, "--fills", "nan")
    result = invoke("probe", "kernels", *arguments, "--json")
    assert result.exit_code == 1
    *found, summary = (json.loads(line) for line in result.stdout.splitlines())
    assert {"leak"} <= {line["status"] for line in found}
    assert (summary["cases"], summary["leak"], summary["clean"]) == (1, 1, 0)


def test_probe_of_a_kernel_that_takes_nothing_ends_with_2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "refusing_kernel.py").write_text(
        "from atoll import BackendError\n\ndef adapter(problem):\n    raise BackendError('this machine has no such unit')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    result = invoke("probe", "kernels", "--adapter", "refusing_kernel:adapter", "--device", "cpu", "--filter", ONE_CASE)
    assert result.exit_code == 2
    assert "this machine has no such unit" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "give one of --backend"),
        (("--backend", "reference", "--adapter", "leaky_control"), "give one of --backend"),
        (("--backend", "cuda_dreams"), "'cuda_dreams' is unknown"),
        (("--backend", "reference", "--tolerance", "-1"), "--tolerance"),
        (("--backend", "reference", "--fills", "nan,mud"), "fill 'mud' is unknown; use some of"),
        (("--backend", "reference", "--filter", "no such case"), "no case of --matrix quick contains 'no such case'"),
    ],
)
def test_probe_says_what_is_wrong_with_its_arguments(arguments: tuple[str, ...], message: str) -> None:
    result = invoke("probe", "kernels", "--device", "cpu", *arguments)
    assert result.exit_code == 2
    assert message in result.stderr


def test_bench_decode_needs_a_gpu_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = invoke("bench", "decode")
    assert result.exit_code == 2
    assert "bench decode needs a GPU" in result.stderr
    tuned = invoke("bench", "decode", "--device", "cpu", "--tune")
    assert tuned.exit_code == 2
    assert "run it on a GPU" in tuned.stderr


def test_bench_decode_on_a_cpu_prints_cases_and_writes_rows(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    arguments = ("--device", "cpu", "--filter", "bf16/p64/q1/1x1024", "--rounds", "1", "--out", str(out), "--commit", "abc")
    result = invoke("bench", "decode", *arguments)
    assert result.exit_code == 0, result.stderr
    assert "35b-tp1/bf16/p64/q1/1x1024" in result.stdout
    assert "masked against unmasked: geomean" in result.stdout
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(r["mask_unowned_kv"], r["commit"], r["l2"]) for r in rows] == [(True, "abc", None), (True, "abc", None), (False, "abc", None)]


def test_bench_refuses_an_out_file_that_cannot_be_written_before_it_measures(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for command in ("decode", "engine"):
        result = invoke("bench", command, "--device", "cpu", "--out", str(tmp_path / "file" / "rows.jsonl"))
        assert result.exit_code == 2, result.exception
        assert "rows.jsonl cannot be written: " in result.stderr


@pytest.mark.parametrize("arguments", [("--limit", "0"), ("--limit", "-1"), ("--jobs", "0"), ("--budget-s", "-1"), ("--seed", "-1"), ("--seed", str(2**63))])
def test_bench_decode_refuses_numbers_out_of_range(arguments: tuple[str, ...]) -> None:
    result = invoke("bench", "decode", "--device", "cpu", *arguments)
    assert result.exit_code == 2, result.exception
    assert arguments[0] in result.stderr


def test_bench_engine_refuses_a_bad_batch_list() -> None:
    result = invoke("bench", "engine", "--batches", "1,many")
    assert result.exit_code == 2
    assert "--batches '1,many' is not a list of positive numbers" in result.stderr


def test_smollm2_says_paris() -> None:
    command = [str(Path(sys.executable).parent / "atoll"), "generate", "--model", "smollm2", "--temperature", "0", "--max-tokens", "4"]
    result = subprocess.run([*command, "The capital of France is"], capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert (result.returncode, result.stderr) == (0, "")
    assert "Paris" in result.stdout
