"""Rules that weigh whole updates by their inner products. The coordinate-wise ones are ops (csrc)."""
