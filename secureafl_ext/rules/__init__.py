"""Row-wise aggregation rules weigh whole updates by their inner products. Coordinate-wise rules are ops (csrc)."""
