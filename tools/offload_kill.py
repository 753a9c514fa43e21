"""Kills a process with SIGKILL at random moments while it stores pages, opens its files again and compares every blob; `python -m tools.offload_kill`.

Each round: a child opens the tiers' files, checks nothing, and stores blobs of known content as fast as it can, over slots that held others; it is killed; a
second child opens the files, fetches every blob that they offer, and says of each whether it is whole, absent (refused by a checksum) or wrong. Ends with 1
when one was wrong. The files go from round to round, and are made anew in some, so that the making is killed too.
"""

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from hashlib import blake2b
from pathlib import Path

import numpy as np
import torch

from atoll.offload import BlobKind, Span, Transfer, make_offload
from atoll.offload.base_worker import Fence, Offload, Regions
from atoll.offload.connector import TieredConnector
from atoll.offload.identity import StoreIdentity
from atoll.offload.slab import Slab, _unpack

PAGE_BYTES = 16 * 1024
IMAGE_PAGES = 3
NUM_SLOTS = 96  # of each file: few, so that they are soon written over
NUM_POOL_PAGES = 1 + NUM_SLOTS
NUM_IN_FLIGHT = 8  # transfers, each of a page and a state
LONGEST_S = 0.03  # of a child's life after its first store, or, in one round of five, after its start
TIERS = ("host", "disk", "both")
FAULTS = ("none", "records-first")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--tiers", choices=TIERS, default="both", help="which of them are files")
    parser.add_argument("--fault", choices=FAULTS, default="none", help="records-first: records before bytes, and checksums not compared; must show wrong ones")
    parser.add_argument("--folder", type=Path, help="for the files; a temporary one where it is left out")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.fault == "records-first":
        bring_back_records_first()
    with tempfile.TemporaryDirectory(prefix="offload-kill-", dir=args.folder) as folder:
        counts = run_rounds(args.kills, Path(folder), args.tiers, args.seed)
    print(json.dumps({"tiers": args.tiers, "fault": args.fault, "seed": args.seed, **counts}))
    sys.exit(1 if counts["wrong"] else 0)


def run_rounds(num_kills: int, folder: Path, tiers: str, seed: int = 0) -> dict[str, int]:
    """Totals over all rounds. `died` counts children that ended by themselves, which none should."""
    dice = random.Random(seed)
    totals = Counter(dict.fromkeys(("kills", "offered", "whole", "absent", "wrong", "died"), 0))
    for number in range(num_kills):
        if dice.random() < 0.05:
            for path in folder.iterdir():
                path.unlink()
        reader, writer = os.pipe()
        child = fork(lambda number=number, writer=writer: store_for_ever(folder, tiers, number, writer))  # type: ignore[misc]
        os.close(writer)
        offered = os.read(reader, 1) if dice.random() < 0.8 else b""
        time.sleep(dice.uniform(0.0, LONGEST_S))
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        totals["died"] += not os.WIFSIGNALED(status)
        # A byte for each transfer that was offered.
        totals["offered"] += len(offered + read_all(reader))
        totals["kills"] += 1
        reader, writer = os.pipe()
        child = fork(lambda writer=writer: report(folder, tiers, writer))  # type: ignore[misc]
        os.close(writer)
        said = read_all(reader)
        os.waitpid(child, 0)
        totals.update(json.loads(said))
    return dict(totals)


def fork(work: Callable[[], None]) -> int:
    """Torch is imported once: this process has no threads, and each round's children begin as copies of it."""
    child = os.fork()
    if child == 0:
        try:
            work()
            os._exit(0)
        finally:
            traceback.print_exc()
            os._exit(70)
    return child


def read_all(file: int) -> bytes:
    parts = []
    while part := os.read(file, 65536):
        parts.append(part)
    os.close(file)
    return b"".join(parts)


def open_tiers(folder: Path, tiers: str) -> tuple[Offload, Regions]:
    size = f"{4096 + NUM_SLOTS * (PAGE_BYTES + 64) + 8192}B"
    host = f"host:{folder}/host.slab:{size}" if tiers in ("host", "both") else f"host:{size}"
    disk = f",disk:{folder}/disk.slab:{size}" if tiers in ("disk", "both") else ""
    identity = StoreIdentity("kill", "", "", "", "bfloat16", "cpu", PAGE_BYTES, 16, "bf16", "plain", 1, 1, 64, IMAGE_PAGES * PAGE_BYTES, IMAGE_PAGES)
    regions = Regions(torch.zeros((NUM_POOL_PAGES, PAGE_BYTES), dtype=torch.uint8), IMAGE_PAGES)
    offload = make_offload(host + disk, identity, regions)
    offload.worker.register(regions)
    return offload, regions


