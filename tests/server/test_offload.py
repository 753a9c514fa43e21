"""A server with tiers: what clients and watchers are told of them, what survives a restart, and what is said of an `--offload` that cannot be."""

import asyncio
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import pytest

from atoll.config import make_engine_config
from atoll.engine.build import make_engine
from atoll.errors import ConfigError
from atoll.offload.base import Completion
from atoll.offload.base_worker import TransferWorker
from atoll.server.engine_loop import EngineLoop
from atoll.server.messages import Command, Died, EngineFacts, Report, Stop
from atoll.server.metrics import ServerMetrics
from atoll.server.serve import make_server
from tests.docs.blocks import ROOT
from tests.docs.test_server_page import first_cells
from tests.server.running import ENGINE, Running, demo, running_server
from tests.server.test_shutdown import OPTIONS, server_process

# Each is 70 tokens, of which the 64 before the state come back; the pool holds a sequence, its state, and little more.
PROMPTS = [[40 + i] * 70 for i in range(8)]
SMALL = {"offload": "host:64MiB", "num_pages": 64, "max_num_seqs": 1, "max_model_len": 128}


def metrics(text: str) -> dict[str, float]:
    """Sums over labels, by name."""
    found: dict[str, float] = {}
    for name, value in re.findall(r"^atoll:(\w+?)(?:_total)?(?:{[^}]*})? (\S+)$", text, re.MULTILINE):
        found[name] = found.get(name, 0.0) + float(value)
    return found


def wait_until(is_so: Callable[[], bool], what: str) -> None:
    deadline_s = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline_s, f"{what} did not come"
        time.sleep(0.01)


def ask(server: Running, prompt: list[int]) -> tuple[list[int], dict[str, int]]:
    """The tokens, and what the usage says of the prompt."""
    answer = server.complete(prompt, max_tokens=3, ignore_eos=True, return_token_ids=True)
    return answer["choices"][0]["token_ids"], answer["usage"]["prompt_tokens_details"]


def test_usage_metrics_and_the_page_tell_what_was_fetched() -> None:
    with running_server(SMALL) as server:
        first = [ask(server, prompt) for prompt in PROMPTS]
        assert all(details == {"cached_tokens": 0, "fetched_tokens": 0} for _, details in first)
        # The last stores end when no request is there any more to report with.
        wait_until(lambda: not server.engine.has_pending_transfers, "the stores' end")
        stored = metrics(server.http.get("/metrics").text)
        second = [ask(server, prompt) for prompt in PROMPTS]
        assert [tokens for tokens, _ in second] == [tokens for tokens, _ in first]
        fetched = sum(details["fetched_tokens"] for _, details in second)
        assert fetched >= 6 * 64 and all(details["fetched_tokens"] <= details["cached_tokens"] for _, details in second)
        now = metrics(server.http.get("/metrics").text)
        view = server.http.get("/pool").json()
    assert stored["offload_stored_bytes"] > 0 and stored["offload_loaded_bytes"] == stored["offload_hits"] == 0
    assert now["offload_hits"] == view["num_fetched"] == fetched
    assert now["offload_queries"] == now["prefix_cache_queries"] - now["prefix_cache_hits"] + fetched
    assert now["offload_loaded_bytes"] == view["offload"]["loaded_bytes"] > 0 and now["offload_loaded_seconds"] > 0
    assert now["offload_load_failures"] == now["offload_store_failures"] == now["num_requests_parked"] == 0
    [tier] = view["offload"]["tiers"]
    assert tier["name"] == "host" and now["offload_tier_used_bytes"] == tier["used_bytes"] > 0
    assert tier["capacity_bytes"] == now["offload_tier_capacity_bytes"] <= 64 * 2**20


class Held:
    """A worker whose loads are told of only once it is let go."""

    def __init__(self, worker: TransferWorker) -> None:
        self.inner = worker
        self.holds = True
        self.run, self.wait, self.close, self.register = worker.run, worker.wait, worker.close, worker.register

    def poll(self) -> list[Completion]:
        return [] if self.holds else self.inner.poll()


