"""schemathesis on the server's own description of its API: no 500, no answer that is not described, no body accepted that the description forbids."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.server.programs import needs_clients, run_client
from tests.server.running import Running, running_server, shallow_demo

pytestmark = needs_clients

# Not positive_data_acceptance: no schema can say which roles a chat template takes, or which fields exclude each other.
CHECKS = ["--checks", "all", "--exclude-checks", "positive_data_acceptance"]
NUM_EXAMPLES = 30  # per path


def fuzz(server: Running, folder: Path, *options: str) -> dict[str, Any]:
    """The report of a run that found nothing."""
    command = ["run", f"{server.url}/openapi.json", "--header", "Authorization: Bearer sesame", *CHECKS, "--max-examples", str(NUM_EXAMPLES), *options]
    command += [
        "--generation-deterministic",
        "--no-shrink",
        "--no-color",
        "--request-timeout",
        "60",
        "--report",
        "json",
        "--report-json-path",
        str(folder / "report.json"),
    ]
    run_client("schemathesis", *command, home=folder, folder=folder)
    return json.loads((folder / "report.json").read_text())


@pytest.mark.slow
def test_nothing_is_found(tmp_path: Path) -> None:
    # Short answers, and few at once, where a body does not say how many and how long.
    with running_server({"max_model_len": 32}, shallow_demo(), api_key="sesame", max_n=2, max_queued=0) as server:
        report = fuzz(server, tmp_path)
        assert report["failures"] == report["errors"] == [] and report["operations"]["tested"] == report["operations"]["total"] > 10
        # Not for being refused at the door.
        for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
            assert sum(phase["accepted"] for phase in report["valid_rates"][f"POST {path}"].values()) > 5
        assert server.http.get("/health").status_code == 200


def test_control_a_500_and_an_answer_that_is_not_described_are_found(tmp_path: Path) -> None:
    with running_server(api_key="sesame") as server:
        server.service.tokenizer.decode = lambda *_, **__: 1 / 0  # type: ignore[method-assign]
        server.service.max_model_len = "many"  # type: ignore[assignment]
        try:
            with pytest.raises(AssertionError) as found:
                fuzz(server, tmp_path, "--include-path", "/detokenize", "--include-path", "/v1/models")
        finally:
            del server.service.tokenizer.decode
    assert "Server error" in str(found.value) and "POST /detokenize" in str(found.value)
    assert "Response violates schema" in str(found.value) and "GET /v1/models" in str(found.value)
