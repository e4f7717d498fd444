"""Learning tasks: data sets, their readers, how clients share them, and the models."""
