"""Where in a sequence its state is worth keeping: the ladder, the prompt's end, demand, the request's end; knows no page's owner and no tensor."""

from dataclasses import dataclass

from atoll.kv.prefix import Match

END_STEP = 16  # tokens at least between two copies of a decoding request's state: 1 / 16 more of the traffic that its decode steps cause anyway


@dataclass(frozen=True)
class Placement:
    """Boundaries, all of them multiples of `page_size`, at which a request leaves a checkpoint.

    - `ladder`: every `interval` tokens, so that a sequence which leaves another anywhere computes at most that many again.
    - `prompt`: the last boundary before the prompt's last token: the same prompt again, or one that goes on from it, as a chat's next turn does.
    - `demand`: where the pages that are here end, if no checkpoint is there: two sequences have shared this much, so a third may.
    - `end`: the last boundary that the request has reached, for the turn that follows its answer. Nobody knows where a request will end, so this one moves
      along as it decodes, each copy replacing the one before.
    """

    page_size: int  # tokens
    interval: int  # tokens, a multiple of page_size; -1: no ladder
    policies: frozenset[str]

    def in_prefill(self, num_prompt: int, num_tokens: int, match: Match) -> list[int]:
        """Boundaries at which the prefill of a sequence that begins with `match` is to pause, in order."""
        first, wanted = match.num_tokens, set[int]()
        if "ladder" in self.policies and self.interval > 0:
            wanted.update(range(first // self.interval * self.interval, num_tokens, self.interval))
        if "prompt" in self.policies:
            wanted.add((num_prompt - 1) // self.page_size * self.page_size)
        if "demand" in self.policies:
            wanted.add(match.num_indexed)
        return sorted(position for position in wanted if first < position < num_tokens)

    def in_decode(self, position: int) -> bool:
        """Whether a request that has computed all of its `position` tokens leaves a checkpoint there."""
        return self.is_rung(position) or ("end" in self.policies and position % max(self.page_size, END_STEP) == 0)

    def is_rung(self, position: int) -> bool:
        return "ladder" in self.policies and self.interval > 0 and position % self.interval == 0
