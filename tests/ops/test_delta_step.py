"""The decode step of a delta layer: its values, what it writes and what not, and the same of the kernels, interpreted and compiled."""

from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from atoll.errors import SpecError
from atoll.ops.delta import DeltaSpec, StepTrace, causal_conv, delta_recurrent, delta_step, l2norm, make_trace
from atoll.ops.delta.step import delta_step_torch
from tests.kit.delta import LAYOUTS, TOLERANCE, Step, StepCase, bits, differences, interpreted_faults, interpreted_mutation_faults, leaks, mutated_delta
from tests.kit.mutation import Edit
from tests.kit.workers import WorkerPool

SPEC = DeltaSpec(2, 4, 16, 32, 4, torch.float32)
# Head dims that no block of a kernel fits, three value heads per key head, another conv width.
ODD_SPEC = DeltaSpec(1, 3, 12, 40, 3, torch.float32)
WIDE_SPEC = DeltaSpec(1, 1, 8, 72, 6, torch.float32)

CASES = [
    StepCase(SPEC, (3, -1, 0, 5)),
    StepCase(SPEC, (4, 1, -1), query_len=3, trace=True, layout="slot_major"),
    StepCase(SPEC, (2, 0, 5, -1, 1), query_len=4, query_lens=(4, 0, 1, 3, 2), trace=True),
    StepCase(ODD_SPEC, (5, 2), query_len=5, query_lens=(5, 1), layout="odd", trace=True),
    StepCase(ODD_SPEC, (0, -1), layout="slot_major"),
    StepCase(WIDE_SPEC, (1, 3, 0), query_len=2, query_lens=(2, 0, 1), layout="odd"),
    StepCase(replace(SPEC, dtype=torch.float16), (1, -1, 4), query_len=2, query_lens=(1, 2, 2), layout="slot_major"),
    StepCase(SPEC, (-1, -1), query_len=2),
    StepCase(SPEC, (1, 0), query_len=2, owned_nan=True),
]
NAMES = [case.name for case in CASES]

# For GPUs: also bf16, whose rounding Triton 3.6's interpreter gets wrong, and the head counts of a real layer.
REAL_SPEC = DeltaSpec(16, 32, 128, 128, 4, torch.bfloat16)
GPU_CASES = [
    *CASES,
    *(StepCase(REAL_SPEC, (5, -1, 0, 2), query_len=3, query_lens=(3, 2, 1, 0), layout=layout, trace=True) for layout in LAYOUTS),
    StepCase(REAL_SPEC, (4,)),
    StepCase(DeltaSpec(2, 2, 256, 256, 4, torch.float16), (4, 1)),
]


@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_a_step_is_the_recurrence_over_its_tokens(case: StepCase) -> None:
    problem, start = case.make().run(delta_step_torch), case.make()
    spec = case.spec
    for i_b, slot in enumerate(case.slots):
        n = problem.num_tokens(i_b)
        assert (problem.out[i_b, n:] == 0).all()
        if n == 0:
            continue
        mixed, conv_state = causal_conv(start.mixed_qkv[i_b, :n], start.conv_weight, start.conv_states[slot])
        q, k, v = mixed.split([spec.key_dim, spec.key_dim, spec.value_dim], -1)
        q, k = (l2norm(x.unflatten(-1, (spec.num_k_heads, spec.k_head_dim))) for x in (q, k))
        v = v.unflatten(-1, (spec.num_v_heads, spec.v_head_dim))
        out, state = delta_recurrent(q, k, v, start.g[i_b, :n], start.beta[i_b, :n], start.states[slot])
        tolerance = TOLERANCE[spec.dtype]
        torch.testing.assert_close(problem.out[i_b, :n], out.to(spec.dtype), rtol=tolerance, atol=tolerance, equal_nan=True)
        torch.testing.assert_close(problem.states[slot], state, rtol=tolerance, atol=tolerance, equal_nan=True)
        assert torch.equal(bits(problem.conv_states[slot]), bits(conv_state))


@pytest.mark.parametrize("case", [case for case in CASES if case.trace], ids=lambda case: case.name)
def test_a_trace_leads_back_to_every_token(case: StepCase) -> None:
    """The states that the trace has after token t are those of a step of t + 1 tokens."""
    whole, width = case.make().run(delta_step_torch), case.spec.conv_width
    assert whole.trace is not None
    for t in range(case.query_len):
        lens = tuple(min(t + 1, whole.num_tokens(i_b)) for i_b in range(len(case.slots)))
        part = replace(case, query_lens=lens).make().run(delta_step_torch)
        for i_b, slot in enumerate(case.slots):
            if t < whole.num_tokens(i_b):
                assert torch.equal(whole.trace.states[i_b, t], part.states[slot])
                assert torch.equal(whole.trace.conv_inputs[i_b, :, t + 1 : t + width], part.conv_states[slot])


