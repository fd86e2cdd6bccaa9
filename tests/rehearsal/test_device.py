"""The rehearsal device itself: what it must find is planted here, and found."""

from __future__ import annotations

import ctypes
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from elastic_train.testing.gloo_pool import GlooPool
from elastic_train.testing.gloo_worker import Died
from elastic_train.testing.rehearsal.build import load_library
from elastic_train.testing.rehearsal.device import delays, held

pytestmark = pytest.mark.ring1
State = dict[str, Any]
DEVICE = "rehearsal"


def alone(pool: GlooPool, fn: Callable[..., Any], *args: Any) -> Any:
    return pool.run(fn, *args, ranks=[0])[0]


def read_by_address(state: State) -> bytes:
    value = torch.arange(4, device=DEVICE)
    torch.accelerator.synchronize()
    return ctypes.string_at(value.data_ptr(), 8)


def test_a_host_that_reads_memory_of_the_device_faults(pool: GlooPool) -> None:
    outcome = pool.call_async(read_by_address, ranks=[0]).outcomes()[0]
    assert isinstance(outcome, Died), outcome
    assert outcome.exitcode == -signal.SIGSEGV


def refused_reads(state: State) -> list[str]:
    value, told = torch.arange(4.0, device=DEVICE), []
    for read in (
        lambda: value.numpy(),
        lambda: value + torch.ones(4),
        lambda: torch.ones(4).copy_(value).add_(value),
        lambda: value + torch.ones(4, device=f"{DEVICE}:1"),
    ):
        with pytest.raises((TypeError, RuntimeError)) as raised:
            read()
        told.append(str(raised.value))
    return told


def test_tensors_of_the_host_and_of_other_devices_are_refused(pool: GlooPool) -> None:
    told = alone(pool, refused_reads)
    assert "convert rehearsal" in told[0]
    assert all("same device" in words for words in told[1:]), told


