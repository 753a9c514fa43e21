"""Where in a sequence its state is worth keeping: the ladder, the prompt's end, demand, the request's end; knows no page's owner and no tensor."""

from dataclasses import dataclass

from atoll.kv.prefix_match import Match


@dataclass(frozen=True)
class Placement:
    """Boundaries, all of them multiples of `grid`, at which a request leaves a checkpoint.

    A prefill that begins at such a boundary is cut where one that begins at 0 is, so it rounds alike: who left the checkpoint, and when, changes no bit.

    - `ladder`: every `interval` tokens, so that a sequence which leaves another anywhere computes at most that many again.
    - `prompt`: the last boundary before the prompt's last token: the same prompt again, or one that goes on from it, as a chat's next turn does.
    - `demand`: where the pages that are here end, if no checkpoint is there: two sequences have shared this much, so a third may.
    - `end`: the last boundary that the request has reached, for the turn that follows its answer. Nobody knows where a request will end, so this one moves
      along as it decodes, each copy replacing the one before.
    """

    grid: int  # tokens: whole pages, and whole chunks of a prefill
    interval: int  # tokens, a multiple of grid; -1: no ladder
    policies: frozenset[str]

    def in_prefill(self, num_prompt: int, num_tokens: int, match: Match) -> list[int]:
        """Boundaries at which the prefill of a sequence that begins with `match` is to pause, in order."""
        first, wanted = match.num_tokens, set[int]()
        if "ladder" in self.policies and self.interval > 0:
            wanted.update(range(first // self.interval * self.interval, num_tokens, self.interval))
        if "prompt" in self.policies:
            wanted.add(self._floor(num_prompt - 1))
        if "demand" in self.policies:
            wanted.add(self._floor(match.num_indexed))
        return sorted(position for position in wanted if first < position < num_tokens)

    def in_decode(self, position: int) -> bool:
        """Whether a request that has computed all of its `position` tokens leaves a checkpoint there."""
        return self.is_rung(position) or ("end" in self.policies and position % self.grid == 0)

    def is_rung(self, position: int) -> bool:
        return "ladder" in self.policies and self.interval > 0 and position % self.interval == 0

    def _floor(self, position: int) -> int:
        return position // self.grid * self.grid
