"""Learning tasks: data sets, their readers, the partition among clients, and the models."""

from .datasets import Dataset
from .readers import Arrays
from .sources import register_dataset

__all__ = ["Arrays", "Dataset", "register_dataset"]
