"""Where the tests lie, and what they are about."""

from pathlib import Path

HERE = Path(__file__).parent  # with the helpers that several rooms share, and the programs that tests start
ROOT = HERE.parent  # of the repository
