"""`atoll probe`: the ownership promise, tried on kernels and on a whole engine."""
import typer
probe_app = typer.Typer(no_args_is_help=True, help="Prove that output depends on owned rows only.")
