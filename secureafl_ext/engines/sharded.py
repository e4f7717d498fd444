"""A server whose coordinates are split over the ranks of a process group: their messages, rounds and checkpoints."""

import secrets
import zlib
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from .. import _C
from ..checkpoint import files
from ..config import Config
from .fused import Fused

# What ranks do together. One that was called with a mistake, or failed before it changed anything, does the last.
CALLS = ("SecureAFL", "submit", "forget", "estimates", "state_dict", "load_state_dict", "save", "refuse")
PLACES = 4  # numbers that each rank tells the others: its call, and up to three facts that must be the same on all
SLICED = ("models", "last_updates", "last_models", "dw", "dg")  # of a state; the rest of it is the same on all ranks
JUDGED = 5  # sums over an update that its verdict depends on (csrc/round/verdict.h)


def bounds(size: int, rank: int, ranks: int) -> tuple[int, int]:
    """Where the slice of a rank begins and ends: one after the other, no two lengths more than 1 apart."""
    each, more = divmod(size, ranks)
    begin = rank * each + min(rank, more)
    return begin, begin + each + (rank < more)


def shard(tensor: Tensor, process_group: "dist.ProcessGroup") -> Tensor:
    """This rank's slice of a tensor (.., d) that every rank has whole: a view."""
    begin, end = bounds(tensor.shape[-1], dist.get_rank(process_group), dist.get_world_size(process_group))
    return tensor[..., begin:end]


def checksum(state: dict[str, Tensor], numbers: dict[str, int]) -> int:
    """Of what must be the same on all ranks: names, numbers, and tensors but for the slices."""
    total = zlib.crc32(repr((sorted(state), numbers)).encode())
    for name in sorted(set(state) - set(SLICED)):
        total = zlib.crc32(state[name].cpu().contiguous().reshape(-1).view(torch.uint8).numpy(), total)
    return total


def gather(tensor: Tensor, process_group: "dist.ProcessGroup") -> Tensor:
    """The whole (.., d) of what every rank has a slice of, on every rank. Collective."""
    lengths = torch.zeros(dist.get_world_size(process_group), dtype=torch.int64, device=tensor.device)
    lengths[dist.get_rank(process_group)] = tensor.shape[-1]
    dist.all_reduce(lengths, group=process_group)
    lengths = lengths.tolist()
    padded = torch.nn.functional.pad(tensor.detach(), (0, max(lengths) - tensor.shape[-1])).contiguous()
    parts = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(parts, padded, group=process_group)
    return torch.cat([part[..., :length] for part, length in zip(parts, lengths, strict=True)], -1)


class Ranks:
    """The processes of a group, and the one kind of message between them: an all-reduced vector.

    First comes a place for every rank, where it alone puts what it is about to do; then sums. So all know that they
    agree before any of them changes its state, and a mistake on one rank is an error on all.
    """

    def __init__(self, process_group: "dist.ProcessGroup", device: torch.device | None):
        if not isinstance(process_group, dist.ProcessGroup):
            got = type(process_group).__name__
            raise ValueError(f"SecureAFL: process_group must be a group that this process is a member of, got {got}")
        spoken = "cuda" if dist.get_backend(process_group) == "nccl" else "cpu"
        self.group, self.device = process_group, device or torch.device(spoken)
        self.rank, self.count = dist.get_rank(process_group), dist.get_world_size(process_group)

    def bounds(self, size: int) -> tuple[int, int]:
        """Of this rank's slice."""
        return bounds(size, self.rank, self.count)

    def meet(self, call: str, facts: dict[str, int], sums: Tensor) -> Tensor:
        """The sums of all ranks; an error if they do not all make this call with these facts."""
        told, sums = self._exchange([CALLS.index(call), *facts.values()], sums)
        who, others = f"SecureAFL.{call}" if call != "SecureAFL" else call, "nothing has changed on any rank"
        refused = [rank for rank, (what, *_) in enumerate(told) if CALLS[what] == "refuse"]
        if refused:
            raise ValueError(f"{who}: rank {refused[0]} refused or failed, and says why itself; {others}")
        for place, name in enumerate(("call", *facts)):
            column = [numbers[place] for numbers in told]
            if len(set(column)) > 1:
                values = [CALLS[number] for number in column] if place == 0 else column
                got = ", ".join(f"{value} on rank {rank}" for rank, value in enumerate(values))
                raise ValueError(f"{who}: {name} must be the same on all ranks, got {got}; {others}")
        return sums

    def refuse(self, width: int) -> None:
        """Tell the others, who wait for a message with so many sums, that there will be an error."""
        self._exchange([CALLS.index("refuse")], self.zeros(width))

    def start(self, settings: object, size: int) -> None:
        """An error unless all ranks have the same settings and the slices that `shard` gives."""
        sizes = self.zeros(self.count)
        sizes[self.rank] = size
        sizes = self.meet("SecureAFL", {"settings": zlib.crc32(repr(settings).encode())}, sizes).long().tolist()
        edges = [bounds(sum(sizes), rank, self.count) for rank in range(self.count)]
        expected = [end - begin for begin, end in edges]
        if sizes != expected:
            slices = f"the slices of {sum(sizes)} coordinates that shard gives, {expected} on the ranks"
            raise ValueError(f"SecureAFL: model must be {slices}, got {sizes}")

    def zeros(self, width: int) -> Tensor:
        return torch.zeros(width, dtype=torch.float64, device=self.device)

    def _exchange(self, numbers: list[int], sums: Tensor) -> tuple[list[list[int]], Tensor]:
        """(what each rank told, the sums of all)"""
        places = torch.zeros(self.count, PLACES, dtype=torch.float64)  # exact up to 2^53
        places[self.rank, : len(numbers)] = torch.tensor(numbers, dtype=torch.float64)
        message = torch.cat([places.flatten().to(self.device), sums])
        try:
            dist.all_reduce(message, group=self.group)
            told = message[: places.numel()].long().tolist()  # waits for the device, so that nobody runs ahead
        except RuntimeError as error:
            what = "a message between the ranks failed: one of them has ended, hangs or makes another call"
            raise RuntimeError(f"SecureAFL: {what}; end all of them and load the last checkpoint") from error
        return [told[i : i + PLACES] for i in range(0, len(told), PLACES)], message[places.numel() :]


