"""The engine on a GPU: CUDA graphs replay what runs eagerly, bit for bit, and nothing depends on what lies in the pool."""

from pathlib import Path
from typing import Any

import pytest
import torch

from atoll import LLM, SamplingParams
from atoll.engine import runner as runner_module
from atoll.engine.runner import Runner
from atoll.models import LoadedModel, load_model
from atoll.models.llama import LlamaModel
from tests.engine.tiny import CONFIG, ByteTokenizer, RandomWeights, TinyLoaded, prompts
from tests.kit.waits import no_waits, on_wait
from tests.models.hybrids import CASES
from tests.models.tiny import make_folder

pytestmark = pytest.mark.gpu

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=1)


@pytest.fixture(scope="module")
def loaded() -> TinyLoaded:
    return TinyLoaded(LlamaModel(CONFIG, RandomWeights(CONFIG), torch.device("cuda"), torch.bfloat16), CONFIG, ByteTokenizer())


def make_llm(loaded: TinyLoaded | LoadedModel, **options: Any) -> LLM:
    """Without prefix caching unless asked for: a prompt that is cut elsewhere is the same up to rounding, and here bits are compared."""
    return LLM.from_loaded(loaded, **{"max_num_seqs": 12, "max_model_len": 256, "prefix_caching": False, **options})  # type: ignore[arg-type]


def results(llm: LLM, count: int = 12) -> list[tuple[list[int], list[float]]]:
    """Tokens and the log probability of each: its bits show what the tokens alone would hide."""
    outputs = llm.generate(prompts(count), GREEDY)
    return [(output.token_ids, [entry.logprob for entry in output.logprobs or []]) for output in outputs]


def test_a_replayed_graph_gives_the_bits_of_an_eager_step(loaded: TinyLoaded) -> None:
    eager, graphs = make_llm(loaded, cuda_graphs=False), make_llm(loaded)
    assert results(eager) == results(graphs)
    assert eager.engine.runner.captured_sizes == []
    assert graphs.engine.runner.captured_sizes
    # Every size is captured by now, so this time all decode steps are replays.
    assert results(graphs) == results(eager)


@pytest.mark.parametrize("kv_format", ["bf16", "fp16", "fp8_tensor", "fp8_token"])
@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_a_poisoned_pool_gives_the_bits_of_a_zeroed_one(loaded: TinyLoaded, kv_format: str, page_size: int) -> None:
    options = {"kv_format": kv_format, "page_size": page_size}
    zero = results(make_llm(loaded, **options))
    for fill in ("nan", "inf", "max", "random"):
        assert results(make_llm(loaded, kv_fill=fill, **options)) == zero, fill


