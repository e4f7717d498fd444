"""StreamOrder: calls from threads with different CUDA streams run in order of arrival."""

import torch


class StreamOrder:
    """Call `follow` under the server's lock: the caller's stream then waits for the work of the call before."""

    def __init__(self, device: torch.device):
        self._device = device
        self._last = current_stream(device)  # None: not on a GPU

    def follow(self) -> None:
        if self._last is None:
            return
        stream = current_stream(self._device)
        if stream != self._last:
            if not torch.cuda.is_current_stream_capturing():  # a graph's stream must not wait for others
                before = torch.cuda.ExternalStream(self._last, self._device)
                torch.cuda.current_stream(self._device).wait_stream(before)
            self._last = stream


def current_stream(device: torch.device) -> int | None:
    """The handle of this thread's CUDA stream. The stream object would cost some microseconds in every round."""
    return torch._C._cuda_getCurrentRawStream(device.index) if device.type == "cuda" else None