@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_the_definition_depends_on_its_own_slots_only(case: StepCase) -> None:
    assert leaks(case, delta_step_torch) == []


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_without_a_sequence_leave_every_byte(layout: str) -> None:
    case = StepCase(SPEC, (-1, 3, 2), query_len=2, query_lens=(2, 0, 0), layout=layout, trace=True)
    before, after = case.make(), case.make().run(delta_step_torch)
    assert (after.out == 0).all()
    assert all(torch.equal(bits(tensor), bits(after.written()[name])) for name, tensor in before.written().items() if name != "out")
    assert all(torch.equal(unowned, after.unowned_bytes()[name]) for name, unowned in before.unowned_bytes().items())


def test_a_nan_that_is_owned_reaches_what_it_feeds_and_nothing_else() -> None:
    p = StepCase(SPEC, (1, 0), query_len=2, owned_nan=True).make().run(delta_step_torch)
    want = torch.zeros_like(p.out, dtype=torch.bool)
    want[0, :, 0, 0] = True  # the state's column, from the first token on
    want[0, 1, -1, -1] = True  # v's column, at its token
    assert torch.equal(p.out.isnan(), want)
    assert torch.equal(p.states[1].isnan().any(1), want[0, 1])
    assert not p.states[0].isnan().any()


@pytest.mark.parametrize("shape", [(0, 1), (2, 0)])
def test_nothing_to_step(shape: tuple[int, int]) -> None:
    problem = StepCase(SPEC, (1, 2)).make()
    batch, query_len = shape
    gates = torch.zeros(*shape, 4)
    mixed, slots = torch.zeros(*shape, SPEC.conv_dim), torch.arange(batch, dtype=torch.int32)
    out = delta_step(SPEC, mixed, gates, gates, problem.conv_weight, problem.conv_states, problem.states, slots)
    assert out.shape == (batch, query_len, 4, 32)
    assert torch.equal(bits(problem.states), bits(StepCase(SPEC, (1, 2)).make().states))


def test_a_given_output_is_used_and_a_missing_one_made() -> None:
    a, b = (StepCase(SPEC, (1, 2)).make() for _ in "ab")
    arguments = [(p.spec, p.mixed_qkv, p.g, p.beta, p.conv_weight, p.conv_states, p.states, p.slots) for p in (a, b)]
    out = torch.empty_like(a.out)
    assert delta_step(*arguments[0], out=out) is out
    assert torch.equal(delta_step(*arguments[1]), out)


@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_a_step_of_several_tokens_has_the_bits_of_steps_of_one(case: StepCase) -> None:
    want, p = case.make().run(delta_step_torch), case.make()
    for t in range(case.query_len):
        at = slice(t, t + 1)
        slots = torch.tensor([slot if t < want.num_tokens(i_b) else -1 for i_b, slot in enumerate(case.slots)], dtype=torch.int32)
        out = delta_step(p.spec, p.mixed_qkv[:, at], p.g[:, at], p.beta[:, at], p.conv_weight, p.conv_states, p.states, slots)
        assert torch.equal(bits(out), bits(want.out[:, at]))
    assert torch.equal(bits(p.states), bits(want.states)) and torch.equal(bits(p.conv_states), bits(want.conv_states))


# The kernels, interpreted.


@pytest.fixture(scope="module")
def interpreted(interpreter: WorkerPool) -> dict[str, Future[list[str]]]:
    """All at once, so that every worker is busy while the first is waited for. Leaks are looked for where a case is small."""
    return {case.name: interpreter.submit(interpreted_faults, case, look_for_leaks=case.query_len < 3 or case.spec is ODD_SPEC) for case in CASES}


@pytest.mark.parametrize("name", NAMES)
def test_the_interpreted_kernels_do_what_the_definition_does_and_no_more(name: str, interpreted: dict[str, Future[list[str]]]) -> None:
    assert interpreted[name].result() == []


RAGGED = CASES[2]
LATE = (Edit("num_tokens + o_w", "num_tokens - 1 + o_w"),)

