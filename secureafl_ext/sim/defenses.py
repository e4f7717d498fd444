"""Old name of secureafl_ext.defenses, kept for code that imports it."""

from ..defenses import *  # noqa: F403
