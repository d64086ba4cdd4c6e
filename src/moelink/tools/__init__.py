"""Tools over the library: command line (``cli``), benchmarks, plans, the demonstration, pictures (``plots``)."""
