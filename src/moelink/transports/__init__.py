"""Ways to move bytes between ranks: ``base`` is the interface, ``collective`` and ``symmetric`` implement it."""
