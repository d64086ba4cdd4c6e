"""Programs over the library: the command line, benchmarks, sizes on paper, a demonstration, pictures."""
