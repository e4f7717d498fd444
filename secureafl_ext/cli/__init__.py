"""The command `secureafl`."""
