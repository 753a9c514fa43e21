"""Figures of runs: means with their standard errors, paired differences with their intervals, exact tests. Knows no question."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Mean:
    """A mean over questions."""

    value: float
    stderr: float | None  # sample standard deviation / sqrt(n), as lm-eval states it; None: of one question


@dataclass(frozen=True)
class PairedDifference:
    """How two runs answered the same questions."""

    only_a: int  # questions that A answers better
    only_b: int
    difference: float  # mean of B - A
    low: float  # of its 95 % interval
    high: float
    p: float  # McNemar's exact test, two-sided


def mean_of(scores: Sequence[float]) -> Mean:
    """Of one score per question; where a question was asked several times, its own mean. Raises statistics.StatisticsError for none."""
    value = statistics.fmean(scores)
    return Mean(value, statistics.stdev(scores) / math.sqrt(len(scores)) if len(scores) > 1 else None)


def paired_difference(a: Sequence[float], b: Sequence[float]) -> PairedDifference:
    """Of scores of the same questions in the same order.

    The interval is Bonett and Price's: two imagined questions, one that only A and one that only B answers, are added, so that it is not empty where no
    question differs. Source: Bonett and Price (2012), Adjusted Wald confidence interval for a difference of binomial proportions based on paired data.
    """
    differences = [y - x for x, y in zip(a, b, strict=True)]
    only_a, only_b = sum(d < 0 for d in differences), sum(d > 0 for d in differences)
    padded = [*differences, 1.0, -1.0]
    center = statistics.fmean(padded)
    reach = statistics.NormalDist().inv_cdf((1 + CONFIDENCE) / 2) * statistics.pstdev(padded) / math.sqrt(len(padded))
    low, high = max(-1.0, center - reach), min(1.0, center + reach)
    return PairedDifference(only_a, only_b, statistics.fmean(differences) if differences else 0.0, low, high, mcnemar_p(only_a, only_b))


def mcnemar_p(only_a: int, only_b: int) -> float:
    """The chance that pairs which differ fall at least so unevenly, were each as likely to fall either way."""
    n, fewer = only_a + only_b, min(only_a, only_b)
    return min(1.0, 2 * sum(math.comb(n, k) for k in range(fewer + 1)) / 2**n)
