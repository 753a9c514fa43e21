"""Log probabilities of a prompt's own tokens, from the logits of the rows before them; knows no request's text and no page."""

from collections.abc import Callable

import torch

from atoll.engine.output import TokenLogprobs
from atoll.engine.sampler import token_logprobs
from atoll.engine.step import Step
from atoll.engine.transfer import upload

# Rows whose logits exist at once: of a vocabulary of 250,000 that is 256 MB in fp32.
MAX_ROWS = 256


@torch.inference_mode()
def score(step: Step, logits_of: Callable[[torch.Tensor], torch.Tensor], device: torch.device) -> dict[int, list[TokenLogprobs]]:
    """For each row with a ScoreTask, by request id, one entry per target. `logits_of` rows [N] int64 of the batch gives [N, V] fp32."""
    places: list[int] = []
    targets: list[int] = []
    counts: list[int] = []
    first = 0
    for row in step.rows:
        if row.score is not None:
            places += range(first, first + len(row.score.targets))
            targets += row.score.targets
            counts += [row.score.num_top] * len(row.score.targets)
        first += len(row.token_ids)
    entries: list[TokenLogprobs] = []
    for at in range(0, len(places), MAX_ROWS):
        part = slice(at, at + MAX_ROWS)
        entries += token_logprobs(logits_of(upload(places[part], torch.int64, device)), upload(targets[part], torch.int64, device), counts[part])
    scored = [row for row in step.rows if row.score is not None]
    ends = iter(entries)
    return {row.request_id: [next(ends) for _ in row.score.targets] for row in scored if row.score is not None}
