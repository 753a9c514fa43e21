"""The page's files, and the view of the pool that it draws."""

import re

import pytest

from atoll.config import make_engine_config
from atoll.engine.build import make_engine
from atoll.engine.engine import Engine
from atoll.engine.sampling import SamplingParams
from atoll.kv.page_map import LETTERS
from atoll.kv.prefix_stats import MissReason
from atoll.server.page import FILES, PATHS
from atoll.server.pool_view import PoolView
from tests.server.running import ENGINE, Running, demo, running_server


def inline_code(html: str) -> list[str]:
    """What the page's Content-Security-Policy would refuse."""
    return re.findall(r"<script(?![^>]*\bsrc=)[^>]*>|<style\b[^>]*>|\sstyle=|\son\w+=|javascript:", html)


def addresses_elsewhere(text: str) -> list[str]:
    """Addresses of other servers, but for the name of SVG's vocabulary, which nobody fetches."""
    return re.findall(r"(?:https?:)?//[\w.-]+\.\w+[^\s\"']*", text.replace("http://www.w3.org/2000/svg", ""))


def test_the_page_and_its_files(server: Running) -> None:
    html = server.http.get("/")
    assert html.headers["content-type"].startswith("text/html") and html.text == FILES["index.html"].decode()
    wanted = re.findall(r'(?:src|href)="([^"]+)"', html.text)
    assert wanted and set(wanted) <= set(PATHS)
    for path in PATHS:
        response = server.http.get(path)
        assert response.status_code == 200
        policy = dict(part.strip().partition(" ")[::2] for part in response.headers["content-security-policy"].split(";"))
        assert policy["default-src"] == "'none'" and policy["script-src"] == "'self'" and policy["frame-ancestors"] == "'none'"
        assert response.headers["x-content-type-options"] == "nosniff"
    assert server.http.get("/page/page.js").headers["content-type"].startswith("text/javascript")
    for path in ("/page/none.js", "/page/../app.py", "/page/..%2Fapp.py", "/page/"):
        assert server.http.get(path).status_code == 404


def test_nothing_is_inline_or_elsewhere() -> None:
    assert inline_code(FILES["index.html"].decode()) == []
    assert [found for text in FILES.values() for found in addresses_elsewhere(text.decode())] == []
    # What scripts import is there.
    imports = [name for text in FILES.values() for name in re.findall(r'from "\./([^"]+)"', text.decode())]
    assert imports and set(imports) <= set(FILES)


@pytest.mark.parametrize("html", ["<script>x()</script>", '<p style="top:0">', '<b onclick="x()">', "<style>p {}</style>"])
def test_control_inline_code_is_found(html: str) -> None:
    assert len(inline_code(html)) == 1 and inline_code('<script src="/page/page.js" type="module"></script>') == []


def test_control_an_address_elsewhere_is_found() -> None:
    assert len(addresses_elsewhere('<link href="https://cdn.example.com/a.css"> import "//example.com/b.js"')) == 2


def test_the_page_is_open_and_the_pool_is_not() -> None:
    with running_server(api_key="sesame") as server:
        assert {server.http.get(path).status_code for path in PATHS} == {200}
        assert server.http.get("/pool").status_code == server.http.get("/page/none.js").status_code == 401
        assert server.http.get("/pool", headers={"Authorization": "Bearer sesame"}).status_code == 200


def test_the_pool_over_http() -> None:
    with running_server() as server:
        empty = server.http.get("/pool").json()
        assert empty["pages"] == "0" + "." * 599 and (empty["num_queries"], empty["num_generated"]) == (0, 0)
        # States are kept every 64 tokens.
        prompt = list(range(40, 110))
        for _ in range(2):
            server.complete(prompt, max_tokens=5, ignore_eos=True)
        view = server.http.get("/pool").json()
        assert len(view["pages"]) == sum(view["counts"].values()) == 600
        assert view["counts"] == {kind: view["pages"].count(letter) for letter, kind in view["kinds"].items()}
        # What is kept is indexed, or a checkpoint's; what no request holds is not kv.
        assert view["counts"]["indexed"] == server.engine.scheduler.cache.num_indexed_pages >= 3
        assert view["counts"]["kv"] == 0 and view["counts"]["image"] % view["image_pages"] == 0 < view["counts"]["image"]
        assert view["counts"]["free"] == server.engine.scheduler.ledger.num_free
        assert (view["num_running"], view["num_waiting"], view["num_generated"]) == (0, 0, 10)
        assert view["num_queries"] == 2 * len(prompt) == view["num_hits"] + sum(view["misses"].values())
        assert view["num_hits"] == 64 and view["misses"]["not_indexed"] == 76 and set(view["misses"]) == set(MissReason)
        assert view["page_size"] == 16 and view["page_bytes"] * 600 == server.engine.pool.buffer.numel()
        assert view["time_s"] >= empty["time_s"] and view["num_steps"] == server.engine.num_steps
        assert server.post("/reset_prefix_cache").status_code == 200
        assert server.http.get("/pool").json()["pages"] == empty["pages"]


def check_map(engine: Engine) -> PoolView:
    """The view, which agrees with the ledger page by page."""
    view, ledger = PoolView.of(engine), engine.scheduler.ledger
    kinds = {letter: kind for kind, letter in LETTERS.items()}
    tree = {node.page for node in engine.scheduler.cache._tree}
    for page, letter in enumerate(view.pages):
        assert kinds[letter] == ("indexed" if page in tree else ledger.page_class(page))
    return view


def test_pages_change_as_requests_run_and_end() -> None:
    loaded = demo()
    engine = make_engine(loaded.model, loaded.config, loaded.tokenizer, make_engine_config(ENGINE | {"num_pages": 64, "max_num_seqs": 1}))
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    for prompt in (range(40, 60), range(140, 160)):
        engine.add(list(prompt), params)
    assert (check_map(engine).num_waiting, check_map(engine).as_json()["counts"]["free"]) == (2, 63)
    seen = []
    while engine.has_work:
        engine.step()
        view = check_map(engine)
        counts = view.as_json()["counts"]
        assert sum(counts.values()) == 64 and counts["kv"] <= view.num_running <= 1
        seen.append((view.num_running, view.num_waiting, counts["kv"]))
    # One after the other; a request's last page is kv until it is full, or the request ends.
    assert seen[0][:2] == (1, 1) and {(1, 1, 1), (1, 0, 1)} < set(seen) and seen[-1] == (0, 0, 0)
    assert (counts["null"], counts["indexed"]) == (1, 4) and view.num_queries == 40