def test_a_page_being_loaded_is_leased_and_its_request_parked() -> None:
    with running_server(SMALL) as server, ThreadPoolExecutor(1) as client:
        first = [ask(server, prompt) for prompt in PROMPTS]
        wait_until(lambda: not server.engine.has_pending_transfers, "the stores' end")
        assert server.engine.offload is not None
        held = Held(server.engine.offload.worker)
        server.call(lambda engine: engine.use_worker(held))
        answer = client.submit(ask, server, PROMPTS[0])
        wait_until(lambda: server.http.get("/pool").json()["num_parked"] == 1, "the load")
        view = server.http.get("/pool").json()
        assert view["counts"]["leased"] >= 4 and (view["num_running"], view["num_waiting"]) == (0, 0)
        assert view["kinds"]["l"] == "leased" and view["pages"].count("l") == view["counts"]["leased"]
        held.holds = False
        tokens, details = answer.result(60)
        assert tokens == first[0][0] and details["fetched_tokens"] == 64
        assert server.http.get("/pool").json()["counts"]["leased"] == 0


def test_the_documentation_names_every_metric() -> None:
    with running_server(SMALL) as server:
        families = re.findall(r"^# TYPE (\S+?)(?:_total)? (?:counter|gauge|histogram)$", server.http.get("/metrics").text, re.MULTILINE)
    page = (ROOT / "docs" / "offload.md").read_text()
    named = {name for name in first_cells(page) if name.startswith("atoll:")}
    assert named == {name for name in families if "offload" in name or "parked" in name} and len(named) > 12


def test_a_server_without_tiers_says_nothing_of_them(server: Running) -> None:
    assert "offload" not in server.http.get("/metrics").text
    view = server.http.get("/pool").json()
    assert view["offload"] is None and view["num_parked"] == view["num_fetched"] == 0


def test_the_engine_is_closed_within_the_deadline() -> None:
    given: list[float] = []
    with running_server(SMALL, shutdown_s=7.0) as server:
        close = server.engine.close

        def note(timeout_s: float = 30.0) -> None:
            given.append(timeout_s)
            close(timeout_s)

        server.engine.close = note  # type: ignore[method-assign]
        ask(server, PROMPTS[0])
    assert len(given) == 1 and 0 < given[0] <= 7.0


class Link:
    """Takes commands and runs nothing."""

    facts = EngineFacts(max_model_len=128, max_num_seqs=1, vocab_size=8)
    tokenizer: Any = None

    def __init__(self) -> None:
        self.commands: list[Command] = []

    def start(self, on_report: Callable[[Report], None]) -> None:
        """Nothing is ever reported."""

    def put(self, command: Command) -> None:
        self.commands.append(command)

    def join(self) -> None:
        """Has ended."""

    def cut(self) -> None:
        """Has ended."""


class HangingLink(Link):
    """Ends by force alone."""

    def __init__(self) -> None:
        super().__init__()
        self.is_cut = threading.Event()
        self.joins = threading.Event()

    def join(self) -> None:
        self.joins.set()
        assert self.is_cut.wait(20)

    def cut(self) -> None:
        self.is_cut.set()


@pytest.mark.parametrize("hurries", [False, True])
def test_the_last_command_says_how_long_transfers_may_take(hurries: bool) -> None:
    link = Link()

    async def run() -> None:
        loop = EngineLoop(link, max_queued=1, metrics=ServerMetrics("demo"))
        loop.start()
        loop.drain(1000.0)
        if hurries:
            loop.hurry()
        await loop.stop()

    asyncio.run(run())
    last = link.commands[-1]
    assert isinstance(last, Stop) and ((last.drain_s == 0.0) if hurries else (0 < last.drain_s <= 1000))


def test_a_second_ctrl_c_ends_an_engine_that_is_still_writing() -> None:
    """Which is whole or absent, whenever it is cut."""
    link = HangingLink()
    with running_server(SMALL) as server:
        service = server.service

    async def run() -> None:
        loop = service.loop = EngineLoop(link, max_queued=1, metrics=ServerMetrics("demo"))
        loop.start()
        stopping = make_server(service)
        stopping._event_loop = asyncio.get_running_loop()
        stopping.handle_exit(signal.SIGINT, None)
        ends = asyncio.create_task(loop.stop())
        await asyncio.to_thread(link.joins.wait, 20)
        assert not link.is_cut.is_set()
        stopping.handle_exit(signal.SIGINT, None)
        await ends

    asyncio.run(run())


