"""Checkpoints: one file written whole or not at all, and the checks that its state passes before a server takes it."""
