"""Adapters: how the probe calls a decode kernel, ours or anybody's. An adapter prepares one problem and returns what to run.

An adapter is a function `adapter(problem) -> run`; `run()` returns `(out [B, QL, HQ, D], lse [B, QL, HQ] or None)`, and is called again after
every fill of the same buffers. It raises BackendError, with the reason, for a problem that its kernel does not take. A `Run`
also names the workspace and the outputs, so that the probe can poison them; any other callable is fine.
"""

import importlib
import itertools
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass

import torch

from atoll.errors import BackendError
from atoll.ops.attention import BACKENDS, DecodeConfig, DecodePlan, PagedKV, decode_attention, plan_decode
from atoll.ops.attention.leaky import attend_every_row
from atoll.probe.cases import DecodeProblem
from atoll.probe.interpreter import interpreted

Result = tuple[torch.Tensor, torch.Tensor | None]
Adapter = Callable[[DecodeProblem], Callable[[], Result]]
DecodeFunction = Callable[[torch.Tensor, PagedKV, DecodePlan, torch.Tensor, torch.Tensor, torch.Tensor | None], None]

# Shipped adapters besides the backends of atoll.ops.attention.
ADAPTERS: dict[str, str] = {
    "leaky_control": "atoll.probe.adapters:leaky_control",
    "flashinfer_xqa": "atoll.probe.flashinfer:xqa",
    "flashinfer_tensor_cores": "atoll.probe.flashinfer:tensor_cores",
}


@dataclass(frozen=True)
class Run:
    """One prepared call, and the buffers that it writes before it reads them."""

    call: Callable[[], Result]
    workspace: tuple[torch.Tensor, ...] = ()
    outputs: tuple[torch.Tensor, ...] = ()

    def __call__(self) -> Result:
        return self.call()


@dataclass(frozen=True)
class BackendAdapter:
    """One of our backends by name. `decode` replaces the backend's own function and `config` its tuning."""

    backend: str
    config: DecodeConfig | None = None
    decode: DecodeFunction | None = None

    def __call__(self, problem: DecodeProblem) -> Run:
        on_cpu = problem.device.type == "cpu"
        gluon = _gluon_interpreter() if on_cpu and self.backend == "gluon_sm90" else None
        with gluon() if gluon is not None else nullcontext():
            plan = plan_decode(
                problem.spec,
                problem.seq_lens,
                problem.page_table,
                device=problem.device,
                backend=self.backend,
                max_seq_len=problem.case.max_seq_len,
                config=self.config,
            )
        out = torch.empty_like(problem.q)
        lse = torch.empty(problem.q.shape[:3], dtype=torch.float32, device=problem.device)
        kv = problem.kv
        buffers = (
            *(problem.q, problem.buffer, kv.k_scale, kv.v_scale, problem.sinks),
            *(plan.seq_lens, plan.page_table, plan.partial_o, plan.partial_lse, plan.arrivals, out, lse),
        )
        calls = itertools.count()

        def call() -> Result:
            with ExitStack() as stack:
                if on_cpu and plan.backend in ("triton", "gluon_sm90"):
                    stack.enter_context(interpreted(buffers))
                if gluon is not None:
                    # Another order of programs in each call: what depends on it shows as a leak.
                    stack.enter_context(gluon(next(calls)))
                if self.decode is not None:
                    self.decode(problem.q, problem.kv, plan, out, lse, problem.sinks)
                else:
                    decode_attention(problem.q, problem.kv, plan, out=out, lse=lse, sinks=problem.sinks)
            return out, lse

        return Run(call, workspace=(plan.partial_o, plan.partial_lse), outputs=(out, lse))


def _gluon_interpreter() -> Callable[..., AbstractContextManager[None]] | None:
    """What runs Gluon kernels on a CPU, where Triton interprets too."""
    import triton

    if not triton.knobs.runtime.interpret:
        return None
    from atoll.probe.gluon_interpreter import gluon_interpreted

    return gluon_interpreted


def leaky_control(problem: DecodeProblem) -> Run:
    """The old contract in plain PyTorch: every lane of the table is gathered, scores are masked and values are not. The probe must catch it."""
    seq_lens = problem.seq_lens.to(problem.device)
    out = torch.empty_like(problem.q)

    def call() -> Result:
        out.copy_(attend_every_row(problem.q, problem.kv, problem.page_table, seq_lens, problem.spec, problem.sinks)[0])
        return out, None

    return Run(call, outputs=(out,))


def get_adapter(name: str) -> Adapter:
    """A backend of ours, a shipped adapter, or `module:function`. Raises BackendError for anything else."""
    if name in BACKENDS:
        return BackendAdapter(name)
    if ":" in name or name in ADAPTERS:
        return load_adapter(ADAPTERS.get(name, name))
    raise BackendError(f"adapter {name!r} is unknown; use one of {', '.join([*BACKENDS, *ADAPTERS])}, or module:function")


def load_adapter(path: str) -> Adapter:
    """Import `module:function`. Raises BackendError when there is no such function."""
    module_name, _, attribute = path.partition(":")
    if not module_name or not attribute or module_name.startswith("."):
        raise BackendError(f"adapter {path!r} is not of the form module:function; pass for example my_package.kernels:adapter")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise BackendError(f"adapter {path!r} cannot be imported: {error}; is it on PYTHONPATH?") from error
    except Exception as error:  # a module of somebody else's may raise anything
        raise BackendError(f"adapter {path!r} cannot be imported: {type(error).__name__}: {error}; mend the module") from error
    adapter = getattr(module, attribute, None)
    if not callable(adapter):
        raise BackendError(f"module {module_name} has no function {attribute!r}; check the name")
    return adapter
