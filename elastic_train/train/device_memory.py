"""What a device's memory was filled to: the figure that an error of it is told with."""

from __future__ import annotations

import torch

from elastic_train.errors import DeviceMemoryExceeded


def begin_peak(device: torch.device) -> None:
    """Peaks are of what comes from now on."""
    if device.type != "cpu":
        torch.accelerator.reset_peak_memory_stats()


def exceeded(error: BaseException) -> DeviceMemoryExceeded | None:
    """What torch's error of a device's memory means, with the peak since `begin_peak`; None for others."""
    if not isinstance(error, torch.OutOfMemoryError):
        return None
    _, room = torch.accelerator.get_memory_info()
    return DeviceMemoryExceeded(
        device=str(torch.accelerator.current_accelerator()),
        said=str(error).splitlines()[0],
        peak=int(torch.accelerator.max_memory_allocated()),
        room=int(room),
    )