# Negative controls: an error in the kernels' source, a case that needs what was taken out, and a fault that must then be found.
KERNEL_MUTATIONS: dict[str, tuple[tuple[Edit, ...], StepCase, str]] = {
    "decay after the read": (
        (
            Edit("b_state *= tl.exp(tl.load(p_g + t * stride_g_t))", "b_decay = tl.exp(tl.load(p_g + t * stride_g_t))"),
            Edit("b_state += b_k[:, None] * b_delta[None, :]", "b_state = b_state * b_decay + b_k[:, None] * b_delta[None, :]"),
        ),
        CASES[0],
        "out: wrong value",
    ),
    "wrong slot written": ((Edit("tl.store(p_state, b_state", "tl.store(p_state + stride_s_r, b_state"),), CASES[0], "states: stray write"),
    "conv state one token late": (LATE, CASES[0], "conv_states: wrong value"),
    "conv state one token late, several tokens": (LATE, RAGGED, "conv_states: wrong value"),
    "slot -1 taken for a slot": ((Edit("tl.where(slot >= 0, num_tokens, 0)", "(num_tokens + 0 * slot)"),), CASES[0], "states: stray write"),
    "no zeros for tokens that are not there": ((Edit("in range(num_tokens, query_len)", "in range(query_len, query_len)"),), CASES[0], "out: wrong value"),
    "query lengths not read": ((Edit("if RAGGED:", "if False:"),), RAGGED, "states: wrong value"),
    "rows past DK read": ((Edit("b_state = tl.load(p_state, mask=m_state", "b_state = tl.load(p_state, mask=m_v[None, :]"),), CASES[4], "states: wrong value"),
    "columns past DV written": ((Edit("m_v = o_v < DV", "m_v = o_v >= 0"),), CASES[5], "out: wrong value"),
    "channels of the next head": ((Edit("m_state = m_d[:, None]", "m_state = (o_d >= 0)[:, None]"),), CASES[5], "conv_states: stray write"),
    "no trace of the state before": ((Edit("b_before, mask=m_state", "b_before, mask=m_state & (slot < 0)"),), RAGGED, "trace.conv_inputs: wrong value"),
    "k of the wrong head": ((Edit("i_h // GROUP * DK", "i_h % HK * DK"),), CASES[0], "out: wrong value"),
}


@pytest.fixture(scope="module")
def mutated(interpreter: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Future[list[str]]]:
    return {
        name: interpreter.submit(interpreted_mutation_faults, edits, case, tmp_path_factory.mktemp("delta"))
        for name, (edits, case, _) in KERNEL_MUTATIONS.items()
    }


@pytest.mark.parametrize("name", KERNEL_MUTATIONS)
def test_an_error_in_the_kernels_is_seen(name: str, mutated: dict[str, Future[list[str]]]) -> None:
    assert KERNEL_MUTATIONS[name][2] in mutated[name].result()


DEFINITION_MUTATIONS: dict[str, tuple[Edit, StepCase, str]] = {
    "wrong slot written": (Edit("states[slot], conv_states[slot] =", "states[slot - 1], conv_states[slot] ="), CASES[1], "states: stray write"),
    "slot -1 taken for the last": (Edit("slot < 0 or num_tokens == 0", "num_tokens == 0"), CASES[1], "states: stray write"),
    "conv state not written": (Edit("states[slot], conv_states[slot] =", "states[slot], _ ="), CASES[0], "conv_states: wrong value"),
    "output left as it was": (Edit("out.zero_()", "pass"), CASES[0], "out: wrong value"),
}


@pytest.mark.parametrize("name", DEFINITION_MUTATIONS)
def test_an_error_in_the_definition_is_seen(name: str, tmp_path: Path) -> None:
    edit, case, fault = DEFINITION_MUTATIONS[name]
    assert fault in differences(case, mutated_delta("step.py", (edit,), tmp_path).delta_step_torch)


@pytest.mark.parametrize("leaked", ["states", "out", "company"])
def test_a_leak_is_seen(leaked: str) -> None:
    """Steps that read a neighbour's slot, the old output, or the rest of the batch."""

    def leaky(spec: DeltaSpec, mixed: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, weight: torch.Tensor, *rest: torch.Tensor) -> None:
        _, states, slots, _, out, _ = rest
        stray = {"states": states[1, 0, 0, 0] * 0, "out": out[0, 0, 0, 0] * 0, "company": slots.sum() * 1e-3}[leaked].clone()
        delta_step_torch(spec, mixed, g, beta, weight, *rest)  # type: ignore[arg-type]
        out += stray

    assert leaks(CASES[0], leaky) != []


