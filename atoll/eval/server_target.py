"""Questions to an OpenAI-compatible server: completions for text, chat completions for conversations."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any, NoReturn

from atoll.engine.sampling import SamplingParams
from atoll.errors import ConfigError
from atoll.eval.endpoint import Endpoint, error_text, http, timeout
from atoll.eval.prompts import Prompt
from atoll.eval.target import Answer

# A server that is full says so with one of these, and is asked again.
_BUSY = (429, 503)
MAX_TRIES = 8
_FIRST_WAIT_S = 0.5
# Beyond OpenAI's API, but known to servers of open models. Sent only where they differ from what does nothing.
_OPEN_MODEL_FIELDS = {"top_k": 0, "min_p": 0.0, "min_tokens": 0, "ignore_eos": False}


class ServerTarget:
    """`concurrency` requests at a time; `extra_body` goes into each, such as {"return_token_ids": true} for servers that then tell them."""

    def __init__(
        self, endpoint: Endpoint, *, concurrency: int = 64, extra_body: Mapping[str, Any] | None = None, wait: Callable[[float], None] = time.sleep
    ) -> None:
        self._endpoint = endpoint
        self._concurrency = concurrency
        self._extra_body = dict(extra_body or {})
        self._wait = wait

    def ask(self, prompts: Sequence[Prompt], params: Sequence[SamplingParams]) -> Iterator[Answer]:
        limits = http.Limits(max_connections=self._concurrency)
        # The client is closed first: on an interrupt, requests that are under way then end at once.
        with (
            ThreadPoolExecutor(self._concurrency) as threads,
            http.Client(headers=self._endpoint.headers, timeout=timeout(), limits=limits, trust_env=False) as client,
        ):
            work = [threads.submit(self._ask_one, client, index, *one) for index, one in enumerate(zip(prompts, params, strict=True))]
            try:
                for done in as_completed(work):
                    yield done.result()
            finally:
                # However this ends, what has not begun is not asked.
                threads.shutdown(wait=False, cancel_futures=True)

    def forget(self) -> None:
        """By /reset_prefix_cache, which vLLM has too; a server without it keeps its cache."""
        try:
            http.post(f"{self._endpoint.base_url}/reset_prefix_cache", headers=self._endpoint.headers, timeout=timeout(), trust_env=False)
        except http.HTTPError:
            return

    def out_of_order(self) -> NoReturn:
        raise ConfigError(f"{self._endpoint.base_url} is a server, whose order cannot be taken out from here; leave out --base-url, or --ordering-control")

    def close(self) -> None:
        """The server goes on."""

    def describe(self) -> dict[str, Any]:
        told: Any = None
        try:
            response = http.get(f"{self._endpoint.base_url}/version", headers=self._endpoint.headers, timeout=timeout(), trust_env=False)
            told = response.json() if response.status_code == 200 else None
        except (http.HTTPError, ValueError):
            pass
        return {
            "kind": "server",
            "base_url": self._endpoint.base_url,
            "model": self._endpoint.model,
            "server_version": told,
            "concurrency": self._concurrency,
            "extra_body": self._extra_body,
        }

    def _ask_one(self, client: http.Client, index: int, prompt: Prompt, params: SamplingParams) -> Answer:
        path, spoken = ("completions", {"prompt": prompt}) if isinstance(prompt, str) else ("chat/completions", {"messages": prompt})
        body = {"model": self._endpoint.model} | spoken | sampling_body(params) | self._extra_body
        try:
            response = self._post(client, self._endpoint.url(path), body)
        except http.HTTPError as error:
            return Answer(index, "", "error", error=f"no answer: {type(error).__name__}" + (f": {error}" if str(error) else ""))
        if response.status_code != 200:
            return Answer(index, "", "error", error=error_text(response.status_code, response.content))
        try:
            return read_answer(index, response.json())
        except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
            return Answer(index, "", "error", error=f"the response is not as in OpenAI's API: {error!r}")

    def _post(self, client: http.Client, url: str, body: dict[str, Any]) -> http.Response:
        for attempt in range(MAX_TRIES):
            response = client.post(url, json=body)
            if response.status_code not in _BUSY or attempt == MAX_TRIES - 1:
                break
            told = response.headers.get("retry-after", "")
            self._wait(float(told) if told.isdecimal() else _FIRST_WAIT_S * 2**attempt)
        return response


def sampling_body(params: SamplingParams) -> dict[str, Any]:
    """The parameters as OpenAI's API names them."""
    body: dict[str, Any] = {"max_tokens": params.max_tokens, "temperature": params.temperature, "top_p": params.top_p, "stop": list(params.stop)}
    if params.seed is not None:
        body["seed"] = params.seed
    return body | {name: value for name, idle in _OPEN_MODEL_FIELDS.items() if (value := getattr(params, name)) != idle}


def read_answer(index: int, response: Mapping[str, Any]) -> Answer:
    """Of a completion or a chat completion."""
    choice = response["choices"][0]
    text = choice["text"] if "text" in choice else choice["message"]["content"]
    usage = response.get("usage") or {}
    prompt_details = usage.get("prompt_tokens_details") or {}
    finish_reason = str(choice.get("finish_reason"))
    return Answer(
        index=index,
        text=text or "",
        finish_reason=finish_reason,
        error="the server broke it off and gave no reason" if finish_reason == "error" else None,
        token_ids=choice.get("token_ids"),
        num_prompt_tokens=usage.get("prompt_tokens"),
        num_output_tokens=usage.get("completion_tokens"),
        num_cached_tokens=prompt_details.get("cached_tokens"),
        num_fetched_tokens=prompt_details.get("fetched_tokens"),
    )
