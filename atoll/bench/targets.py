"""What decode attention on an H200 is meant to reach, as data, and what rows say of it: met, missed, or not measured."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from atoll.bench.published import Published
from atoll.bench.report import SLOWER_LIMIT, Comparison
from atoll.bench.results import CaseResult, Results
from atoll.bench.shapes import HEADS_35B_TP1, PAGE_SIZES, DecodeShape, full_shapes
from atoll.ops.quant.formats import KVFormat

# Per call in a graph, us: (batch, context) of the 35B's heads, one query token, each page size, warm L2.
TIMES_US: dict[KVFormat, dict[tuple[int, int], float]] = {
    "bf16": {(1, 1024): 5, (16, 1024): 9, (1, 65536): 35, (16, 16384): 122, (64, 4096): 120},
    "fp8_tensor": {(1, 1024): 5, (16, 1024): 7, (1, 65536): 22, (16, 16384): 65, (64, 4096): 65},
    "fp8_token": {(1, 1024): 5, (16, 1024): 7, (1, 65536): 22, (16, 16384): 65, (64, 4096): 65},
}
# Of the best rate that any kernel reached in the run, at the largest case of the 35B's heads.
ROOF_SHARES: dict[KVFormat, float] = {"bf16": 0.97, "fp8_tensor": 0.95, "fp8_token": 0.95}
LARGEST = (256, 16384)
# Against the fp32 reference on the same stored rows.
ERRORS: dict[KVFormat, float] = {"fp8_tensor": 0.003, "fp8_token": 0.003}
# Masked against unmasked, in each L2 state.
MASK_GEOMEAN = 1.0
MASK_WORST = 1 + SLOWER_LIMIT
# Against the fastest peer of each shape, warm L2: how often ahead, and by how much.
AHEAD_SHARE = 0.95
AHEAD_GEOMEANS: dict[KVFormat, float] = {"bf16": 1.3, "fp8_tensor": 1.15}
L2_STATES = ("warm", "cold")
ALL_SHAPES = tuple(full_shapes())


@dataclass(frozen=True)
class Verdict:
    """One target. `met` is None where it was not measured, or not on all shapes and nothing misses it so far."""

    target: str
    limit: str
    measured: str
    met: bool | None

    @property
    def word(self) -> str:
        return {True: "met", False: "missed", None: "not all measured" if self.measured else "not measured"}[self.met]


def judge(results: Results, published: Published | None = None) -> list[Verdict]:
    warm = results.of("warm")
    found = [_time(warm, kv_format, *size, limit) for kv_format, sizes in TIMES_US.items() for size, limit in sizes.items()]
    found += [_roof(warm, kv_format, share) for kv_format, share in ROOF_SHARES.items()]
    found += [_error(results, kv_format, limit) for kv_format, limit in ERRORS.items()]
    found.append(_error_of_peers(results, published))
    found += [verdict for l2 in L2_STATES for verdict in _mask(l2, results.of(l2))]
    return found + _ahead(warm, published)


def best_peers_us(case: CaseResult, published: Published | None) -> dict[str, float]:
    """Times of the case's peers. A published figure is left out where the same peer was timed in the run."""
    measured = {name: row.time_us for name, row in case.peers.items() if row.time_us is not None}
    return (published.times_us(case.shape.name) if published is not None and case.l2 == "warm" else {}) | measured


def mask_beyond_noise(case: CaseResult, limit: float = SLOWER_LIMIT) -> bool:
    """Whether masking costs more than the limit and more than the same kernel's two times differ by in this case."""
    noise = abs(case.noise_ratio - 1) if case.noise_ratio is not None else 0.0
    return case.mask_ratio is not None and case.mask_ratio > 1 + limit + noise


def _time(warm: list[CaseResult], kv_format: KVFormat, batch: int, ctx: int, limit_us: float) -> Verdict:
    times = {f"page {case.shape.page_size}": case.masked.time_us for case in _of_35b(warm, kv_format, batch, ctx) if case.masked is not None}
    known = {page: time for page, time in times.items() if time is not None}
    text = ", ".join(f"{time:.2f} us ({page})" for page, time in known.items())
    return Verdict(f"{kv_format} {batch} x {ctx}, each page size", f"<= {limit_us:g} us", text, _all(known, len(PAGE_SIZES), lambda us: us <= limit_us))


def _roof(warm: list[CaseResult], kv_format: KVFormat, limit: float) -> Verdict:
    shares = {f"page {case.shape.page_size}": 1 / case.over_floor for case in _of_35b(warm, kv_format, *LARGEST) if case.over_floor is not None}
    text = ", ".join(f"{share:.1%} ({page})" for page, share in shares.items())
    target = f"{kv_format} {LARGEST[0]} x {LARGEST[1]}, share of the roof, each page size"
    return Verdict(target, f">= {limit:.0%}", text, _all(shares, len(PAGE_SIZES), lambda share: share >= limit))


def _error(results: Results, kv_format: KVFormat, limit: float) -> Verdict:
    errors: dict[str, float] = {}
    for case in results.cases:
        if case.shape.kv_format == kv_format and case.masked is not None and case.masked.rel_error is not None:
            errors[case.shape.name] = max(case.masked.rel_error, errors.get(case.shape.name, 0.0))
    expected = _count(lambda shape: shape.kv_format == kv_format)
    text = f"largest {max(errors.values()):.3%}, {len(errors)} of {expected} shapes" if errors else ""
    return Verdict(f"{kv_format}, error", f"<= {limit:.1%}", text, _all(errors, expected, lambda error: error <= limit))


