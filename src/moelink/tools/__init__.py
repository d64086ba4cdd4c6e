"""Tools over the library: command line (``cli``), plans, the demonstration, pictures (``plots``)."""
