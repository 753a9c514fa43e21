"""Two commands in alternating restarts: the order, the arithmetic, servers that are started and stopped, commands that fail."""

import json
import socket
import sys
import urllib.request
from pathlib import Path

import pytest
from typer.testing import CliRunner

from atoll.bench.ab import AbOptions, AbReport, permutation_p, printed_value, report_lines, run_ab
from atoll.cli import app
from atoll.errors import ConfigError


def count_up(file: Path, name: str, start: float) -> str:
    """A command that notes its name and prints a value that grows by one with each restart."""
    code = f"import json, pathlib; p = pathlib.Path({str(file)!r}); t = p.read_text() if p.exists() else ''; p.write_text(t + {name!r}); "
    return f'{sys.executable} -c "{code}print(json.dumps(dict(rate={start} + t.count({name!r}))))"'


def test_restarts_alternate_and_warm_ups_do_not_count(tmp_path: Path) -> None:
    file = tmp_path / "order"
    report = run_ab(AbOptions(count_up(file, "A", 10), count_up(file, "B", 20), restarts=2, value="rate"))
    assert file.read_text() == "ABBAAB"
    assert (report.a, report.b) == ([11.0, 12.0], [21.0, 22.0])


def test_difference_and_noise_by_hand() -> None:
    report = AbReport([10.0, 12.0, 14.0], [13.0, 15.0, 17.0])
    # Each varies by 4; pooled the standard deviation is 2, of the difference it is sqrt(4 / 3 + 4 / 3).
    assert (report.difference, report.noise, report.difference_stderr) == (3.0, 2.0, pytest.approx((8 / 3) ** 0.5))
    # Of the 20 ways to deal six values: those whose first three sum to at most 36 or at least 45.
    assert report.p == 4 / 20
    text = "\n".join(report_lines(report, "tokens/s"))
    assert "A tokens/s: mean 12, restarts 10 12 14" in text
    assert "B - A: +3 (+25.00%), standard error 1.63" in text and "from restart to restart: 2 (14.81%); p 0.2" in text


def test_chance_of_a_deal() -> None:
    assert permutation_p([1.0, 2.0], [3.0, 4.0]) == 2 / 6
    assert permutation_p([1.0, 1.0], [1.0, 1.0]) == 1.0
    assert permutation_p([1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0]) == 2 / 70


def test_without_a_value_seconds_are_taken() -> None:
    report = run_ab(AbOptions("true", "true", restarts=2, warmups=0))
    assert len(report.a) == len(report.b) == 2 and min(report.a + report.b) > 0


def test_the_last_json_line_counts() -> None:
    assert printed_value('{"x": 1}\n[3]\n{"x": 2.5}\ndone\n{"y": true}\n', "x", "c") == 2.5
    with pytest.raises(ConfigError, match="command 'c' printed no JSON line with a number under 'y'"):
        printed_value('{"x": 1}\n{"y": true}', "y", "c")


def test_a_command_that_fails_ends_it() -> None:
    with pytest.raises(ConfigError, match="ended with 3: bad luck"):
        run_ab(AbOptions("true", "echo bad luck >&2; exit 3", restarts=2))
    with pytest.raises(ConfigError, match="restarts 1 is below 2"):
        AbOptions("true", "true", restarts=1)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def serving(port: int, folder: Path) -> str:
    return f"exec {sys.executable} -m http.server {port} --bind 127.0.0.1 --directory {folder}"


def test_servers_are_started_anew_and_stopped(tmp_path: Path) -> None:
    port = free_port()
    for name, value in (("a", 5), ("b", 7)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "value").write_text(json.dumps({"rate": value}))
    url = f"http://127.0.0.1:{port}/value"
    load = f"{sys.executable} -c \"import urllib.request; print(urllib.request.urlopen('{url}').read().decode())\""
    options = AbOptions(serving(port, tmp_path / "a"), serving(port, tmp_path / "b"), restarts=2, warmups=0, value="rate", load=load, ready_url=url)
    report = run_ab(options)
    assert (report.a, report.b) == ([5.0, 5.0], [7.0, 7.0])
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(url)


def test_a_server_that_does_not_come_is_told() -> None:
    url = f"http://127.0.0.1:{free_port()}/"
    with pytest.raises(ConfigError, match=r"server 'exit 4' ended with 4 before"):
        run_ab(AbOptions("exit 4", "true", load="true", ready_url=url))
    with pytest.raises(ConfigError, match=r"server 'sleep 30' did not answer .* within 0.01 s"):
        run_ab(AbOptions("sleep 30", "true", load="true", ready_url=url, ready_timeout_s=0.01))


def test_the_command_prints_both(tmp_path: Path) -> None:
    file = tmp_path / "order"
    command = ["bench", "ab", count_up(file, "A", 10), count_up(file, "B", 20), "--value", "rate", "--restarts", "3", "--warmups", "0"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    assert "B - A: +10 (+90.91%)" in result.stdout and "A 10" in result.stderr
    found = json.loads(CliRunner().invoke(app, [*command, "--json"]).stdout)
    assert (found["values_a"], found["difference"]) == ([13.0, 14.0, 15.0], 10.0)
    failed = CliRunner().invoke(app, ["bench", "ab", "false", "true"])
    assert failed.exit_code == 2 and "command 'false' ended with 1" in failed.stderr
