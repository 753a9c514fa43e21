"""docs/server.md names every endpoint, field and metric that the server has, and none that it has not."""

import re

import pytest
from pydantic import BaseModel

from atoll.server.protocol import ChatBody, CompletionBody, GenerationBody, StreamOptions, TokenizeBody
from tests.docs.blocks import ROOT
from tests.server.running import Running, running_server

PAGE = (ROOT / "docs" / "server.md").read_text()


@pytest.fixture(scope="module")
def server() -> Running:
    with running_server() as running:
        yield running


def section(title: str, page: str = PAGE) -> str:
    return page.partition(f"## {title}\n")[2].partition("\n## ")[0]


def first_cells(text: str) -> set[str]:
    """What stands in code in the first column of a section's table."""
    return {name for row in re.findall(r"^\| (`.*?) \| ", text, re.MULTILINE) for name in re.findall(r"`([^`]+)`", row)}


def fields(body: type[BaseModel]) -> set[str]:
    return {field.alias or name for name, field in body.model_fields.items()}


def test_endpoints(server: Running) -> None:
    routes = {f"{method} {path}" for path, methods in server.http.get("/openapi.json").json()["paths"].items() for method in map(str.upper, methods)}
    assert first_cells(section("Endpoints")) == routes | {"GET /"}


@pytest.mark.parametrize(("title", "body"), [("Fields of completions", CompletionBody), ("Fields of chat completions", ChatBody)])
def test_fields(title: str, body: type[GenerationBody]) -> None:
    refused = first_cells(section("What is refused"))
    shown = first_cells(section("Fields of both")) | first_cells(section(title))
    assert shown | (refused & fields(body)) == fields(body)
    assert refused & fields(body) == set(body.neutral), "what is refused is what the bodies call neutral"


def test_fields_within_fields() -> None:
    assert all(f"`{name}`" in section("Fields of both") for name in fields(StreamOptions))
    assert all(f"`{name}`" in section("Endpoints") for name in fields(TokenizeBody) - {"model"})


def test_metrics(server: Running) -> None:
    found = set(re.findall(r"^# TYPE (\S+?)(?:_total)? (?:counter|gauge|histogram)$", server.http.get("/metrics").text, re.MULTILINE))
    assert first_cells(section("Metrics")) == {name for name in found if not name.endswith("_created")}


def test_miss_reasons_and_kinds(server: Running) -> None:
    view = server.http.get("/pool").json()
    text = section("The pool, as the page sees it")
    assert all(f"`{reason}`" in text for reason in view["misses"])
    assert {"kv", "indexed"} <= set(re.findall(r"`([^`]+)`", text)) & set(view["kinds"].values())


def test_control_a_missing_or_foreign_name_is_found() -> None:
    page = "## A\n| field | x |\n|---|---|\n| `a`, `b` | `c` |\n\n## B\n| `d` | y |\n"
    assert first_cells(section("A", page)) == {"a", "b"} and first_cells(section("B", page)) == {"d"}
    assert first_cells(section("Fields of both", PAGE.replace("| `cache_salt` |", "| cache |"))) != first_cells(section("Fields of both"))
