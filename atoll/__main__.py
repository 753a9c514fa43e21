"""`python -m atoll`: the `atoll` command, where its script is not on the path."""

from atoll.cli import app

if __name__ == "__main__":
    app(prog_name="atoll")