def test_nobody_is_parked_in_a_dead_engine() -> None:
    figures = ServerMetrics("demo")
    loop = EngineLoop(Link(), max_queued=1, metrics=figures)
    figures.engine = replace(figures.engine, num_parked=3)
    loop._take(Died("it is gone"))
    assert figures.engine.num_parked == 0


def test_what_is_on_disk_outlives_the_server(tmp_path: Path) -> None:
    seen = []
    for _ in range(2):
        with running_server(SMALL | {"offload": f"disk:{tmp_path}:64MiB"}) as server:
            seen.append(ask(server, PROMPTS[0]))
            tiers = [tier["name"] for tier in server.http.get("/pool").json()["offload"]["tiers"]]
    assert seen[0][0] == seen[1][0] and tiers == ["host", "disk"]
    assert [details["fetched_tokens"] for _, details in seen] == [0, 64]


@pytest.mark.slow
def test_sigterm_leaves_on_disk_what_the_next_process_fetches(tmp_path: Path) -> None:
    options = ("--offload", f"disk:{tmp_path}:64MiB", "--max-num-seqs", "1")
    body = {"prompt": PROMPTS[0], "max_tokens": 5, "temperature": 0, "return_token_ids": True}
    seen = []
    for _ in range(2):
        with server_process(*options) as (process, url):
            answer = httpx2.post(f"{url}/v1/completions", json=body, timeout=60).json()
            seen.append((answer["choices"][0]["token_ids"], answer["usage"]["prompt_tokens_details"]["fetched_tokens"]))
            process.terminate()
            assert process.wait(60) == 0 and process.stderr is not None and process.stderr.read() == ""
    assert seen[0][0] == seen[1][0] and (seen[0][1], seen[1][1]) == (0, 64)


@pytest.mark.parametrize(
    ("offload", "message"),
    [
        ("host", "offload part 'host' ends in '', which is no size; give a number with B, KB"),
        ("tape:1GiB", "offload part 'tape:1GiB' is unknown; use host:8GiB"),
        ("disk:1GiB", "offload part 'disk:1GiB' lacks a path or a size"),
        ("host:1B", "the host tier of 1 bytes holds 0 pages"),
        ("disk:/nowhere/at/all/kept:1GiB", "the folder /nowhere/at/all does not exist; make it, or name another"),
    ],
)
def test_an_offload_that_cannot_be(offload: str, message: str) -> None:
    loaded = demo()
    with pytest.raises(ConfigError, match=message):
        make_engine(loaded.model, loaded.config, loaded.tokenizer, make_engine_config(ENGINE | SMALL | {"offload": offload}))


def test_a_file_of_another_layout_is_refused_whole(tmp_path: Path) -> None:
    loaded, options = demo(), ENGINE | SMALL | {"offload": f"host:{tmp_path / 'kept'}:8MiB"}
    make_engine(loaded.model, loaded.config, loaded.tokenizer, make_engine_config(options)).close()
    before = (tmp_path / "kept").read_bytes()
    with pytest.raises(ConfigError, match=r"kept.*kv_format.*fp32"):
        make_engine(loaded.model, loaded.config, loaded.tokenizer, make_engine_config(options | {"kv_format": "bf16"}))
    assert (tmp_path / "kept").read_bytes() == before
    make_engine(loaded.model, loaded.config, loaded.tokenizer, make_engine_config(options)).close()


@pytest.mark.slow
def test_the_command_says_in_one_line_what_is_wrong(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "atoll", "serve", *OPTIONS, "--offload", f"disk:{tmp_path / 'none' / 'deep' / 'kept'}:1GiB"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 2 and result.stdout == ""
    assert re.fullmatch(r"error: .*none.*\n", result.stderr)
