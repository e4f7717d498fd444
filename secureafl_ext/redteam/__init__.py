"""An adversary that searches: the space of its attacks, the search, the worst attack in a results file."""
