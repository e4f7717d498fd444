"""Ranks: the processes that share a server, and the message with which they agree on every call."""

import weakref
import zlib
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from ..validation import describe, is_dense

# Collective calls. "refuse" is sent by a rank whose call raised an error before it changed anything.
CALLS = (
    *("SecureAFL", "submit", "forget", "estimates", "state_dict", "load_state_dict", "save", "refuse", "leave"),
    "lr",  # set to another value
    "refresh",  # of rule="support", at the end of a round
)
BEHIND = "the server's version"  # the fact that differs if a rank has missed a round
REPORT = 4  # numbers that each rank reports: its call, and up to three facts that must be the same on all
# Tensors of a state that are split over the ranks, if its settings have them.
SLICED = ("models", "last_updates", "last_models", "dw", "dg", "centre", "mean_updates")


def bounds(size: int, rank: int, ranks: int) -> tuple[int, int]:
    """Begin and end of a rank's slice. Slices are contiguous, and their lengths differ by at most 1."""
    each, more = divmod(size, ranks)
    begin = rank * each + min(rank, more)
    return begin, begin + each + (rank < more)


def shard(tensor: Tensor, process_group: "dist.ProcessGroup | None" = None) -> Tensor:
    """This rank's slice of a tensor (.., d) that every rank has whole: a view. Without a group: of the default one."""
    begin, end = bounds(tensor.shape[-1], dist.get_rank(process_group), dist.get_world_size(process_group))
    return tensor[..., begin:end]


def gather(tensor: Tensor, process_group: "dist.ProcessGroup | None" = None) -> Tensor:
    """The whole tensor (.., d) from the slices of all ranks, on every rank. Collective."""
    fits = is_dense(tensor) and tensor.dim() > 0
    kind = zlib.crc32(repr((tensor.dtype, *tensor.shape[:-1])).encode()) if fits else -1
    device = tensor.device if fits else _message_device(process_group)
    # gloo ends the process if ranks send tensors of different sizes. So they first exchange lengths and kinds.
    reports = torch.zeros(dist.get_world_size(process_group), 2, dtype=torch.int64, device=device)
    reports[dist.get_rank(process_group)] = torch.tensor([tensor.shape[-1] if fits else 0, kind])
    dist.all_reduce(reports, group=process_group)
    lengths: list[int] = reports[:, 0].tolist()
    if not fits or (reports[:, 1] != kind).any():
        expected = "a tensor (.., d) whose dtype and other lengths are the same on all ranks"
        raise ValueError(f"gather: tensor must be {expected}, got {describe(tensor)} on this one")
    padded = torch.nn.functional.pad(tensor.detach(), (0, max(lengths) - tensor.shape[-1])).contiguous()
    parts = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(parts, padded, group=process_group)
    return torch.cat([part[..., :length] for part, length in zip(parts, lengths, strict=True)], -1)


def settings_checksum(settings: object) -> int:
    """CRC by which ranks tell whether they have the same settings."""
    return zlib.crc32(repr(settings).encode())


def checksum(state: Mapping[str, Tensor], numbers: Mapping[str, int]) -> int:
    """CRC of the parts of a state that are the same on all ranks: names, numbers, and tensors that are not split."""
    total = zlib.crc32(repr((sorted(state), numbers)).encode())
    for name in sorted(set(state) - set(SLICED)):
        total = zlib.crc32(state[name].cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data, total)
    return total


def _message_device(process_group: "dist.ProcessGroup | None") -> torch.device:
    return torch.device("cuda" if dist.get_backend(process_group) == "nccl" else "cpu")


# How many servers each group has started: two servers of one group may be alike, and their calls must not be mixed up.
_servers: "weakref.WeakKeyDictionary[dist.ProcessGroup, int]" = weakref.WeakKeyDictionary()


