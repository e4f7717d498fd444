"""`secureafl audit`: check an audit log, and decide a stretch of it again."""

import argparse
from datetime import UTC, datetime

from ..audit import facts
from ..audit.replays import DifferenceError, load, replay
from ..audit.summary import verify
from ..operate.verdict import UPLOADS
from .errors import say

USAGE = "verify FOLDER [--expect HASH] | replay FOLDER --checkpoint FILE [--until VERSION] [--device DEVICE]"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    about = "verify: check the chain of the log; replay: run its uploads again, from a checkpoint on"
    parser.add_argument("what", choices=COMMANDS, help=about)
    parser.add_argument("folder", metavar="FOLDER", help="the folder that Audited was given")
    about = "verify: fail unless the chain has this head hash, which was noted earlier"
    parser.add_argument("--expect", metavar="HASH", help=about)
    parser.add_argument("--checkpoint", metavar="FILE", help="replay: a file of save, or of the Flower loop")
    parser.add_argument("--until", metavar="VERSION", type=int, help="replay: stop at this version (default: the end)")
    parser.add_argument("--device", default="cpu", help="replay: where the server runs (default: %(default)s)")


def audit(arguments: argparse.Namespace) -> int:
    """check an audit log (verify), or run its uploads again from a checkpoint and compare (replay)"""
    return COMMANDS[arguments.what](arguments)


def show_chain(arguments: argparse.Namespace) -> int:
    """1 if the chain is broken."""
    try:
        found = verify(arguments.folder, arguments.expect)
    except ValueError as problem:
        say(str(problem))
        return 1
    kinds = ", ".join(f"{found.kinds[kind]:,} {kind.replace('_', ' ')}" for kind in UPLOADS)
    others = ", ".join(f"{count:,} {kind}" for kind, count in sorted(found.kinds.items()) if kind not in UPLOADS)
    print(f"lines    {found.lines:,} in {found.files:,} files, one chain")
    print(f"uploads  {sum(found.kinds[kind] for kind in UPLOADS):,}: {kinds}")
    print(f"others   {others}")
    print(f"first    {when(found.first)}")
    print(f"last     {when(found.last)}")
    print(f"head     {found.head}")
    if found.half:
        print(f"and {found.half:,} bytes of half a line: a crash, or a write under way")
    return 0


def show_replay(arguments: argparse.Namespace) -> int:
    """1 if a decision differs."""
    if arguments.checkpoint is None:
        raise ValueError("audit replay: --checkpoint must be a file, got none")
    server, place = load(arguments.checkpoint, arguments.folder, arguments.device)
    changed = facts.changed_settings(place.line.settings, facts.settings_of(server))
    if changed:
        say(f"the settings of the checkpoint are not those of the log: {changed}")
        return 1
    try:
        repeated = replay(server, arguments.folder, place, until=arguments.until)
    except DifferenceError as difference:
        say(str(difference))
        return 1
    print(f"{repeated.uploads:,} uploads decided again, all equal")
    print(f"version  {server.version}")
    print(f"model    {facts.sha256(facts.bytes_of(server.model))}")
    return 0


def when(seconds: float | None) -> str:
    """A time in UTC, or the number itself if a forged line has one beyond the calendar."""
    try:
        return "none" if seconds is None else f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M:%S} UTC"
    except (OverflowError, OSError, ValueError):
        return str(seconds)


COMMANDS = {"verify": show_chain, "replay": show_replay}
