"""Random answers that a grammar allows."""

import random

from atoll.engine.constraint import Constraint
from tests.server.running import demo


def random_walk(constraint: Constraint, draw: random.Random) -> list[int]:
    """Token ids, each of which the constraint of the demo model's vocabulary allows and takes, up to the end of a text."""
    tokenizer, token_ids = demo().tokenizer, list[int]()
    while not token_ids or token_ids[-1] not in tokenizer.eos_token_ids:
        bits = int.from_bytes(constraint.mask(), "little")
        token_ids.append(draw.choice([token_id for token_id in range(1536) if bits >> token_id & 1]))
        assert constraint.accept(token_ids[-1])
    return token_ids