class Ranks:
    """The processes of a group, and their one kind of message: an all-reduced vector.

    Its first part has a place for every rank, where that rank alone writes its report; the second part holds sums. So
    all ranks know that they agree before any of them changes its state, and an error on one rank is an error on all.
    """

    def __init__(self, process_group: "dist.ProcessGroup", device: torch.device | None):
        if not isinstance(process_group, dist.ProcessGroup):
            got = type(process_group).__name__
            raise ValueError(f"SecureAFL: process_group must be a group that this process is a member of, got {got}")
        # Weak: torch.distributed owns the group. While others refer to it, destroy_process_group does not end its
        # threads, and a gloo thread that still holds a tensor when Python ends aborts the process.
        self._group = weakref.ref(process_group)
        # A model on another device, such as meta, is refused later. The message about it to the peers needs a device.
        fits = isinstance(device, torch.device) and device.type in ("cpu", "cuda")  # NumPy arrays have a str
        self.device = device if fits and device else _message_device(process_group)
        self._server = 0  # number of this server among those of the group; 0: not started yet
        self.rank, self.count = dist.get_rank(process_group), dist.get_world_size(process_group)

    @property
    def group(self) -> "dist.ProcessGroup":
        group = self._group()
        if group is None:
            raise RuntimeError("SecureAFL: process_group has been destroyed; load the last checkpoint with a new one")
        return group

    def bounds(self, size: int) -> tuple[int, int]:
        """Begin and end of this rank's slice of `size` coordinates."""
        return bounds(size, self.rank, self.count)

    def agree(self, call: str, facts: Mapping[str, int], sums: Tensor) -> Tensor:
        """The sums over all ranks; an error unless all make this call with these facts."""
        reports, sums = self._exchange([self._number_of(call), *facts.values()], sums)
        caller, unchanged = f"SecureAFL.{call}" if call != "SecureAFL" else call, "nothing has changed on any rank"
        made = [divmod(number, len(CALLS)) for number, *_ in reports]  # (server, call) of each rank
        failed = [rank for rank, (_, number) in enumerate(made) if CALLS[number] == "refuse"]
        if failed:
            raise ValueError(f"{caller}: rank {failed[0]} raised an error, see its own message; {unchanged}")
        columns: dict[str, list[int] | list[str]] = {
            "call": [CALLS[number] for _, number in made],
            "server": [f"number {server} of the group" for server, _ in made],
            **{name: [numbers[1 + place] for numbers in reports] for place, name in enumerate(facts)},
        }
        for name, column in columns.items():
            if len(set(column)) > 1:
                got = ", ".join(f"{value} on rank {rank}" for rank, value in enumerate(column))
                if name == BEHIND:
                    unchanged = "a rank failed in the middle of a round: load the last checkpoint on all of them"
                raise ValueError(f"{caller}: {name} must be the same on all ranks, got {got}; {unchanged}")
        return sums

    def _number_of(self, call: str) -> int:
        return CALLS.index(call) + len(CALLS) * self._server

    def refuse(self, width: int) -> None:
        """Report an error to the peers, which wait for a message with `width` sums."""
        self._exchange([self._number_of("refuse")], self.zeros(width))

    def agree_on_start(self, settings: object, size: int) -> None:
        """An error unless all ranks have the same settings and the slices that `shard` gives."""
        own = self.zeros(self.count)
        own[self.rank] = size
        sizes = self.agree("SecureAFL", {"settings": settings_checksum(settings)}, own).long().tolist()
        edges = [bounds(sum(sizes), rank, self.count) for rank in range(self.count)]
        expected = [end - begin for begin, end in edges]
        if sizes != expected:
            slices = f"the slices of {sum(sizes)} coordinates that shard gives, {expected} on the ranks"
            raise ValueError(f"SecureAFL: model must be {slices}, got {sizes}")
        self._server = _servers[self.group] = _servers.get(self.group, 0) + 1

    def zeros(self, width: int) -> Tensor:
        return torch.zeros(width, dtype=torch.float64, device=self.device)

    def padded(self, sums: Tensor | None, width: int) -> Tensor:
        """(width): these sums, if any, then zeros."""
        return self.zeros(width) if sums is None else torch.cat([sums, self.zeros(width - len(sums))])

    def _exchange(self, numbers: list[int], sums: Tensor) -> tuple[list[list[int]], Tensor]:
        """(the report of each rank, the sums over all ranks)"""
        group = self.group
        places = torch.zeros(self.count, REPORT, dtype=torch.float64)  # exact up to 2^53
        places[self.rank, : len(numbers)] = torch.tensor(numbers, dtype=torch.float64)
        message = torch.cat([places.flatten().to(self.device), sums])
        try:
            dist.all_reduce(message, group=group)
            flat: list[int] = message[: places.numel()].long().tolist()  # waits for the device: no rank runs ahead
        except RuntimeError as error:
            cause = "a message between the ranks failed: one of them has ended, hangs or makes another call"
            raise RuntimeError(f"SecureAFL: {cause}; end all of them and load the last checkpoint") from error
        return [flat[i : i + REPORT] for i in range(0, len(flat), REPORT)], message[places.numel() :]


def ranks_of(process_group: "dist.ProcessGroup | None", device: torch.device | None) -> Ranks | None:
    return None if process_group is None else Ranks(process_group, device)


class NotifyPeers:
    """Context manager: on an error, notify the peers so that they do not hang, then re-raise.

    width: sums in the message that the peers wait for    Without ranks it does nothing.
    """

    def __init__(self, ranks: Ranks | None, width: int = 0):
        self.ranks, self.width = ranks, width

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind and issubclass(kind, Exception):
            self.notify()

    def notify(self) -> None:
        if self.ranks:
            self.ranks.refuse(self.width)


def notify_at_start(ranks: Ranks | None) -> NotifyPeers:
    """For the time before `agree_on_start`, whose message has one sum per rank."""
    return NotifyPeers(ranks, ranks.count if ranks else 0)
