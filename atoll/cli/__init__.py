"""The `atoll` command: one module per command group. Starts without torch; a command imports what it needs when it runs."""

import typer

from atoll.cli.base import AtollGroup
from atoll.cli.bench import bench_app
from atoll.cli.bench_decode_report import bench_decode_report
from atoll.cli.bench_offload import bench_offload
from atoll.cli.bench_serve import bench_ab, bench_serve
from atoll.cli.eval import eval_app
from atoll.cli.generate import generate
from atoll.cli.info import info
from atoll.cli.probe import probe_app
from atoll.cli.serve import serve

__all__ = ["app"]

app = typer.Typer(
    name="atoll",
    cls=AtollGroup,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Serve language models from a paged pool in which a sequence's output depends only on the rows that it owns.",
)
app.command()(serve)
app.command()(generate)
app.add_typer(probe_app, name="probe")
bench_app.command("decode-report")(bench_decode_report)
bench_app.command("offload")(bench_offload)
bench_app.command("serve")(bench_serve)
bench_app.command("ab")(bench_ab)
app.add_typer(bench_app, name="bench")
app.add_typer(eval_app, name="eval")
app.command()(info)
