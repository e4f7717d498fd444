"""Colours of the plots: one per method in every plot, and the one that stands out for our rule."""

from collections.abc import Collection

from .paper import METHODS, OUR_RULE

HIGHLIGHT = "#d4003c"
RECOMMENDED = "secureafl-support"
# Muted, so that the highlight stands out. The order is that of METHODS without our rule.
MUTED = ("#8c8c8c", "#a0643c", "#7aa36f", "#8f7fb0", "#3f97a6", "#c2a23a", "#3c5fa8", "#5b6b7b")


def color(name: str, index: int = 0) -> str:
    """The colour of a method; `index` chooses the colour of a name that is no method of the main table."""
    if name == OUR_RULE:
        return HIGHLIGHT
    others = [method for method in METHODS if method != OUR_RULE]
    return MUTED[(others.index(name) if name in others else index) % len(MUTED)]


def highlighted(names: Collection[str]) -> str | None:
    """The one of these rows that stands out: the recommended rule, else our rule in the paper's tables."""
    return next((name for name in (RECOMMENDED, OUR_RULE) if name in names), None)


def line_width(name: str) -> float:
    return 2.8 if name == OUR_RULE else 1.3
