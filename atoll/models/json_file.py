"""Reads one JSON object of a model's folder; imports no torch."""

import json
from pathlib import Path
from typing import Any

from atoll.errors import ModelError


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. Raises ModelError for a file that is missing, damaged or something else."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:  # ValueError covers bad JSON and bad UTF-8
        raise ModelError(f"cannot read {path}: {error}; the folder is incomplete or damaged") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} holds a {type(content).__name__}, not an object; the file is damaged")
    return content
