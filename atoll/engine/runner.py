"""Runs steps on one device: batch, forward pass, sampling; replays decode steps as CUDA graphs; knows no request's life and no text."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch

from atoll.engine.attend import PagedAttend
from atoll.engine.batch import Batch, BatchBuilder, PrefillSegment
from atoll.engine.delta import SlotDelta
from atoll.engine.output import TokenLogprobs
from atoll.engine.sampler import SampledToken, sample
from atoll.engine.score import score
from atoll.engine.step import Step
from atoll.kv.images import restore_states, save_states
from atoll.kv.pool import PagePool
from atoll.kv.slots import SlotPool
from atoll.models.base import HybridModel, Model
from atoll.offload.base_worker import Fence, TransferWorker, record_fence
from atoll.ops.attention import DecodePlan, DecodeSpec, load_backend, plan_decode

LogitsOf = Callable[[torch.Tensor], torch.Tensor]  # rows [N] int64 of the batch -> [N, V] fp32


@dataclass(frozen=True)
class RunnerConfig:
    """Sizes that hold for the runner's life."""

    max_model_len: int  # tokens
    max_num_seqs: int
    attention_backend: str = "auto"
    cuda_graphs: bool = True


@dataclass(frozen=True)
class StepResult:
    """What a step found out, by request id."""

    tokens: dict[int, SampledToken] = field(default_factory=dict)  # of each request that samples
    scores: dict[int, list[TokenLogprobs]] = field(default_factory=dict)  # of each row with a ScoreTask, one per target


@dataclass
class DecodeGraph:
    """Decode steps of one padded batch size: what they read, and once captured the graph and what it writes."""

    plan: DecodePlan
    ints: torch.Tensor  # [3, BP] int64: token ids, positions, token slots
    state_slots: torch.Tensor | None = None  # [BP] int32; None: the model keeps no state
    graph: "torch.cuda.CUDAGraph | None" = None
    logits: torch.Tensor | None = None  # [BP, V] fp32