def training(state: State, device: str, steps: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Embedding(11, 8), nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 11)
    )
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses: list[torch.Tensor] = []
    for _ in range(steps):
        taken = torch.randint(0, 11, (5, 6)).to(device)
        loss = nn.functional.cross_entropy(model(taken).flatten(0, 1), taken.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [float(x) for x in losses], {name: value.cpu() for name, value in model.state_dict().items()}


def trained(state: State) -> None:
    expected, known = training(state, "cpu", 4)
    losses, values = training(state, DEVICE, 4)
    torch.testing.assert_close(losses, expected)
    torch.testing.assert_close(values, known)
    with delays(0.002, seed=3):
        late, same = training(state, DEVICE, 4)
    assert late == losses
    assert all(torch.equal(values[name], same[name]) for name in values)


def test_a_model_trains_as_on_the_cpu_and_bit_by_bit_alike_with_delays(pool: GlooPool) -> None:
    alone(pool, trained)


def copied_beside_an_update(state: State, ordered: bool) -> list[float]:
    """A copy on a side stream of what the default stream is about to write."""
    value = torch.zeros(1000, device=DEVICE)
    kept = torch.empty(1000, pin_memory=True)
    side, default = torch.Stream(DEVICE), torch.accelerator.current_stream(DEVICE)
    torch.accelerator.synchronize()
    with held(default):
        value.add_(1)
        if ordered:
            side.wait_stream(default)
        with side:
            kept.copy_(value, non_blocking=True)
        if not ordered:
            side.synchronize()
    side.synchronize()
    torch.accelerator.synchronize()
    return kept.unique().tolist()


def test_a_copy_that_no_event_orders_behind_an_update_is_found(pool: GlooPool) -> None:
    assert alone(pool, copied_beside_an_update, True) == [1.0]
    assert alone(pool, copied_beside_an_update, False) == [0.0], "it took what was there before the update"


def torn(state: State) -> bool:
    value = torch.zeros(1 << 16, device=DEVICE)
    kept = torch.empty(1 << 16, pin_memory=True)
    side = torch.Stream(DEVICE)
    with delays(0.01, seed=1):
        for number in range(40):
            with side:
                kept.copy_(value, non_blocking=True)
            value.fill_(number + 1)  # nothing says that the copy comes first
            torch.accelerator.synchronize()
            if len(kept.unique()) > 1:
                return True
    return False


def test_delays_tear_a_copy_that_is_written_over(pool: GlooPool) -> None:
    assert alone(pool, torn)


def freed_while_read(state: State, said: bool) -> bool:
    """Whether a copy on a side stream got its tensor, which was freed meanwhile."""
    value = torch.full((1000,), 7.0, device=DEVICE)
    kept = torch.empty(1000, pin_memory=True)
    torch.accelerator.synchronize()
    side = torch.Stream(DEVICE)
    with held(side):
        with side:
            kept.copy_(value, non_blocking=True)
        if said:
            value.record_stream(side)
        del value
        torch.zeros(1000, device=DEVICE)
        torch.accelerator.current_stream(DEVICE).synchronize()
    side.synchronize()
    return bool((kept == 7.0).all())


def test_memory_that_is_freed_while_another_stream_reads_it_is_found(pool: GlooPool) -> None:
    assert alone(pool, freed_while_read, True)
    assert not alone(pool, freed_while_read, False)


def memory(state: State) -> tuple[str, int, int]:
    load_library().set_limit(1, 1 << 20)
    with torch.device(f"{DEVICE}:1"):
        torch.accelerator.reset_peak_memory_stats(1)
        before = torch.accelerator.memory_allocated(1)
        with pytest.raises(torch.OutOfMemoryError) as raised:
            torch.empty(1 << 21, dtype=torch.uint8)
        half = torch.empty(1 << 19, dtype=torch.uint8)
        del half
        peak = torch.accelerator.max_memory_allocated(1) - before
    load_library().set_limit(1, 1 << 33)
    return str(raised.value), peak, torch.accelerator.memory_allocated(1) - before


def test_a_limit_raises_torchs_own_error_and_the_peak_is_measured(pool: GlooPool) -> None:
    words, peak, left = alone(pool, memory)
    assert "out of memory" in words
    assert (peak, left) == (1 << 19, 0)


def drawn(state: State) -> bool:
    accelerator = torch.get_device_module(DEVICE)
    torch.manual_seed(5)
    expected, host = torch.randn(8), torch.get_rng_state()
    torch.manual_seed(5)
    before = accelerator.get_rng_state()
    first = torch.randn(8, device=DEVICE)
    dropped = nn.functional.dropout(torch.ones(64, device=DEVICE))
    assert not torch.equal(torch.get_rng_state(), host), "the host's generator was drawn from"
    accelerator.set_rng_state(before)
    again = torch.randn(8, device=DEVICE)
    own = torch.randn(8, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(5))
    assert torch.equal(dropped.cpu(), nn.functional.dropout(torch.ones(64, device=DEVICE)).cpu())
    return torch.equal(first.cpu(), expected) and torch.equal(first, again) and torch.equal(first, own)


def test_the_device_draws_from_a_generator_of_its_own(pool: GlooPool) -> None:
    assert alone(pool, drawn)


def mixed(state: State) -> tuple[torch.dtype, torch.dtype, torch.dtype]:
    layer, given = nn.Linear(4, 4).to(DEVICE), torch.randn(2, 4, device=DEVICE, requires_grad=True)
    with torch.autocast(DEVICE, torch.bfloat16):
        out = layer(given)
        loss = nn.functional.mse_loss(out, torch.zeros_like(out))
    loss.backward()
    assert layer.weight.grad is not None
    return out.dtype, loss.dtype, layer.weight.grad.dtype


def test_mixed_precision_lowers_what_torch_lowers_on_accelerators(pool: GlooPool) -> None:
    assert alone(pool, mixed) == (torch.bfloat16, torch.float32, torch.float32)


def asked_as_an_accelerator(state: State) -> dict[str, Any]:
    first, second = torch.Event(DEVICE, enable_timing=True), torch.Event(DEVICE, enable_timing=True)
    first.record()
    second.record()
    torch.accelerator.synchronize()
    convolved = nn.Conv2d(3, 4, 3).to(DEVICE)(torch.randn(1, 3, 8, 8, device=DEVICE, requires_grad=True))
    convolved.sum().backward()
    return {
        "kind": torch.accelerator.current_accelerator(check_available=True).type,  # type: ignore[union-attr]
        "count": torch.accelerator.device_count(),
        "timed": first.elapsed_time(second) >= 0,
        "pinned": torch.empty(3, pin_memory=True).is_pinned(),
        "plain": torch.empty(3).is_pinned(),
        "moved": torch.ones(3, device=DEVICE).to(f"{DEVICE}:1").sum().item(),
        "shape": tuple(convolved.shape),
        "saved": torch.equal(torch.arange(3, device=DEVICE).clone().cpu(), torch.arange(3)),
    }


def test_torch_knows_it_as_its_accelerator(pool: GlooPool) -> None:
    assert alone(pool, asked_as_an_accelerator) == {
        "kind": DEVICE,
        "count": 2,
        "timed": True,
        "pinned": True,
        "plain": False,
        "moved": 3.0,
        "shape": (1, 4, 6, 6),
        "saved": True,
    }


def failed_late(state: State) -> str:
    value = torch.zeros(3, device=DEVICE)
    value.index_fill_(0, torch.tensor([9], device=DEVICE), 1.0)  # the host doesn't hear of it yet
    with pytest.raises(RuntimeError) as raised:
        torch.accelerator.synchronize()
    return str(raised.value)


def test_an_operation_that_fails_on_the_device_is_heard_of_at_the_next_wait(pool: GlooPool) -> None:
    assert "failed earlier" in alone(pool, failed_late)
