"""What torch's errors of a device mean: it has too little memory, or this process can't use it any more."""

from __future__ import annotations

import torch

from elastic_train.errors import DeviceFailed, DeviceMemoryExceeded


def begin_peak(device: torch.device) -> None:
    """Peaks are of what comes from now on."""
    if device.type != "cpu":
        torch.accelerator.reset_peak_memory_stats()


def of_device(error: BaseException) -> DeviceMemoryExceeded | DeviceFailed | None:
    """What torch's own error of a device means, with the peak since `begin_peak`; None for others."""
    if isinstance(error, torch.AcceleratorError):
        return DeviceFailed(device=_name(), said=_line(error))
    if not isinstance(error, torch.OutOfMemoryError):
        return None
    _, room = torch.accelerator.get_memory_info()
    return DeviceMemoryExceeded(
        device=_name(),
        said=_line(error),
        peak=int(torch.accelerator.max_memory_allocated()),
        room=int(room),
    )


def _name() -> str:
    return str(torch.accelerator.current_accelerator())


def _line(error: BaseException) -> str:
    return str(error).splitlines()[0]
