"""A Flower app: part of the fleet sends poisoned models, and the server takes each reply as it comes."""