@pytest.fixture(scope="module", params=["qwen3_5", "qwen3_next", "qwen3_5_moe"])
def hybrid(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = tmp_path_factory.mktemp(request.param)
    make_folder(folder, **CASES[request.param] | {"eos_token_id": None})
    return load_model(str(folder), device="cuda", dtype=torch.bfloat16)


def test_a_hybrid_model_replayed_gives_the_bits_of_an_eager_step(hybrid: LoadedModel) -> None:
    eager, graphs = make_llm(hybrid, cuda_graphs=False), make_llm(hybrid)
    wanted = results(eager)
    assert results(graphs) == wanted and graphs.engine.runner.captured_sizes
    # All replays now, in slots that others have held.
    assert results(graphs) == wanted


def test_a_hybrid_model_in_poisoned_pages_and_slots_gives_the_bits_of_zeroed_ones(hybrid: LoadedModel) -> None:
    zero = results(make_llm(hybrid))
    for fill in ("nan", "inf", "max", "random"):
        assert results(make_llm(hybrid, kv_fill=fill)) == zero, fill


@pytest.mark.parametrize("kv_format", ["bf16", "fp8_tensor", "fp8_token"])
def test_a_restored_state_gives_the_bits_of_an_uninterrupted_run(hybrid: LoadedModel, kv_format: str) -> None:
    """One request at a time is cut at its prompt's last boundary, cold as warm, so that not even a rounding differs."""
    llm = make_llm(hybrid, kv_format=kv_format, max_num_seqs=1, num_pages=400, prefix_caching=True, checkpoint_policy="prompt", kv_fill="nan")
    cold = results(llm)
    assert llm.engine.prefix_stats.num_hits == 0
    assert results(llm) == cold and llm.engine.prefix_stats.num_hits > 150
    # Into other slots, and out of images that were written before.
    llm.reset_prefix_cache()
    assert [results(llm) for _ in range(2)] == [cold, cold]


def test_padded_rows_touch_no_slot(hybrid: LoadedModel) -> None:
    llm = make_llm(hybrid, kv_fill="nan")
    results(llm, count=3)
    slots = llm.engine.slots
    assert slots is not None and llm.engine.runner.captured_sizes
    # Three requests ran in the first three slots, padded to four rows.
    assert bool((slots.buffer[3:] == 0xFF).all())


def test_padded_rows_leave_the_null_page_alone(loaded: TinyLoaded) -> None:
    llm = make_llm(loaded, kv_fill="nan")
    results(llm, count=3)
    assert llm.engine.runner.captured_sizes
    assert bool((llm.engine.pool.buffer[0] == 0xFF).all())


def test_sampling_is_the_same_alone_and_in_a_crowd(loaded: TinyLoaded) -> None:
    """In fp32, where the batch does not move the logits enough to matter."""
    model = LlamaModel(CONFIG, RandomWeights(CONFIG), torch.device("cuda"), torch.float32)
    llm = make_llm(TinyLoaded(model, CONFIG, ByteTokenizer()), kv_format="fp32")
    params = [SamplingParams(temperature=1.0, top_k=index * 5, top_p=1 - index * 0.02, seed=index, max_tokens=12, ignore_eos=True) for index in range(12)]
    crowd = [output.token_ids for output in llm.generate(prompts(12), params)]
    assert crowd == [llm.generate([prompt], p)[0].token_ids for prompt, p in zip(prompts(12), params, strict=True)]


def test_a_decode_step_waits_for_the_device_once(loaded: TinyLoaded, monkeypatch: pytest.MonkeyPatch) -> None:
    check_waits_once(make_llm(loaded, prefix_caching=True), monkeypatch)


def test_a_hybrid_decode_step_waits_for_the_device_once(hybrid: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    # Copies of states to images included.
    check_waits_once(make_llm(hybrid, prefix_caching=True), monkeypatch)


def check_waits_once(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    results(llm, count=4)
    stream = llm.generate_stream(prompts(4), SamplingParams(temperature=0.8, top_k=7, max_tokens=24, ignore_eos=True))
    for _ in range(8):
        next(stream)
    sample = runner_module.sample

    def sample_unwatched(*args: Any) -> Any:
        # Reading the tokens is the one wait; before it none is allowed.
        on_wait("default")
        try:
            return sample(*args)
        finally:
            on_wait("error")

    monkeypatch.setattr(runner_module, "sample", sample_unwatched)
    try:
        with no_waits():
            assert sum(len(next(stream).token_ids) for _ in range(8)) == 8
    finally:
        stream.close()  # type: ignore[attr-defined]


def test_control_a_graph_that_reads_stale_tokens_shows(loaded: TinyLoaded, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = results(make_llm(loaded))
    build = Runner._build

    def stale(self: Runner, step: Any, entry: Any, into_graph: bool) -> Any:
        return build(self, step, entry, into_graph and entry.graph is None)

    monkeypatch.setattr(Runner, "_build", stale)
    assert results(make_llm(loaded)) != expected


def test_a_mixture_in_fp16_runs_without_graphs(tmp_path: Path) -> None:
    # Torch's grouped product then asks the device for the experts' rows, which a graph cannot hold.
    make_folder(tmp_path, **CASES["qwen3_5_moe"] | {"eos_token_id": None})
    llm = make_llm(load_model(str(tmp_path), device="cuda", dtype=torch.float16), kv_format="fp16")
    assert all(len(tokens) == 24 for tokens, _ in results(llm, count=3))
    assert llm.engine.runner.attention_backend != "reference" and llm.engine.runner.captured_sizes == []