def ranks_of(process_group: "dist.ProcessGroup | None", device: torch.device | None) -> Ranks | None:
    return None if process_group is None else Ranks(process_group, device)


class Telling:
    """`with` this, an error is told to the other ranks, who wait for a message with so many sums; then raised here."""

    def __init__(self, ranks: Ranks | None, width: int | None = None):
        self.ranks, self.width = ranks, width

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, *_) -> None:
        if kind and issubclass(kind, Exception):
            self.tell()

    def tell(self) -> None:
        if self.ranks:
            self.ranks.refuse(self.width)


class Sharded(Fused):
    """A fused round over this rank's coordinates, by the sums over all of them.

    The sums of a pass are first needed for the estimates of the round after it. So they wait for that one's message, or
    for that of whoever wants to see the estimates or the state before: meet, then look or go on.
    """

    def __init__(self, config: Config, clients: int, size: int, device: torch.device, ranks: Ranks):
        super().__init__(config, clients, size, device)
        self.ranks = ranks
        count = _C.pass_sums(self.slots.shape[2], config.memory)
        self._changes = ranks.zeros(count)  # of the last round, on this rank
        self._verdict = torch.zeros(_C.VERDICT_BYTES, dtype=torch.uint8, device=device)
        self._waiting = False  # whether these two are still to be worked in
        self._judged = ranks.zeros(JUDGED)
        self.telling = Telling(ranks, JUDGED + count)

    def meet(self, call: str, facts: dict[str, int], sums: Tensor | None = None) -> Tensor:
        """The message: ends the round before, and gives the sums (5) of all ranks."""
        sums = self.ranks.zeros(JUDGED) if sums is None else sums
        sums = self.ranks.meet(call, facts, torch.cat([sums, self._changes]))
        if self._waiting:
            torch.ops.secureafl.renew_(self._verdict, sums[JUDGED:], *self._per_client, self.config.trust)
            self._waiting = False
        return sums[:JUDGED]

    def judge(self, facts: dict[str, int], client: int, update: Tensor, trained_on: Tensor | None) -> None:
        """The message of a round, which is to follow; none is if the model trained on is no longer kept."""
        sums = None
        if trained_on is not None:
            with self.telling:
                sums = torch.ops.secureafl.update_sums(update, self._clients[client], trained_on, self.last)
        self._judged = self.meet("submit", facts, sums)

    def round(self, client: int, update: Tensor, trained_on: Tensor, models: Tensor, now: int, new: int):
        judged = self.factors, self.recorded, self.counts, self._arrived
        arguments = update, self._clients[client], trained_on, now, new, models, *self._past, *judged, *self._settings
        outcome = torch.ops.secureafl.apply_(self._judged, self._verdict, self._changes, *arguments)
        self._waiting = True
        return outcome

    def forget(self, client: int) -> None:
        """After a message, so that the last round has ended: what it left for the next one is of no more use."""
        super().forget(client)
        for kept in (self._changes, self._verdict, self._judged):
            kept.zero_()

    def _take_products(self, model: Tensor) -> None:
        super()._take_products(model)
        for products in (self.gram, self.along):
            dist.all_reduce(products, group=self.ranks.group)


def save(engine: Sharded, path: Path, version: int, describe: Callable[[], tuple[dict, dict]]) -> None:
    """Every rank writes its slices beside `path`; when all have, the first writes `path`, which names them.

    So no rank needs room for more than it has, and until that last file is renamed the older checkpoint is whole, and
    the newer from then on. describe() -> (tensors, about), asked when the round before has ended.
    """
    facts = {"file": zlib.crc32(path.name.encode()), "version": version}
    ranks = engine.ranks
    drawn = ranks.zeros(JUDGED)
    drawn[0] = secrets.randbits(52) if ranks.rank == 0 else 0  # one name for all: a sum of one number
    token = int(engine.meet("save", {**facts, "step": 1}, drawn)[0])
    names = [files.shard_name(path, token, rank, ranks.count) for rank in range(ranks.count)]
    own = path.with_name(names[ranks.rank])
    try:
        with engine.telling:
            tensors, about = describe()
            if ranks.rank == 0:
                files.clear(path)
            files.write_file(own, {name: tensors.pop(name) for name in SLICED}, {})
        engine.meet("save", {**facts, "step": 2})
    except BaseException:
        own.unlink(missing_ok=True)  # nothing names it yet; after this step something may
        raise
    if ranks.rank == 0:
        with engine.telling:
            files.write(path, tensors, about, names)
    engine.meet("save", {**facts, "step": 3})