def content(kind: BlobKind, digest: bytes, part: int) -> np.ndarray:
    """A page's bytes follow from its name, and each word of them from its place."""
    name = blake2b(digest + kind.value.encode() + bytes([part]), digest_size=8).digest()
    return (np.arange(PAGE_BYTES // 8, dtype=np.uint64) + np.frombuffer(name, np.uint64)).view(np.uint8)


def store_for_ever(folder: Path, tiers: str, number: int, told: int) -> None:
    """One KV page and one state after the other, as many in flight as the pool has places."""
    offload, regions = open_tiers(folder, tiers)
    firsts = range(1, 1 + NUM_IN_FLIGHT * (1 + IMAGE_PAGES), 1 + IMAGE_PAGES)
    free = [(page, tuple(range(page + 1, page + 1 + IMAGE_PAGES))) for page in firsts]
    in_flight: dict[int, tuple[int, tuple[int, ...]]] = {}
    pool = regions.pages.numpy()
    generation = 0
    while True:
        while free:
            generation += 1
            page, image = in_flight[generation] = free.pop()
            digest = blake2b(f"{number} {generation}".encode(), digest_size=16).digest()
            spans = (Span(BlobKind.KV, digest, (page,)), Span(BlobKind.STATE, digest, image))
            for span in spans:
                for part, target in enumerate(span.pages):
                    pool[target] = content(span.kind, digest, part)
            if offload.connector.prepare_store(Transfer(generation, spans)) is None:
                free.append(in_flight.pop(generation))
                break
            os.write(told, b".")
        step(offload)
        free += [in_flight.pop(done.generation) for done in offload.connector.complete(offload.worker.poll())]


def step(offload: Offload) -> None:
    metadata = offload.connector.build_metadata(0, ())
    if metadata.moves:
        offload.worker.run(metadata, Fence(0))
    offload.worker.wait(0.01)


def report(folder: Path, tiers: str, told: int) -> None:
    """Fetch every blob that the files offer, and write the counts."""
    offload, regions = open_tiers(folder, tiers)
    assert isinstance(offload.connector, TieredConnector)
    counts = Counter(whole=0, absent=0, wrong=0)
    generation = 0
    for tier in (offload.connector.host, offload.connector.disk):
        keys = tier.keys if tier is not None else []
        for kind in BlobKind:
            spans = []
            pages = iter(range(1, NUM_POOL_PAGES))
            for key in keys:
                if key[0] is kind:
                    spans.append(Span(kind, key[1], tuple(next(pages) for _ in range(1 if kind is BlobKind.KV else IMAGE_PAGES))))
            generation += 1
            if spans:
                counts.update(fetch(offload, regions, Transfer(generation, tuple(spans))))
    offload.worker.close(10.0)
    os.write(told, json.dumps(counts).encode())


def fetch(offload: Offload, regions: Regions, load: Transfer) -> list[str]:
    """For each span: whole, absent or wrong."""
    if not offload.connector.after_allocation(load):
        return ["absent"] * len(load.spans)
    while True:
        step(offload)
        for done in offload.connector.complete(offload.worker.poll()):
            return [_judge(regions, span) if has_come else "absent" for span, has_come in zip(load.spans, done.arrived, strict=True)]


def _judge(regions: Regions, span: Span) -> str:
    is_right = all((regions.pages[page].numpy() == content(span.kind, span.digest, part)).all() for part, page in enumerate(span.pages))
    return "whole" if is_right else "wrong"


def bring_back_records_first() -> None:
    """The fault: records are written before the bytes, stay while other bytes come, and nobody compares a checksum."""
    write_bytes, record = Slab._write_bytes, Slab.record

    def write_records_first(slab: Slab, kind: BlobKind, digest: bytes, slots: Sequence[int], parts: Sequence[memoryview]) -> None:
        record(slab, kind, digest, slots, parts)
        for slot, data in zip(slots, parts, strict=True):
            write_bytes(slab, slab._slot_offset(slot), data)

    def trust_records(slab: Slab, kind: BlobKind, digest: bytes, slots: Sequence[int], parts: Sequence[memoryview]) -> bool:
        records = [_unpack(slab._read_bytes(slab._record_offset(slot), 64), slot) for slot in slots]
        return all(record is not None and (record.kind, record.digest) == (kind, digest) for record in records)

    for name, method in {"write": write_records_first, "verify": trust_records, "void": lambda slab, slots: None}.items():
        setattr(Slab, name, method)


if __name__ == "__main__":
    main()
