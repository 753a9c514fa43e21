"""Questions to an engine in this process."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from atoll.engine.llm import LLM
from atoll.engine.sampling import SamplingParams
from atoll.errors import ConfigError
from atoll.eval.late_clears import LateClears
from atoll.eval.prompts import Prompt
from atoll.eval.target import Answer


class EngineTarget:
    """A model loaded here. `options` are the fields of atoll.config.EngineConfig."""

    def __init__(self, model: str, **options: Any) -> None:
        self._model = model
        self._options = options
        self.llm = LLM(model, **options)

    def ask(self, prompts: Sequence[Prompt], params: Sequence[SamplingParams]) -> Iterator[Answer]:
        tokens = [prompt if isinstance(prompt, str) else self.llm.chat_prompts(prompt)[0] for prompt in prompts]
        for piece in self.llm.generate_stream(tokens, params):
            if (output := piece.output) is not None:
                yield Answer(
                    index=piece.index,
                    text=output.text,
                    finish_reason=output.finish_reason,
                    token_ids=output.token_ids,
                    num_prompt_tokens=len(output.prompt_token_ids),
                    num_output_tokens=len(output.token_ids),
                    num_cached_tokens=output.num_cached_tokens,
                    num_fetched_tokens=output.num_fetched_tokens,
                    error=output.error,
                )

    def forget(self) -> None:
        self.llm.reset_prefix_cache()

    @contextmanager
    def out_of_order(self) -> Iterator[None]:
        engine = self.llm.engine
        if engine.offload is None or engine.guard is None:
            raise ConfigError("the order of clears and loads was to be taken out of an engine that has not both; give --offload and --guard on")
        in_order = engine.offload.worker
        engine.use_worker(LateClears(in_order, engine.pool.buffer))
        try:
            yield
        finally:
            engine.drain_transfers()
            engine.use_worker(in_order)

    def close(self) -> None:
        self.llm.close()

    def describe(self) -> dict[str, Any]:
        engine = self.llm.engine
        settled = {
            "attention_backend": engine.runner.attention_backend,
            "guard": engine.guard is not None,
            "num_pages": engine.pool.num_pages,
            "max_model_len": engine.scheduler.config.max_model_len,
            "max_num_seqs": engine.scheduler.config.max_num_seqs,
            "device": str(engine.pool.device),
            "torch": torch.__version__,
        }
        return {"kind": "engine", "model": self._model, "options": self._options, "settled": settled}