class Runner:
    """Holds the model, the pools' tensors and, per padded batch size, one decode plan, made once and refilled each step.

    On a GPU a step that only decodes is padded to the next size, captured or not, and a mixed step's decode rows use the same plan: so replaying a graph
    gives the bits of running eagerly. The first step of a size runs eagerly, on real rows (which compiles the kernels), and is then captured for later
    ones; there is no dummy run, so nothing ever writes to the null page, and no state moves on twice.

    A hybrid model comes with its state slots, any other with None.
    """

    def __init__(
        self,
        model: Model | HybridModel,
        spec: DecodeSpec,
        pool: PagePool,
        config: RunnerConfig,
        slots: SlotPool | None = None,
        worker: TransferWorker | None = None,  # of a connector
    ) -> None:
        self.spec = spec
        self._model = model
        self._pool = pool
        self._slots = slots
        self.worker = worker
        self._config = config
        self._fence: Fence | None = None  # of transfers that are about to be started
        self._layers = [pool.layer_kv(layer) for layer in range(pool.layout.num_layers)]
        self._builder = BatchBuilder(pool.device, spec.page_size, -(-config.max_model_len // spec.page_size))
        self._graphs: dict[int, DecodeGraph] = {}
        self._graph_memory: Any = None  # one memory pool for all graphs: only one of them runs at a time
        # Made at once, so that a spec that no backend takes fails here and not in the first step.
        self.attention_backend = self._graph_for(1).plan.backend
        # Some backends and models read lengths back to the host, which a graph cannot hold.
        waits = not load_backend(self.attention_backend).GRAPH_SAFE or model.waits_for_device
        self._use_graphs = config.cuda_graphs and pool.device.type == "cuda" and not waits

    @property
    def device(self) -> torch.device:
        return self._pool.device

    @property
    def captured_sizes(self) -> list[int]:
        """Padded batch sizes that are replayed from a graph."""
        return sorted(size for size, entry in self._graphs.items() if entry.graph is not None)

    def captured_graph(self, num_decodes: int) -> "torch.cuda.CUDAGraph | None":
        """The graph that a step of so many decode rows replays; None before it is captured, and where none is used."""
        return self._graph_for(num_decodes).graph

    @torch.inference_mode()
    def execute(self, step: Step) -> StepResult:
        """Run a step: the chosen token of each request that samples, and what is asked about prompts.

        All of it goes to one stream, so this order is the order in which pages and slots are written: a cleared page may be written by this very step, a
        restored slot is read by its row, and a saved slot holds what the row left. Transfers run beside it, behind a fence that lies after the clears.
        """
        assert self._slots is not None or not (step.restores or step.saves), "a model without states has no images"
        self._pool.clear(step.metadata.clears)
        self._fence = record_fence(step.metadata.fence, self.device) if self.worker is not None and step.metadata.moves else None
        if not step.rows or self.device.type != "cuda":
            self._start_transfers(step)
        try:
            if self._slots is not None:
                # A sequence begins with a state of zeros, whatever its slot was left with.
                self._slots.clear([row.state_slot for row in step.rows if row.start == 0 and row.state_slot is not None])
                restore_states(self._slots, self._pool, step.restores)
            result = self._run_rows(step) if step.rows else StepResult()
            if self._slots is not None:
                save_states(self._slots, self._pool, step.saves)
        finally:
            # Whatever became of the rows: one that is never started never ends, and its pages would stay leased.
            self._start_transfers(step)
        return result

    def _run_rows(self, step: Step) -> StepResult:
        logits, logits_of = self._run_decodes(step) if not step.prefills else self._run_mixed(step)
        # A GPU computes while thousands of copies are issued.
        self._start_transfers(step)
        tasks = {row.request_id: row.sample for row in step.rows if row.sample is not None}
        tokens = dict(zip(tasks, sample(logits, list(tasks.values())), strict=True)) if tasks else {}
        scores = score(step, logits_of, self.device) if any(row.score is not None for row in step.rows) else {}
        return StepResult(tokens, scores)

    def _start_transfers(self, step: Step) -> None:
        """Have the worker start this step's transfers behind the fence that was recorded for them, if it has not yet."""
        fence, self._fence = self._fence, None
        if fence is not None and self.worker is not None:
            self.worker.run(step.metadata, fence)

    def _run_decodes(self, step: Step) -> tuple[torch.Tensor, LogitsOf]:
        """Logits of the rows that sample, and of any others."""
        entry = self._graph_for(len(step.decodes))
        batch = self._build(step, entry, into_graph=True)
        if entry.graph is not None and entry.logits is not None:
            entry.graph.replay()
            logits = entry.logits
        else:
            logits = self._forward_decodes(entry)
            if self._use_graphs:
                self._capture(entry)
        every_row = len(batch.sample_rows) == batch.num_decodes
        return logits[: batch.num_decodes] if every_row else logits[batch.sample_rows], logits.__getitem__

    def _run_mixed(self, step: Step) -> tuple[torch.Tensor, LogitsOf]:
        entry = self._graph_for(len(step.decodes)) if step.decodes else None
        batch = self._build(step, entry, into_graph=False)
        attend = PagedAttend(self._layers, self.spec, batch.slots, entry.plan if entry else None, batch.num_decodes, batch.segments)
        delta = self._delta(entry, batch.num_decodes, batch.segments)
        hidden = self._forward(batch.token_ids, batch.positions, attend, delta)  # [T, H]
        rows = hidden[batch.sample_rows]
        # Chunks that end no sequence sample nothing; not every kernel takes a batch of nothing.
        return self._model.logits(rows) if len(rows) else rows, lambda wanted: self._model.logits(hidden[wanted])

    def _build(self, step: Step, entry: DecodeGraph | None, into_graph: bool) -> Batch:
        batch = self._builder.build(step, entry.plan.batch if entry else 0, entry.ints if entry and into_graph else None)
        if entry is not None:
            entry.plan.refill(batch.seq_lens, batch.page_table)
            if entry.state_slots is not None:
                entry.state_slots.copy_(self._builder.state_slots(step, entry.plan.batch), non_blocking=True)
        return batch

    def _forward_decodes(self, entry: DecodeGraph) -> torch.Tensor:
        token_ids, positions, slots = entry.ints
        attend = PagedAttend(self._layers, self.spec, slots, entry.plan, entry.plan.batch)
        return self._model.logits(self._forward(token_ids, positions, attend, self._delta(entry, entry.plan.batch)))

    def _forward(self, token_ids: torch.Tensor, positions: torch.Tensor, attend: PagedAttend, delta: SlotDelta | None) -> torch.Tensor:
        if delta is None:
            return cast(Model, self._model).forward(token_ids, positions, attend)
        return cast(HybridModel, self._model).forward(token_ids, positions, attend, delta)

    def _delta(self, entry: DecodeGraph | None, num_decodes: int, segments: Sequence[PrefillSegment] = ()) -> SlotDelta | None:
        return None if self._slots is None else SlotDelta(self._slots, entry.state_slots if entry else None, num_decodes, segments)

    def _capture(self, entry: DecodeGraph) -> None:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._graph_memory):
            entry.logits = self._forward_decodes(entry)
        self._graph_memory = graph.pool()
        entry.graph = graph

    def _graph_for(self, num_decodes: int) -> DecodeGraph:
        size = padded_batch_size(num_decodes, self._config.max_num_seqs) if self.device.type == "cuda" else num_decodes
        if size not in self._graphs:
            self._graphs[size] = self._make_graph(size)
        return self._graphs[size]

    def _make_graph(self, size: int) -> DecodeGraph:
        plan = plan_decode(
            self.spec,
            [0] * size,
            torch.zeros(size, self._builder.table_width, dtype=torch.int32),
            device=self.device,
            backend=self._config.attention_backend,
            max_seq_len=self._config.max_model_len,
        )
        state_slots = None if self._slots is None else torch.full((size,), -1, dtype=torch.int32, device=self.device)
        return DecodeGraph(plan, torch.zeros(3, size, dtype=torch.int64, device=self.device), state_slots)


def padded_batch_size(num_decodes: int, max_num_seqs: int) -> int:
    """The batch size that a decode step is padded to on a GPU: 1, 2, 4, then multiples of 8, and max_num_seqs at most."""
    size = next((size for size in (1, 2, 4) if num_decodes <= size), -(-num_decodes // 8) * 8)
    return min(size, max_num_seqs)