# What is refused.


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"slots": torch.tensor([1, 2])}, "slots is torch.int64 .*, the call asks for torch.int32"),
        ({"slots": torch.tensor([1, 6], dtype=torch.int32)}, "slot 6 is outside 0 to 5; pass the slot that the sequence holds, or -1 for no sequence"),
        ({"slots": torch.tensor([-2, 1], dtype=torch.int32)}, "slot -2 is outside 0 to 5"),
        ({"slots": torch.tensor([3, 3], dtype=torch.int32)}, "slot 3 is named 2 times, the limit is once; give every sequence a slot of its own"),
        ({"query_lens": torch.tensor([1, 2], dtype=torch.int32)}, "query length 2 is outside 0 to 1; mixed_qkv has 1 tokens per sequence"),
        ({"query_lens": torch.tensor([1, 1])}, "query_lens is torch.int64"),
        ({"mixed_qkv": torch.zeros(2, SPEC.conv_dim)}, r"mixed_qkv has shape \(2, 192\) with 2 dimensions; pass \[B, QL, 192\]"),
        ({"mixed_qkv": torch.zeros(2, 1, SPEC.conv_dim, dtype=torch.bfloat16)}, "mixed_qkv is torch.bfloat16"),
        ({"g": torch.zeros(2, 2, 4)}, r"g is .* of shape \(2, 2, 4\)"),
        ({"beta": torch.zeros(2, 1, 4, device="meta")}, "beta is on meta, the states are on cpu; put both on one device"),
        ({"out": torch.zeros(2, 1, 4, 31)}, "out is .* of shape"),
        ({"trace": make_trace(SPEC, 2, 2)}, "trace.states is .* of shape"),
        ({"trace": StepTrace(make_trace(SPEC, 2, 1).states, torch.zeros(2, 192, 3))}, "trace.conv_inputs is .* of shape"),
    ],
)
def test_wrong_input_is_named_and_nothing_is_written(change: dict, message: str) -> None:
    p, start = StepCase(SPEC, (1, 2)).make(), StepCase(SPEC, (1, 2)).make()
    arguments = {"mixed_qkv": p.mixed_qkv, "g": p.g, "beta": p.beta, "conv_weight": p.conv_weight}
    arguments |= {"conv_states": p.conv_states, "states": p.states, "slots": p.slots}
    with pytest.raises(SpecError, match=message):
        delta_step(SPEC, **(arguments | change))
    assert torch.equal(bits(p.states), bits(start.states)) and torch.equal(bits(p.conv_states), bits(start.conv_states))


# The kernels, compiled.


@pytest.fixture
def triton_step() -> Step:
    from atoll.ops.delta.triton_step import delta_step_triton

    return delta_step_triton


@pytest.mark.gpu
@pytest.mark.parametrize("case", GPU_CASES, ids=lambda case: case.name)
def test_the_compiled_kernels_do_what_the_definition_does_and_no_more(case: StepCase, triton_step: Step) -> None:
    assert differences(case, triton_step, "cuda") == []
    assert leaks(case, triton_step, "cuda") == []


@pytest.mark.gpu
def test_replays_in_a_graph_with_other_slots_and_lengths() -> None:
    case = StepCase(REAL_SPEC, (3, 0, 5), query_len=2, query_lens=(2, 1, 2), layout="slot_major")
    p, want = case.make("cuda"), case.make("cuda")
    assert p.query_lens is not None
    live_slots, live_lens = torch.full_like(p.slots, -1), torch.zeros_like(p.query_lens)
    arguments = (p.spec, p.mixed_qkv, p.g, p.beta, p.conv_weight, p.conv_states, p.states, live_slots)
    delta_step(*arguments, query_lens=live_lens, out=p.out)
    graph = torch.cuda.CUDAGraph()
    # Capturing refuses whatever waits for the device.
    with torch.cuda.graph(graph):
        delta_step(*arguments, query_lens=live_lens, out=p.out)
    live_slots.copy_(p.slots)
    live_lens.copy_(p.query_lens)
    graph.replay()
    inputs = (want.spec, want.mixed_qkv, want.g, want.beta, want.conv_weight)
    delta_step(*inputs, want.conv_states, want.states, want.slots, query_lens=want.query_lens, out=want.out)
    assert all(torch.equal(bits(a), bits(b)) for a, b in zip(p.written().values(), want.written().values(), strict=True))


@pytest.mark.gpu
def test_addresses_beyond_two_to_the_31_elements(device: torch.device) -> None:
    """The last of 4,200 slots of 2 MiB, in a pool of 9 GB."""
    case = StepCase(REAL_SPEC, (0,))
    p, num_slots = case.make("cuda"), 4200
    states = torch.zeros((num_slots, *REAL_SPEC.state_shape), device=device)
    conv_states = torch.zeros((num_slots, *REAL_SPEC.conv_state_shape), dtype=REAL_SPEC.dtype, device=device)
    states[-1], conv_states[-1] = p.states[0], p.conv_states[0]
    last = torch.tensor([num_slots - 1], dtype=torch.int32, device=device)
    out = delta_step(REAL_SPEC, p.mixed_qkv, p.g, p.beta, p.conv_weight, conv_states, states, last)
    want = delta_step(REAL_SPEC, p.mixed_qkv, p.g, p.beta, p.conv_weight, p.conv_states, p.states, p.slots)
    assert torch.equal(out, want)
    assert torch.equal(states[-1], p.states[0]) and not states[:-1].any()