def _error_of_peers(results: Results, published: Published | None) -> Verdict:
    """In each case at most that of each peer timed beside it; and of the published ones, which tell one figure per format, at most that."""
    pairs: dict[str, float] = {}  # ours - theirs
    for case in results.cases:
        ours = case.masked.rel_error if case.masked is not None else None
        if ours is None:
            continue
        theirs = {name: row.rel_error for name, row in case.peers.items() if row.time_us is not None and row.rel_error is not None}
        for peer in published.peers if published is not None and case.l2 == "warm" else ():
            if case.shape.name in peer.time_us and peer.name not in theirs and case.shape.kv_format in peer.rel_error:
                # Half of the last digit that is published.
                theirs[peer.name] = peer.rel_error[case.shape.kv_format] + 0.00005
        pairs |= {f"{case.label} {name}": ours - error for name, error in theirs.items()}
    larger = [label for label, difference in pairs.items() if difference > 0]
    text = f"larger in {len(larger)} of {len(pairs)} pairs" + (f", first {larger[0]}" if larger else "") if pairs else ""
    complete = not _without_peer(results.of("warm")) and bool(pairs)
    return Verdict("error against each peer's", "at most theirs", text, False if larger else (True if complete else None))


def _mask(l2: str, cases: list[CaseResult]) -> list[Verdict]:
    ratios = {case.shape.name: case.mask_ratio for case in cases if case.mask_ratio is not None}
    beyond = {case.shape.name: float(mask_beyond_noise(case)) for case in cases if case.mask_ratio is not None and case.noise_ratio is not None}
    expected = len(ALL_SHAPES)
    counted = f"{len(ratios)} of {expected} shapes"
    geomean, worst = "", ""
    if ratios:
        found = Comparison(ratios)
        case, ratio = found.worst
        geomean, worst = f"{found.geomean - 1:+.2%}, {counted}", f"{ratio - 1:+.2%} ({case}), {found.num_above()} above, {counted}"
    complete = len(ratios) == expected
    return [
        Verdict(
            f"masked against unmasked, {l2} L2, geomean",
            f"<= {MASK_GEOMEAN - 1:.0%}",
            geomean,
            complete and Comparison(ratios).geomean <= MASK_GEOMEAN if complete else None,
        ),
        Verdict(f"masked against unmasked, {l2} L2, worst", f"<= {MASK_WORST - 1:+.0%}", worst, _all(ratios, expected, lambda ratio: ratio <= MASK_WORST)),
        Verdict(
            f"masked against unmasked, {l2} L2, above {SLOWER_LIMIT:+.0%} beyond the case's noise",
            "0",
            f"{int(sum(beyond.values()))} of {len(beyond)}" if beyond else "",
            _all(beyond, expected, lambda above: not above),
        ),
    ]


def _ahead(warm: list[CaseResult], published: Published | None) -> list[Verdict]:
    ratios: dict[KVFormat, dict[str, float]] = {kv_format: {} for kv_format in AHEAD_GEOMEANS}
    num_published = 0
    for case in warm:
        peers = best_peers_us(case, published)
        if case.masked is None or case.masked.time_us is None or not peers or case.shape.kv_format not in ratios:
            continue
        name = min(peers, key=peers.__getitem__)
        num_published += name not in case.peers
        ratios[case.shape.kv_format][case.shape.name] = peers[name] / case.masked.time_us
    both = {case: ratio for found in ratios.values() for case, ratio in found.items()}
    without = _without_peer(warm)
    ahead = sum(ratio > 1 for ratio in both.values()) / len(both) if both else 0.0
    text = f"{ahead:.1%} of {len(both)}, {len(without)} without a peer; the fastest is a published one in {num_published}" if both else ""
    found = [Verdict("ahead of the fastest peer, warm L2", f">= {AHEAD_SHARE:.0%} of shapes", text, ahead >= AHEAD_SHARE if both and not without else None)]
    for kv_format, limit in AHEAD_GEOMEANS.items():
        here = Comparison(ratios[kv_format])
        missing = [shape for shape in without if shape.kv_format == kv_format]
        text = f"{here.geomean:.3f} over {len(here.ratios)}" if here.ratios else ""
        met = here.geomean >= limit if here.ratios and not missing else None
        found.append(Verdict(f"the fastest peer's time over ours, {kv_format}, warm L2, geomean", f">= {limit:g}", text, met))
    return found


def _without_peer(warm: Iterable[CaseResult]) -> list[DecodeShape]:
    """Shapes of the formats that are compared which no peer was asked to run. One that every peer refused has none, and is not waited for."""
    asked = {case.shape for case in warm if case.peers and case.masked is not None and case.masked.time_us is not None}
    return [shape for shape in ALL_SHAPES if shape.kv_format in AHEAD_GEOMEANS and shape not in asked]


def _of_35b(cases: Iterable[CaseResult], kv_format: KVFormat, batch: int, ctx: int) -> list[CaseResult]:
    wanted = (HEADS_35B_TP1, kv_format, 1, batch, ctx)
    return [case for case in cases if (case.shape.heads, case.shape.kv_format, case.shape.query_len, case.shape.batch, case.shape.ctx) == wanted]


def _count(holds: Callable[[DecodeShape], bool]) -> int:
    return sum(holds(shape) for shape in ALL_SHAPES)


def _all(values: Mapping[str, float], expected: int, holds: Callable[[float], bool]) -> bool | None:
    """One that misses the limit decides; that none does needs all of them."""
    if not all(map(holds, values.values())):
        return False
    return True if len(values) == expected else None
