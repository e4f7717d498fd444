"""Settings as the command line that repeats them."""

import shlex
from dataclasses import fields

from ..defenses.tuned import tuned_options
from ..sim.effects import idle
from ..sim.options import OPTIONS
from ..sim.settings import Settings


def command_line(settings: Settings) -> str:
    """`secureafl run ..` with a flag for every setting that is not the default of that command. An option without
    effect is left out: the command would refuse it, and a search may have tried it."""
    usual, words = Settings(), ["secureafl", "run"]
    without_effect = [(part.field, part.option) for part in idle(settings.resolve())]
    for field in fields(Settings):
        flag, value = f"--{field.name.replace('_', '-')}", getattr(settings, field.name)
        if field.name in OPTIONS:
            for name, inner in value.items():
                if (field.name, name) in without_effect:
                    continue
                words += [flag[:-1], f"{name}={_text(inner)}"]
        elif value == getattr(usual, field.name):
            continue
        elif isinstance(value, bool):
            words.append(flag if value else f"--no-{flag[2:]}")
        else:
            words += [flag, _text(value)]
    if not tuned_options(settings.defense, settings.dataset).keys() <= settings.defense_options.keys():
        words.append("--untuned")  # otherwise `run` would add the options that are missing here
    return shlex.join(words)


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
