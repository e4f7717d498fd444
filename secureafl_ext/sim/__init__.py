"""The asynchronous world of the paper: clients, attacks, defenses, and the loop between them."""
